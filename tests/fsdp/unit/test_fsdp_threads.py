"""Two threads in one model, backwards that end in an exception, graphs that outlive their model: right, or refused.

Promises:
- a second thread in a model is refused and changes nothing; a backward after one that raised; graphs that outlive
  their model; a recursive unit's inner exception
"""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import fake_world, script
from torch import nn

from flatparam import _C
from flatparam import FullyShardedDataParallel as FSDP

ELSEWHERE = "another thread is in a forward or backward of this model"


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def unsharded(*steps):
    """The gradients that the unsharded module has after backwards over the data of these steps."""
    module = make()
    for step in steps:
        loss_of(module, data(step, 0)).backward()
    blocks = {name: p for name, p in module.named_parameters() if name.startswith("blocks.")}
    others = [p for name, p in module.named_parameters() if name not in blocks]
    return torch.cat([p.grad.flatten() for p in module.parameters()]), torch.cat(
        [p.grad.flatten() for p in (*others, *blocks.values())]
    )


def in_thread(function):
    """Run it there to its end; what it has raised, or None."""
    raised = []

    def run():
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("synced", [False, True])
def test_a_second_thread_in_backward_is_refused_and_changes_nothing(uo, synced):
    with fake_world(1):
        model = wrap_blocks(make(), use_orig_params=uo)
        raised = []
        others = []

        def meanwhile(grad):
            if not raised and others:
                raised.append(in_thread(others[0].backward))

        model.module.blocks[1].register_forward_hook(lambda m, args, output: output.register_hook(meanwhile) and None)

        def both():
            first = loss_of(model, data(0, 0))
            others.append(loss_of(model, data(1, 0)))
            first.backward()

        if synced:
            both()
        else:
            with model.no_sync():
                both()
        assert isinstance(raised[0], RuntimeError)
        assert ELSEWHERE in str(raised[0])
        torch.testing.assert_close(gradients(model), unsharded(0)[0 if uo else 1])
        loss_of(model, data(2, 0)).backward()
        torch.testing.assert_close(gradients(model), unsharded(0, 2)[0 if uo else 1])


def test_a_backward_while_another_thread_is_in_forward_is_refused():
    with fake_world(1):
        model = wrap_blocks(make(), use_orig_params=True)
        loss = loss_of(model, data(0, 0))
        raised = []
        hook = model.module.blocks[1].register_forward_hook(lambda *_: raised.append(in_thread(loss.backward)))
        loss_of(model, data(1, 0)).backward()
        hook.remove()
        assert ELSEWHERE in str(raised[0])
        torch.testing.assert_close(gradients(model), unsharded(1)[0])


def test_a_hook_that_waits_for_a_thread_which_is_refused():
    """It runs while the units are worked on, which other threads of the same backward wait for."""
    with fake_world(1):
        model = wrap_blocks(make(), use_orig_params=True)
        loss = loss_of(model, data(1, 0))
        param = model.module.blocks[1].module.scale
        for call in (lambda: model(data(2, 0)), loss.backward):
            raised = []
            hook = param.register_post_accumulate_grad_hook(lambda _, call=call, to=raised: to.append(in_thread(call)))
            loss_of(model, data(0, 0)).backward()
            hook.remove()
            assert ELSEWHERE in str(raised[0])
            torch.testing.assert_close(gradients(model), unsharded(0)[0])
            model.zero_grad()


def backward_from(start, loss, raised, i):
    start.wait()
    try:
        loss.backward()
    except RuntimeError as error:
        raised[i] = error


