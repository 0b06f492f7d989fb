"""One process of the demo: it does what the parent asks over a socket, and waits in a read in between.

``python -m examples.demo.worker SOCKET PARENT``, started by ``processes``. It ends when the parent does: the kernel
kills it, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import flatparam

from . import checkpoint
from .config import Config
from .data import Corpus, load_text
from .hostcost import HostCost
from .memory import optimizer_bytes, tensor_bytes
from .messages import FLATPARAM, UNSHARDED, Block, Difference, Facts, Memory, Role
from .model import GPT, generate
from .train import Sharded, Trainer, Unsharded, engine_of, wrapper_of

PR_SET_PDEATHSIG = 1


class Worker:
    """The public methods are the commands of the parent. It gives each to all processes of a run at once."""

    def __init__(self, config: Config, role: Role) -> None:
        torch.set_num_threads(config.threads)
        if config.device == "cuda":
            torch.cuda.set_device(role.rank)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a resumed run has the same bits
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if role.run == FLATPARAM and config.runtime == "dropin":
            flatparam.install()
        if role.run != UNSHARDED:
            store = dist.FileStore(str(role.store), config.ranks)
            limit = timedelta(minutes=10)
            dist.init_process_group("gloo", store=store, rank=role.rank, world_size=config.ranks, timeout=limit)
        self._config = config
        self._role = role
        self._corpus = Corpus(config, load_text())
        self._host_cost: HostCost | None = None
        self._trainer = self._untrained()

    def _untrained(self) -> Trainer:
        """A new model and optimizer, of this process's run."""
        config, role = self._config, self._role
        if role.run == UNSHARDED:
            return Unsharded(config, self._corpus)
        return Sharded(config, self._corpus, role.rank, wrapper_of(role.run, config))

    def facts(self) -> Facts:
        """Return the facts about this process for the report."""
        weights = sum(parameter.numel() for parameter in self._trainer.model.parameters())
        return Facts(
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            weights=weights,
            run=self._role.run,
            engine=engine_of(self._trainer.model),
            device=torch.cuda.get_device_name() if self._config.device == "cuda" else "cpu",
        )

    def train(self, first: int, count: int) -> Block:
        """Train on steps ``first`` to ``first + count - 1``."""
        losses, seconds = [], []
        for step in range(first, first + count):
            start = time.perf_counter()
            losses.append(self._trainer.step(step))
            if self._config.device == "cuda":
                torch.cuda.synchronize()  # the optimizer's kernels are of this step
            seconds.append(time.perf_counter() - start)
        return Block(losses, seconds)

    def validate(self) -> list[float]:
        """The validation loss of each share."""
        return self._trainer.validate()

    def memory(self) -> Memory:
        """Return the bytes of this process after the last step."""
        parameters = list(self._trainer.model.parameters())
        return Memory(
            parameters=tensor_bytes(parameters),
            gradients=tensor_bytes(parameter.grad for parameter in parameters),
            optimizer=optimizer_bytes(self._trainer.optimizer),
            peak=torch.cuda.max_memory_allocated() if self._config.device == "cuda" else None,
        )

    def save(self, path: Path, step: int) -> None:
        """Write a checkpoint, in the place of the one at ``path``."""
        checkpoint.save(path, self._trainer.model, self._trainer.optimizer, step)

    def resume(self, path: Path) -> int:
        """Go on from a checkpoint with a new model; returns its step."""
        self._trainer = self._untrained()
        return checkpoint.restore(path, self._trainer.model, self._trainer.optimizer)

    def compare(self, path: Path, other: Path) -> Difference:
        """The largest differences between two checkpoints, each loaded into a new plain model."""
        states = []
        for one in (path, other):
            trainer = Unsharded(self._config, self._corpus)
            checkpoint.restore(one, trainer.model, trainer.optimizer)
            states.append(checkpoint.full_state(trainer.model, trainer.optimizer))
        a, b = states
        return Difference(
            weights=checkpoint.difference(a["model"], b["model"]),
            optimizer=checkpoint.difference(a["optimizer"]["state"], b["optimizer"]["state"]),
        )

    def sample(self, prompt: bytes, length: int) -> str:
        """Text from the plain model."""
        model = self._trainer.model
        if not isinstance(model, GPT):
            raise TypeError(f"expected the unsharded run to be asked for text, got {self._role.run}")
        return generate(model, prompt, length, self._config.seed)

    def host_cost(self) -> list[tuple[float, float]]:
        """Seconds of (bare, wrapped) passes on rank 0; the other ranks only take part in the wrapping."""
        if self._host_cost is None:
            on_host = dataclasses.replace(self._config, device="cpu")
            self._host_cost = HostCost(on_host, wrapper_of(self._role.run, on_host))
        return self._host_cost.measure() if self._role.rank == 0 else []


def end_with(parent: int) -> None:
    """Let the kernel kill this process when ``parent``, which started it, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def serve(connection: Connection) -> None:
    """Answer (result, None) to each command until one is None; an exception is answered (reason, traceback)."""
    try:
        config, role = connection.recv()
        worker = Worker(config, role)
        connection.send((worker.facts(), None))
        while (command := connection.recv()) is not None:
            name, arguments = command
            connection.send((getattr(worker, name)(*arguments), None))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        connection.send((reason, traceback.format_exc()))
        time.sleep(60)  # until the parent kills it: to end now would make other ranks fail too, and hide this reason


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # the groups need no farewell, and nothing is left to save
