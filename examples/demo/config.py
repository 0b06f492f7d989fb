"""The settings of a demo run, and the learning rate that follows from them. No torch: the parent needs only this."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

HEAD_WIDTH = 32
MAX_CONTEXT = 4096  # the validation text has room for some such rows
TORCH_STRATEGIES = ("full-shard", "shard-grad-op", "no-shard", "hybrid-shard", "hybrid-shard-zero2")
STRATEGIES = (*TORCH_STRATEGIES, "zero-1", "layer-zero", "layer-zero-nested")
PRECISIONS = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")  # a rank each, on GPUs of their own
RUNTIMES = ("flatparam", "dropin")  # flatparam's own class, or torch's FSDP1 on flatparam's handle
PARTIAL = ".partial"  # the end of the name of a file that is being written
UNIFORM_LOSS = math.log(256)  # nats a byte of a model that knows nothing


class BadSetting(ValueError):
    """A setting out of range; the message is one line for the user."""


@dataclass(frozen=True)
class Config:
    """The settings of a run; every process has them.

    Args: ``micro_batches`` a rank and step, each of ``batch`` sequences, so a step sees
    ``ranks * micro_batches * batch * context`` bytes; ``threads`` for torch, the same in every process;
    ``block`` steps of one run before the next has its turn; ``validate_every`` steps, over ``validation_batches``
    batches a rank, and as often a checkpoint; ``extra_steps`` trained after the end, to compare a reloaded model;
    ``target`` is the validation loss to reach in ``target_steps`` steps (None: it has to fall, no more); with ``kill``
    there is one run, in which a rank is killed.
    Raises: BadSetting when one is out of range.
    """

    ranks: int = 2
    steps: int = 450
    width: int = 128
    depth: int = 6
    context: int = 64
    batch: int = 8
    micro_batches: int = 1
    device: str = "cpu"
    runtime: str = "flatparam"
    strategy: str = "full-shard"
    precision: str = "fp32"
    orig_params: bool = True
    clip: float | None = None
    learning_rate: float = 2e-3
    seed: int = 0
    threads: int = 1
    block: int = 10
    validate_every: int = 50
    validation_batches: int = 8
    extra_steps: int = 5
    host_rounds: int = 4
    host_repeats: int = 25
    target: float | None = 2.4
    target_steps: int = 450
    kill: bool = False
    out: Path = Path("demo-out")

    def __post_init__(self) -> None:
        for name in ("ranks", "steps", "depth", "context", "batch", "micro_batches", "threads"):
            if getattr(self, name) < 1:
                raise BadSetting(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.context > MAX_CONTEXT:
            raise BadSetting(f"--context must be at most {MAX_CONTEXT}, got {self.context}")
        if self.width < HEAD_WIDTH or self.width % HEAD_WIDTH:
            raise BadSetting(f"--width must be a multiple of {HEAD_WIDTH} (one head), got {self.width}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise BadSetting(f"--lr must be a positive number, got {self.learning_rate}")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise BadSetting(f"--clip must be a positive number, got {self.clip}")
        if not 0 <= self.seed < 2**32:
            raise BadSetting(f"--seed must be from 0 to 2**32 - 1, got {self.seed}")
        if self.strategy.startswith("hybrid") and self.ranks % 2:
            raise BadSetting(f"--strategy {self.strategy} shards over pairs of ranks: --ranks must be even")
        if self.is_layer_zero and self.ranks % 2:
            raise BadSetting(f"--strategy {self.strategy} gathers within halves of the ranks: --ranks must be even")
        if self.runtime == "dropin" and self.strategy not in TORCH_STRATEGIES:
            raise BadSetting(f"--strategy {self.strategy} is not one of torch's: it needs --runtime flatparam")
        if self.kill and self.ranks < 2:
            raise BadSetting(f"--kill leaves a rank fewer: --ranks must be at least 2, got {self.ranks}")
        if self.kill and (self.device, self.runtime, self.strategy) != ("cpu", "flatparam", "full-shard"):
            raise BadSetting("--kill needs --device cpu, --runtime flatparam and --strategy full-shard")

    @property
    def heads(self) -> int:
        """The number of attention heads in a block."""
        return self.width // HEAD_WIDTH

    @property
    def backend(self) -> str:
        """The backend of the collectives."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def is_layer_zero(self) -> bool:
        """Whether parameters are gathered over fewer ranks than the optimizer state is sharded over."""
        return self.strategy.startswith("layer-zero")

    @property
    def torch_strategy(self) -> str:
        """The strategy of torch's FSDP1: the same, or the nearest that it has."""
        return self.strategy if self.strategy in TORCH_STRATEGIES else "full-shard"

    @property
    def checkpoint_name(self) -> str:
        """The name of the checkpoint: a folder of ``flatparam.checkpoint``; with torch's runtime a file of torch."""
        return "checkpoint" if self.runtime == "flatparam" else "checkpoint.pt"

    @property
    def adds_in_fp32(self) -> bool:
        """Whether gradients in bf16 are added over micro-batches in fp32."""
        return self.is_layer_zero

    @property
    def exact(self) -> bool:
        """Whether sharded training must equal unsharded training bit for bit.

        A sum of two is order-free, that of more is not, nor are those within a GPU's kernels; and a clipping norm is
        summed in another order.
        """
        return self.ranks <= 2 and self.clip is None and self.device == "cpu"

    @property
    def as_torch(self) -> bool:
        """Whether flatparam must equal torch's FSDP1 bit for bit, because both add in the same order."""
        nested = self.strategy == "layer-zero-nested" and self.ranks > 2
        rounded = self.adds_in_fp32 and self.precision == "bf16" and self.micro_batches > 2  # two round alike
        return not nested and not rounded and self.device == "cpu"

    @property
    def loss_to_reach(self) -> float | None:
        """The validation loss that a run of this length must reach; None: any."""
        return self.target if self.steps >= self.target_steps else None

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak, then flat."""
        warm_up = max(1, self.steps // 10)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, self.steps - warm_up))
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))