def test_backwards_of_two_threads_at_any_time():
    """Whichever is refused adds nothing; the others are all there."""
    with fake_world(1):
        model = wrap_blocks(make(width=32), use_orig_params=True)
        module = make(width=32)
        for trial in range(20):
            with model.no_sync():
                losses = [loss_of(model, data(2 * trial + i, 0)) for i in range(2)]
                start = threading.Barrier(2)
                raised = [None, None]

                threads = [
                    threading.Thread(target=backward_from, args=(start, loss, raised, i))
                    for i, loss in enumerate(losses)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert any(error is None for error in raised)
            for i, error in enumerate(raised):
                if error is None:
                    loss_of(module, data(2 * trial + i, 0)).backward()
                else:
                    assert ELSEWHERE in str(error)
            torch.testing.assert_close(gradients(model), gradients(module))
            model.zero_grad()
            module.zero_grad()


@pytest.mark.parametrize("uo", [False, True])
def test_a_backward_after_one_that_raised(uo):
    """Of a graph that was there before; as the bare module has no gradients of what did not get to its parameters."""

    class Stop(Exception):
        pass

    def stop(grad):
        raise Stop

    with fake_world(1):
        model = wrap_blocks(make(), use_orig_params=uo)
        broken, whole = (model(data(step, 0)) for step in range(2))
        broken.register_hook(stop)
        loss = whole.square().mean()
        with pytest.raises(Stop):
            broken.square().mean().backward()
        loss.backward()
        torch.testing.assert_close(gradients(model), unsharded(1)[0 if uo else 1])
        assert model.training_state.name == "IDLE"


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("synced", [False, True])
def test_a_graph_keeps_the_units_of_a_deleted_model(uo, synced):
    """The gradients come to the parameters that somebody still has; with the graph, all of it goes."""
    with fake_world(1):
        gc.collect()  # what tests before have left
        before = sum(type(item) is _C.Unit for item in gc.get_objects())
        model = wrap_blocks(make(), use_orig_params=uo)
        params = list(model.parameters())
        if synced:
            loss = loss_of(model, data(0, 0))
        else:
            with model.no_sync():
                loss = loss_of(model, data(0, 0))
        del model
        gc.collect()
        loss.backward()
        found = torch.cat([p.grad.flatten() for p in params])
        torch.testing.assert_close(found, unsharded(0)[0 if uo else 1])
        del loss
        assert sum(type(item) is _C.Unit for item in gc.get_objects()) == before


def test_a_deleted_model_goes_at_once_where_no_graph_waits_for_it():
    with fake_world(1):
        gc.collect()  # what tests before have left
        before = sum(type(item) is _C.Unit for item in gc.get_objects())
        model = wrap_blocks(make())
        loss = loss_of(model, data(0, 0))
        loss.backward()
        del model
        gc.collect()
        assert sum(type(item) is _C.Unit for item in gc.get_objects()) == before
        model = wrap_blocks(make())
        waits = loss_of(model, data(0, 0))
        del model
        del waits
        gc.collect()
        assert sum(type(item) is _C.Unit for item in gc.get_objects()) == before


class Returns(nn.Module):
    """An output is the weight itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight, self.weight


def test_a_unit_that_returns_its_weight_goes_with_its_model():
    with fake_world(1):
        gc.collect()
        before = sum(type(item) is _C.Unit for item in gc.get_objects())
        model = FSDP(Returns())
        outputs = model(torch.ones(3))
        outputs[0].sum().backward()
        del model, outputs
        gc.collect()
        assert sum(type(item) is _C.Unit for item in gc.get_objects()) == before


class Recursive(nn.Module):
    """Calls the unit that it is in; the inner call raises, in its forward or in what looks through its output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.unit = []

    def forward(self, x, how=None):
        if how == "inner forward":
            raise ValueError(how)
        if how == "inner output":
            return {"x": self.layer(x), "recursive": nested(200_000)}  # from Python 3.12 on the stack is the limit
        if how is not None:
            with pytest.raises((ValueError, RecursionError)):
                self.unit[0](x, "inner " + how)
        return self.layer(x)


def nested(depth):
    inner = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize("how", ["forward", "output"])
def test_an_inner_call_of_a_recursive_unit_that_raises(how):
    with fake_world(1):
        torch.manual_seed(0)
        module = Recursive()
        plain = nn.Linear(3, 3)
        plain.load_state_dict(module.layer.state_dict())
        model = FSDP(module, use_orig_params=True)
        module.unit.append(model)
        x = torch.ones(2, 3)
        for _ in range(2):
            model(x, how).sum().backward()
            plain(x).sum().backward()
            torch.testing.assert_close(gradients(model), gradients(plain))
        module.unit.clear()


def end_while_a_thread_waits(folder, rank):
    """A rank whose thread is in a forward that the other rank does not come to."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model = wrap_blocks(make())
    loss_of(model, data(0)).backward()
    if rank == 1:
        sys.stdin.read()
        os._exit(0)
    threading.Thread(target=model, args=(data(1),), daemon=True).start()
    time.sleep(1.0)


@pytest.mark.multiprocess
def test_a_process_may_end_while_a_thread_waits(tmp_path):
    """The thread takes the GIL each second, to see Ctrl-C: where the process ends, that aborted it."""
    ending, other = (script(end_while_a_thread_waits, str(tmp_path), rank, stdin=subprocess.PIPE) for rank in range(2))
    try:
        assert ending.wait(120.0) == 0
    finally:
        ending.kill()
        other.communicate()
