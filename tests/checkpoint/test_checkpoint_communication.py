"""A save or a load sends no tensor: bytes are counted at every collective of torch, as Python and as C++ call them."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from checkpoints import STRATEGIES, adam, train, wrapped
from fsdp_models import Model, data, loss_of, make
from gloo import note, run_ranks
from layer_zero_driver import drive, losses
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatparam import checkpoint

pytestmark = pytest.mark.multiprocess

NAMES = [
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list"),
    *("batch_isend_irecv", "gather", "gather_object", "irecv", "isend", "recv", "recv_object_list", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send"),
    *("send_object_list", "_all_gather_base", "_reduce_scatter_base", "monitored_barrier", "barrier"),
]


class Sent(TorchDispatchMode):
    """Counts calls of collectives, and the bytes of their tensors, within the block."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = [], 0

    def add(self, name, arguments):
        self.calls.append(name)
        self.bytes += sum(a.numel() * a.itemsize for a in tree_leaves(arguments) if isinstance(a, torch.Tensor))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if "c10d" in operation.namespace:  # as process groups call them, from C++ too
            self.add(str(operation), (args, kwargs))
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted():
    sent = Sent()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sent)
        for module in (dist, dist.distributed_c10d):
            for name in NAMES:
                function = getattr(module, name, None)
                if function is None:
                    continue

                @functools.wraps(function)
                def call(*args, function=function, name=name, **kwargs):
                    sent.add(name, (args, kwargs))
                    return function(*args, **kwargs)

                stack.callback(setattr, module, name, function)
                setattr(module, name, call)
        yield sent


def nothing(folder):
    for strategy in STRATEGIES:
        for use_orig_params in (True, False):
            note(f"{strategy} {use_orig_params}")
            path = folder / f"{strategy} {use_orig_params}"
            model = wrapped(strategy, use_orig_params, cls=Model)
            optimizer = adam(model)
            with counted() as sent:
                train(model, optimizer, 0, 1)
            assert sent.bytes > 4 * sum(p.numel() for p in make().parameters())  # the count sees what is sent
            assert any(name.startswith("c10d") for name in sent.calls)
            with model.no_sync():
                loss_of(model, data(1)).backward()
            with counted() as sent:
                checkpoint.save(path, model, optimizer, {"step": torch.ones(3)})
                checkpoint.async_save(f"{path} in the background", model, optimizer).wait()
                checkpoint.load(path, model, optimizer)
            assert sent.calls == [], strategy
            assert sent.bytes == 0


def test_no_strategy_sends_tensors(tmp_path):
    run_ranks(nothing, 2, tmp_path)


@pytest.mark.thorough
def test_no_strategy_of_four_ranks_sends_tensors(tmp_path):
    run_ranks(nothing, 4, tmp_path)


def by_hand(folder):
    module = make()
    driver = drive(module, 2)
    optimizer = adam(module)
    with counted() as sent:
        driver.backward(losses(module, 0, 2))
    assert sent.bytes > 0
    optimizer.step()
    optimizer.zero_grad()
    with counted() as sent:
        checkpoint.save(folder / "one", module, optimizer)
        checkpoint.load(folder / "one", module, optimizer)
    assert sent.calls == []


def test_handles_driven_by_hand_send_no_tensors(tmp_path):
    run_ranks(by_hand, 2, tmp_path)
