"""An exception, as of Ctrl-C, at any line of summoning, saving and loading: the model is as before, and trains on.

Oracle: the same steps of a model that nobody has interrupted.

Promises:
- a signal while `no_sync`, `summon_full_params` or `state_dict_type` is left, in contextlib too, leaves none of them
  open; `reset_state()` ends blocks whose end has not run:
  `test_blocks_end_wherever_a_signal_comes_while_they_are_left`, `test_what_nobody_ends_can_be_left`; of the drop-in
  `test_reset_state.py`
"""

import contextlib
import linecache
import signal
import sys
from pathlib import Path

import pytest
import torch
from fsdp_models import data, loss_of, make, wrap_blocks
from gloo import fake_world
from interrupting import Bomb, Interrupted, equal
from torch import nn
from torch.distributed.fsdp import StateDictType

import flatparam
from flatparam import _C, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.errors import StateError
from flatparam.fsdp.unit.summon import _active

INSIDE = Path(flatparam.__file__).parent / "fsdp"
FILES = [str(INSIDE / name) for name in ("unit/summon.py", "wrapper/full_params.py", "states/model.py")]
LEAVING = [contextlib.__file__, *(str(path) for path in INSIDE.rglob("*.py"))]  # wherever a block may be left
NONE = torch.empty(0, 0, 0)
STRIDE = 5  # of the places, so that this takes seconds
PARTS = 3  # which a test each has of these places, so that `make test` has some of all calls


def summon(model, values, **flags):
    with FSDP.summon_full_params(model, **flags):
        pass


CALLS = {
    "summon": lambda model, values: summon(model, values),
    "with_grads": lambda model, values: summon(model, values, with_grads=True),
    "rank0_only": lambda model, values: summon(model, values, with_grads=True, rank0_only=True, writeback=False),
    "state_dict": lambda model, values: model.state_dict(),
    "load_state_dict": lambda model, values: model.load_state_dict(values),
    "of_outer": lambda model, values: nn.Sequential(model).load_state_dict({f"0.{k}": v for k, v in values.items()}),
}


def start(**settings):
    """A model with gradients, and its optimizer."""
    model = wrap_blocks(make(), **settings)
    loss_of(model, data(0)).backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def interrupted(model, call, values, bomb):
    try:
        with bomb:
            CALLS[call](model, values)
    except (Interrupted, KeyboardInterrupt):
        return True
    return False


def go_on(model, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, data(1)).backward()
    optimizer.step()
    with FSDP.summon_full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def now(model):
    """Names, values and gradients."""
    named = list(model.named_parameters())
    return [(name, param.detach().clone(), NONE if param.grad is None else param.grad.clone()) for name, param in named]


def is_end_of_with(place, places):
    """A with statement has a second line event at its end: Python has not come to ``__exit__`` there."""
    path, _, line, _ = place
    first = next(other for other in places if other[2] == line)
    return linecache.getline(path, line).lstrip().startswith("with ") and place != first


@pytest.mark.sweep(6)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("strategy", "orig"), [("FULL_SHARD", True), ("FULL_SHARD", False), ("NO_SHARD", True)])
@pytest.mark.parametrize("part", range(PARTS))
def test_the_model_is_as_before(strategy, orig, call, part):
    settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig}
    with fake_world(2):
        model, optimizer = start(**settings)
        values = {name: value + 1 for name, value in model.state_dict().items()}
        expected = go_on(model, optimizer)
        listing = Bomb(FILES)
        model, _ = start(**settings)
        unchanged = model.state_dict()
        assert not interrupted(model, call, values, listing)
        loaded = [value for _, value, _ in now(model)]
        places = listing.places
        chosen = [place for place in places[part * STRIDE :: PARTS * STRIDE] if not is_end_of_with(place, places)]
        assert len(chosen) > 30
        for k, place in enumerate(chosen):
            model, optimizer = start(**settings)
            before = now(model)
            bomb = Bomb(FILES, place, KeyboardInterrupt if k % 2 else Interrupted)
            assert interrupted(model, call, values, bomb), place
            if call == "of_outer":
                CALLS[call](model, unchanged)  # in a module that is not ours nobody ends it: the next one does
            after = now(model)
            assert not _active, place
            if call == "load_state_dict" and equal(loaded, [value for _, value, _ in after]):
                continue  # all ranks had loaded
            assert [name for name, *_ in before] == [name for name, *_ in after], place
            assert equal([value for _, value, _ in before], [value for _, value, _ in after]), place
            assert equal([grad for *_, grad in before], [grad for *_, grad in after]), place
            assert equal(expected, go_on(model, optimizer)), place


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_what_was_half_loaded_hides_no_exception(error):
    """Data that do not fit are no reason to keep units below as they are loaded."""
    with fake_world(2):
        model, optimizer = start(use_orig_params=True)
        values, before = model.state_dict(), now(model)

        def spoil(module, *args):
            module.first.weight.data = torch.zeros(2, 2)
            raise error("on the way")

        hook = model.blocks[0].module.register_load_state_dict_pre_hook(lambda *args: spoil(model.module))
        with pytest.raises((Interrupted, KeyboardInterrupt), match="on the way"):
            model.load_state_dict(values)
        hook.remove()
        assert not _active
        assert equal([value for _, value, _ in before], [value for _, value, _ in now(model)])
        go_on(model, optimizer)


def test_a_tie_is_told_of_with_gradients_too():
    with fake_world(2):
        model, optimizer = start(use_orig_params=True)
        before = now(model)
        with pytest.raises(ValueError, match="was replaced by"), FSDP.summon_full_params(model, with_grads=True):
            model.blocks[1].module.inner.weight = model.blocks[0].module.inner.weight
        assert equal([grad for *_, grad in before], [grad for *_, grad in now(model)])
        go_on(model, optimizer)


BLOCKS = {
    "no_sync": lambda model: model.no_sync(),
    "summon": lambda model: FSDP.summon_full_params(model),
    "state_dict_type": lambda model: FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "ZERO_1"])
def test_blocks_end_wherever_a_signal_comes_while_they_are_left(block, strategy):
    """In contextlib too, whose ExitStack drops the callbacks that are left, whose generators end with a traceback."""

    def leave(model, bomb):
        try:
            with BLOCKS[block](model):
                sys.settrace(bomb._enter_function)
        except Interrupted:
            pass
        finally:
            sys.settrace(None)

    def keeps(model):
        kinds = [FSDP.get_state_dict_type(model).state_dict_type]
        return kinds, model._unit.summoned, _active[:]

    with fake_world(2):
        settings = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True}
        model, optimizer = start(**settings)
        before, expected = keeps(model), go_on(model, optimizer)
        listing = Bomb(LEAVING, in_exits=True)
        leave(model, listing)
        places = [place for place in listing.places if not is_end_of_with(place, listing.places)]
        for place in places[:: max(1, len(places) // 20)]:
            model, optimizer = start(**settings)
            bomb = Bomb(LEAVING, place, in_exits=True)
            leave(model, bomb)
            assert bomb.exploded, place
            assert keeps(model) == before, place
            assert equal(expected, go_on(model, optimizer)), place


def test_a_signal_in_the_midst_of_steps_of_blocks_leaves_none_open():
    """Real signals, which Python looks at between its instructions: all blocks have ended, gradients are reduced."""

    def interrupt(number, frame):
        raise Interrupted

    with fake_world(2):
        model, optimizer = start(use_orig_params=True)
        expected = go_on(model, optimizer)
        model, optimizer = start(use_orig_params=True)
        before, came, k = signal.signal(signal.SIGALRM, interrupt), 0, 0
        try:
            while came < 60:
                k += 1
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + k * 7 % 100))
                    for _ in range(50):
                        with model.no_sync(), FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                            pass
                except Interrupted:
                    came += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert FSDP.get_state_dict_type(model).state_dict_type is StateDictType.FULL_STATE_DICT
        assert equal(expected, go_on(model, optimizer))


def test_what_nobody_ends_can_be_left():
    """Blocks whose end is lost, as where several signals come: ``reset_state()`` leaves them."""
    with fake_world(2):
        model, optimizer = start(use_orig_params=True)
        expected = go_on(model, optimizer)
        model, optimizer = start(use_orig_params=True)
        lost = model.no_sync()
        lost.__enter__()
        whole = FSDP.summon_full_params(model)
        whole.__enter__()
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        with pytest.raises(StateError, match="SUMMON_FULL_PARAMS"):
            model.no_sync().__enter__()
        with pytest.raises(StateError, match="is for the root"):
            model.blocks[0].reset_state()
        model.reset_state()
        assert not _active
        assert equal(expected, go_on(model, optimizer))
        for block in (whole, lost):
            block.__exit__(None, None, None)  # nothing is left to do
        with model.no_sync():
            loss_of(model, data(1)).backward()
            assert model._unit.core.unreduced
        loss_of(model, data(1)).backward()
        assert not model._unit.core.unreduced
        model.reset_state()

        model, optimizer = start(use_orig_params=True)
        model.blocks[1].register_forward_hook(lambda *args: output_hook())
        output_hook = lambda: None  # noqa: E731
        loss = loss_of(model, data(1))
        loss.register_hook(lambda grad: grad.no_such_name)
        with pytest.raises(AttributeError):
            loss.backward()
        model.reset_state()
        assert model.training_state.name == "IDLE"


def test_a_block_is_ended_until_that_is_done():
    done = []

    def end(times):
        done.append(times)
        if len(done) <= times:
            raise KeyError(len(done))

    for times, calls in ((0, 1), (1, 2), (2, 3), (5, 3)):
        del done[:]
        missed = contextlib.suppress(KeyError) if times else contextlib.nullcontext()
        with missed, _C.Block(lambda: "begun", lambda: end(times)) as begun:  # noqa: B023
            assert begun == "begun"
        assert len(done) == calls
    with pytest.raises(KeyError, match="1"), _C.Block(lambda: None, lambda: end(9)):
        del done[:]
    del done[:]
    with pytest.raises(ZeroDivisionError), _C.Block(lambda: 1 / 0, lambda: end(0)):
        pass
    assert done == [0]
    with pytest.raises(ZeroDivisionError), _C.Block(lambda: None, lambda: None):
        raise ZeroDivisionError


def test_no_sync_ends():
    def keep(model, bomb):
        with bomb, model.no_sync(), model.no_sync():
            pass

    files = [str(INSIDE / "wrapper" / "forward.py")]
    with fake_world(2):
        model, optimizer = start()
        expected = go_on(model, optimizer)
        listing = Bomb(files)
        keep(model, listing)
        chosen = [place for place in listing.places if not is_end_of_with(place, listing.places)]
        assert len(chosen) > 10
        for place in chosen:
            model, optimizer = start()
            with contextlib.suppress(Interrupted):
                keep(model, Bomb(files, place))
            assert equal(expected, go_on(model, optimizer)), place
        root = model._unit.core.root
        for call in (root.begin_no_sync, root.end_no_sync):
            with pytest.raises(TypeError, match="expected a list, got str"):
                call("no list")
        assert equal(expected, go_on(*start()))
