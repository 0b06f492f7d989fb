"""_C.Root and _C.Unit: which calls they refuse, that they leak nothing, and that each allocation may fail."""

import dataclasses
import functools
import gc
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist
from gloo import fake_world
from hand_built import module_with, part_of, run_of, step_of
from torch import nn

from benchmarks.c_testing import _C_testing
from flatparam import _C, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.fsdp.sharding.flat_param import FlatParamSpec

BAD_PARTS = [
    ({"entries": ((nn.Linear(1, 1), "weight", (2, 3), None),)}, TypeError),
    ({"entries": (3,)}, TypeError),
    ({"entries": ((3, "weight", (2, 3), None, 0),)}, TypeError),
    ({"entries": ((nn.Linear(1, 1), "weight", (2, 3), (1,), 0),)}, ValueError),
    ({"entries": ((nn.Linear(1, 1), "weight", (2, 3), (5, 7), 0),)}, ValueError),
    ({"entries": ((nn.Linear(1, 1), "weight", (2, "3"), None, 0),)}, TypeError),
    ({"entries": ((nn.Linear(1, 1), "weight", (9,), None, 0),)}, ValueError),
    ({"entries": ()}, ValueError),
    ({"shared": ((nn.Linear(1, 1), "weight", 2),)}, ValueError),
    ({"shared": ((nn.Linear(1, 1), "weight", -1),)}, ValueError),
    ({"shared": (3,)}, TypeError),
    ({"shard": torch.ones(8)}, TypeError),
    ({"shard": None}, TypeError),
    ({"params": 3}, TypeError),
    ({"params": (nn.Parameter(torch.ones(1)),)}, ValueError),
    ({"params": (nn.Parameter(torch.ones(1)), 3)}, TypeError),
    ({"pieces": ()}, ValueError),
    ({"pieces": (3,)}, TypeError),
    ({"pieces": ((0, "8", False),)}, TypeError),
    ({"pieces": ((5, 8, False),)}, ValueError),
    ({"pieces": ((-5, 8, False),)}, ValueError),
    ({"pieces": ((2**62, 8, False),)}, ValueError),
    ({"shard_numel": 0}, ValueError),
    ({"shard_numel": 2**62, "shards": 4}, ValueError),
    ({"shards": 0}, ValueError),
    ({"shards": 2}, ValueError),
    ({"rank": 1}, ValueError),
    ({"rank": -1}, ValueError),
    ({"shard_group": 3}, TypeError),
    ({"shard_group": ("group", "no such group", None)}, RuntimeError),
    ({"shard_group": ("group", None, "no such group")}, RuntimeError),
    ({"param_rank": 1}, ValueError),
    ({"param_rank": -1}, ValueError),
    ({"param_shards": 0}, ValueError),
    ({"param_shards": 2}, ValueError),
    ({"param_group": 3}, TypeError),
    ({"outer_group": 3}, TypeError),
    ({"device": "cpu"}, TypeError),
    ({"extension": 3}, TypeError),
    ({"dress": 3}, TypeError),
    ({"outer_group": ("group", None, None)}, ValueError),
    ({"compute_dtype": "bfloat16"}, TypeError),
    ({"reduce_dtype": 3}, TypeError),
    ({"compute_dtype": torch.quint8}, TypeError),
    ({"reduce_dtype": torch.int32}, TypeError),
    ({"rank": 2**31}, TypeError),
    ({"numel": 2**64}, TypeError),
]


@pytest.mark.parametrize(("change", "error"), BAD_PARTS, ids=lambda value: str(value)[:60])
def test_parts_that_are_refused(change, error):
    module = module_with()
    with pytest.raises(error):
        step_of(part_of(module, **change))
    assert type(module.weight) is nn.Parameter


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(FlatParamSpec)])
def test_each_field_of_a_specification_is_read_by_its_name(name):
    fields = vars(part_of(module_with()))
    in_another_order = types.SimpleNamespace(**dict(reversed(fields.items())))
    assert step_of(in_another_order).views() == [None]
    delattr(in_another_order, name)
    with pytest.raises(TypeError, match=f"expected an object with the attribute `{name}`, got types.SimpleNamespace"):
        step_of(in_another_order)
    setattr(in_another_order, name, nn.Linear)
    checked_by_torch = ("shard", "compute_dtype", "reduce_dtype", "device", "extension", "dress")
    if name not in checked_by_torch:
        with pytest.raises(TypeError, match=f"expected `{name}` to be .*, got type"):
            step_of(in_another_order)


def test_steps_and_runs_that_are_refused():
    part = part_of(module_with())
    for change in ({"name": 3}, {"flat_params": [part]}, {"flat_params": (3,)}, {"reason": 3}):
        with pytest.raises(TypeError):
            step_of(part, **change)
    for change in ({"watched": 3}, {"watched": (3,)}, {"watched": (({}, "a"),)}, {"backward_prefetch": "PRE"}):
        with pytest.raises(TypeError):
            run_of(**change)
    module = module_with()
    some = {"params": (module.weight, module.bias), "pieces": ((4, 2, False), (6, 2, False))}
    with pytest.raises(ValueError, match="expected all 6 elements of parameter 0, got 2"):
        step_of(part_of(module, **some)).alias_params()
    step = step_of(part)
    for call in (step.pre_forward, lambda: step.post_forward(3)):
        with pytest.raises(RuntimeError, match="unit has joined no model"):
            call()
    step.abort_forward()
    with pytest.raises(TypeError, match="Root"):
        step.join(3)
    with pytest.raises(TypeError):
        step.put(3)
    step.join(run_of())
    with pytest.raises(RuntimeError, match="unit: end_forward is not possible in state IDLE, only in FORWARD"):
        step.post_forward(torch.ones(1))
    with pytest.raises(TypeError):
        _C.set_grad(torch.ones(1))
    with pytest.raises(TypeError):
        _C.set_grad(3, None)
    step.pre_forward()
    with pytest.raises(RuntimeError, match="middle of a pass"):
        step.join(run_of())
    step.abort_forward()
    step.join(run_of())


class Doubling:
    """An extension."""

    def __init__(self):
        self.given, self.refused = [], 0

    def __call__(self, views):
        self.given.append(tuple(view * 2 for view in views))
        return self.given[-1]

    def refuse_graphs(self):
        self.refused += 1


def test_an_extension_gives_what_modules_have():
    module, extension = module_with(), Doubling()
    part = part_of(module, extension=extension)
    step, run = step_of(part), run_of()
    step.make_views()
    step.join(run)
    before = len(extension.given)
    for number in range(1, 4):
        step.pre_forward()
        assert len(extension.given) == before + number  # anew in each forward
        assert module.weight is extension.given[-1][0]
        step.post_forward(module.weight.sum()).backward()
        assert part.shard.grad.tolist() == [2.0 * number] * 6 + [0.0] * 2
    assert step.views() == [extension.given[-1]]
    refused = extension.refused
    with torch.no_grad():
        part.shard.add_(1)
    step.pre_forward()
    assert extension.refused > refused  # graphs of the values before


class Weight(nn.Parameter):
    """A subclass."""


def test_views_are_dressed_once_when_they_are_made():
    module, given = module_with(), []

    def dress(views):
        given.append(views)
        for view in views:
            view.__class__ = Weight

    part = part_of(module, dress=dress)
    step = step_of(part)
    step.make_views()
    step.join(run_of())
    assert list(module._parameters) == []  # though it is a Parameter
    for number in range(1, 4):
        step.pre_forward()
        assert type(module.weight) is Weight
        assert module.weight is given[-1][0]
        step.post_forward(module.weight.as_subclass(torch.Tensor).sum()).backward()
        assert part.shard.grad.tolist() == [float(number)] * 6 + [0.0] * 2
    assert len(given) == 1


def test_an_error_where_views_are_dressed_leaves_none():
    module, failing = module_with(), [ZeroDivisionError]

    def dress(views):
        for error in failing:
            raise error

    step = step_of(part_of(module, dress=dress))
    with pytest.raises(ZeroDivisionError):
        step.make_views()
    failing.clear()
    step.make_views()
    assert step.views()[0][0] is module.weight


@pytest.mark.parametrize("gives", [lambda views: list(views), lambda views: views[:1], lambda views: (3, 4)])
def test_extensions_that_are_refused(gives):
    with pytest.raises(TypeError):
        step_of(part_of(module_with(), extension=gives)).make_views()


def test_a_step_by_hand():
    module = module_with()
    part = part_of(module)
    flat = part.shard
    step, run = step_of(part), run_of()
    step.make_views()
    step.join(run)
    assert step.root is run
    assert "weight" not in module._parameters
    for _ in range(2):
        step.pre_forward()
        assert run.state == "FORWARD"
        output = step.post_forward((module.weight.sum() * 2.0, [module.bias], None, 3))
        assert run.state == "IDLE"
        output[0].backward()
        assert flat.grad.tolist() == [2.0] * 6 + [0.0] * 2
        output = step.pre_forward()
        output = step.post_forward({"a": module.bias.sum()})
        output["a"].backward()
        assert flat.grad.tolist() == [2.0] * 6 + [1.0] * 2
        flat.grad = None
    assert _C_testing.counts(run) == {"gathers": 0, "refreshes": 0, "reductions": 4}
    with torch.no_grad():
        step.pre_forward()
        assert not step.post_forward(module.weight * 1.0).requires_grad
    output = step.pre_forward() or step.post_forward(module.weight.sum())
    with pytest.raises(RuntimeError, match="create_graph"):
        output.backward(create_graph=True)
    assert run.state == "INTERRUPTED"
    run.recover()
    assert run.state == "IDLE"
    graph = step.pre_forward() or step.post_forward(module.weight.sum())
    del step
    gc.collect()
    graph.backward()  # it has kept the unit
    assert flat.grad.tolist() == [1.0] * 6 + [0.0] * 2
    del graph, output
    gc.collect()
    assert not [step for step in gc.get_objects() if type(step) is _C.Unit and step.root is run]


class Watcher:
    """Is told of gathers."""


def test_a_unit_without_hooks_does_each_step_when_it_is_called():
    module = module_with()
    originals = (module.weight, module.bias)
    whole = torch.cat([param.detach().flatten() for param in originals])
    part = part_of(module, params=originals, pieces=((0, 6, False), (6, 2, False)), compute_dtype=torch.float64)
    with torch.no_grad():
        part.shard.copy_(whole)
    step, leaf, views = step_of(part), nn.Parameter(whole.double()), [None, None]
    step.alias_params()
    for call in (lambda: step.gather(True), step.wait, step.versions, lambda: step.show_views(views, True)):
        with pytest.raises(RuntimeError, match=r"unit: expected drive\(\) to be called before"):
            call()
    with pytest.raises(RuntimeError, match="and a root"):
        step.drive(leaf, Watcher(), Watcher(), False)
    step.join(run_of())
    unsharded = step.drive(leaf, Watcher(), Watcher(), False)
    with pytest.raises(RuntimeError, match="expected one flat parameter"):
        step.drive(leaf, Watcher(), Watcher(), False)
    for number in range(1, 3):
        assert unsharded.untyped_storage().nbytes() == 0
        assert step.gather(True) is None
        step.wait()
        assert torch.equal(unsharded, whole.double())
        step.show_views(views, True)
        assert module.weight is views[0]
        loss = module.weight.sum() * 2.0
        step.show_params(None, False)
        step.release()
        assert module.weight is originals[0]
        step.gather(True)
        step.wait()
        step.show_views(views, False)
        loss.backward()
        assert leaf.grad.tolist() == [2.0 * number] * 6 + [0.0] * 2
        step.show_params(None, False)
        step.release()
    step.show_sum(torch.ones(8))
    assert module.weight.grad.tolist() == [[1.0] * 3] * 2
    module.bias.grad = None
    assert step.show_accumulated(False) is True
    assert step.accumulated()[0].tolist() == [1.0] * 6 + [0.0] * 2
    assert module.weight.grad is None
    for _ in range(2):
        step.add_reduced(torch.ones(8))
    assert leaf.grad.tolist() == [2.0] * 8
    step.show_sum(torch.ones(8))
    module.weight.grad.mul_(3.0)
    with pytest.raises(ValueError, match="`weight` of a Linear was changed in place"):  # beside a reduced gradient
        step.show_accumulated(False)
    assert step.accumulated() == [None]
    step.show_sum(None)
    assert leaf.grad.tolist() == [2.0] * 8


LAYER_ZERO = ["LAYER_ZERO", "LAYER_ZERO_NESTED"]


def model_and_data(uo, strategy="FULL_SHARD"):
    arguments = {"use_orig_params": uo, "sharding_strategy": ShardingStrategy[strategy]}
    if strategy in LAYER_ZERO:
        arguments |= {"process_group": layer_zero_groups(), "offload_grads": uo}
    layers = [FSDP(nn.Linear(3, 3), **arguments) for _ in range(2)]
    return FSDP(nn.Sequential(*layers), **arguments), torch.ones(2, 3)


@functools.cache
def groups_in(world):
    return dist.new_group([0, 1]), world


def layer_zero_groups():
    return groups_in(dist.group.WORLD)


def owed_nothing(model):
    """For set_kept."""
    uo = model._unit.options.use_orig_params
    return [(False,) * (len(flat_param.originals) if uo else 1) for flat_param in model._unit.flat_params]


def exercise(model, x):
    model(x).sum().backward()
    with model.no_sync():
        model(x).sum().backward()
    step = model._unit.core
    step.set_accumulated(step.accumulated(), owed_nothing(model))
    step.show_accumulated(True)
    model(x).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(x)
    model(x)
    model.layer = None
    try:
        model("nothing that it takes")
    except TypeError:
        pass


class Layouts(nn.Module):
    """Parameters that are not plain rows: strided, 0-dim, empty, a column slice, complex."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.columns = nn.Parameter(torch.arange(12.0).reshape(3, 4)[:, :2])
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.conv(x).sum() * self.scalar + self.columns.square().sum() + self.empty.sum()


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_parameters_of_any_layout(uo, strategy):
    x = torch.randn(2, 2, 5, 5)
    for world in (1, 2):
        torch.manual_seed(0)
        module = Layouts()
        torch.manual_seed(0)
        with fake_world(world):
            model = FSDP(Layouts(), use_orig_params=uo, sharding_strategy=ShardingStrategy[strategy])
            if world == 1:
                with torch.inference_mode():
                    assert torch.equal(model(x), module(x))
                for part in (model, module):
                    part(x).backward()
                with FSDP.summon_full_params(model, with_grads=True, writeback=False):
                    for param, wanted in zip(model.parameters(), module.parameters(), strict=True):
                        assert torch.equal(param, wanted)
                        assert torch.equal(param.grad, wanted.grad)
            pieces = [piece for piece in model.shard_map() if piece.rank == 0]
            assert {piece.fqn for piece in pieces} <= {name for name, _ in module.named_parameters()}


def test_compiled_models_train_as_before():
    def build():
        torch.manual_seed(0)
        inner = FSDP(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), use_orig_params=True)
        return FSDP(nn.Sequential(inner, nn.Linear(3, 1)), use_orig_params=True)

    with fake_world(1):
        grads = []
        for compiled in (False, True):
            model = build()
            call = torch.compile(model, backend="eager") if compiled else model
            for _ in range(2):
                call(torch.ones(2, 3)).sum().backward()
            grads.append([param.grad.clone() for param in model.parameters()])
        torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "ZERO_1", *LAYER_ZERO])
def test_steps_leak_nothing(uo, strategy):
    with fake_world(4 if strategy in LAYER_ZERO else 2):
        model, x = model_and_data(uo, strategy)

        def count(model=model):
            gc.collect()
            tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
            return (
                tensors,
                _C_testing.alloc_live(),
                [sys.getrefcount(unit._unit.core) for unit in FSDP.fsdp_modules(model)],
            )

        for _ in range(3):
            exercise(model, x)
        before = count()
        for _ in range(10):
            exercise(model, x)
        assert count() == before
        del count
        empty = None
        for _ in range(3):
            model, x = model_and_data(uo, strategy)
            exercise(model, x)
            del model
            gc.collect()
            empty = _C_testing.alloc_live() if empty is None else empty
            assert _C_testing.alloc_live() == empty


@pytest.mark.parametrize("strategy", ["ZERO_1", *LAYER_ZERO])
def test_a_model_whose_backward_was_broken_off_can_be_collected(strategy):
    def fail(grad):
        raise ArithmeticError

    with fake_world(4 if strategy in LAYER_ZERO else 2):
        found = []
        for _ in range(3):
            model, x = model_and_data(True, strategy)
            x = x.requires_grad_()
            x.register_hook(fail)
            with pytest.raises(ArithmeticError):
                model(x).sum().backward()
            del model
            gc.collect()
            left = sum(type(thing) in (_C.Root, _C.Unit) for thing in gc.get_objects())
            found.append((left, _C_testing.alloc_live()))
        assert found[1] == found[2]


def test_units_that_are_collected_while_all_units_are_listed():
    """So many that CPython 3.11 looks for garbage as it makes the tuple: one of them is garbage."""
    with fake_world(1):
        gc.disable()
        before = gc.get_threshold()
        try:
            inner = nn.Sequential(*[FSDP(nn.Linear(3, 3), use_orig_params=True) for _ in range(40)])
            model = FSDP(inner, use_orig_params=True)
            model(torch.ones(2, 3)).sum().backward()
            recover = model._unit.core.root.recover
            inner[39].cycle = inner[39]
            del inner[39]
            gc.set_threshold(1)
            gc.enable()
            recover()
        finally:
            gc.set_threshold(*before)
            gc.enable()
        model(torch.ones(2, 3)).sum().backward()


def test_units_that_join_while_one_joins():
    """The end of the root that it leaves runs code of the user."""

    class Last:
        def __del__(self):
            for unit in units:
                unit.join(new)

    with fake_world(1):
        models = [FSDP(nn.Linear(3, 3), use_orig_params=True) for _ in range(9)]
        units = [model._unit.core for model in models]
        new, old = run_of(), run_of(collectives=Last())
        units[8].join(old)
        del old
        units[8].join(new)
        assert all(unit.root is new for unit in units)
        for model in models:
            model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize(("uo", "strategy"), [(False, "FULL_SHARD"), (True, "FULL_SHARD"), (True, "LAYER_ZERO_NESTED")])
def test_each_allocation_of_the_core_may_fail(uo, strategy):
    """A MemoryError, and the model goes on as if nothing had been."""
    with fake_world(4):
        for what in ("make", "first step", "join"):
            reached = failures = 0
            while reached == 0:
                failures += 1
                assert failures < 200
                model, x = (None, None) if what == "make" else model_and_data(uo, strategy)
                step = None if model is None else model._unit.core
                _C_testing.alloc_fail_at(failures)
                try:
                    if what == "make":
                        model, x = model_and_data(uo, strategy)
                    elif what == "join":
                        step.join(run_of())
                    else:
                        model(x).sum().backward()
                    reached = 1
                except MemoryError:
                    pass
                finally:
                    _C_testing.alloc_fail_at(0)
                if model is not None and what == "first step":
                    model.zero_grad()
                    model(x).sum().backward()
                    assert all(p.grad is not None for p in model.parameters() if p.numel() > 0)
            assert failures > 1, what


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", *LAYER_ZERO])
def test_kept_gradients_are_taken_and_given(uo, strategy):
    with fake_world(4):
        model, x = model_and_data(uo, strategy)
        model, step = model.module[0], model.module[0]._unit.core
        model(x).sum().backward()
        reduced = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with model.no_sync():
            model(x).sum().backward()

        def shows():
            return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

        def shows_as(grads):
            pairs = zip(shows(), grads, strict=True)
            return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

        (kept,), grads = step.accumulated(), shows()
        values = kept.clone()
        for wrong, owed in (
            ([values[:-1]], owed_nothing(model)),
            ([values.double()], owed_nothing(model)),
            ([values[None]], owed_nothing(model)),
            (["no tensor"], owed_nothing(model)),
            ([values, values], owed_nothing(model)),
            ([values], []),
            ([values], [(False,) * 9]),
            ([values], [True]),
            ([values], [("no bool",) * len(owed_nothing(model)[0])]),
            (3, owed_nothing(model)),
        ):
            with pytest.raises((TypeError, ValueError)):
                step.set_accumulated(wrong, owed)
            assert step.accumulated()[0].data_ptr() == kept.data_ptr()
            assert shows_as(grads)
        _C_testing.alloc_fail_at(1)
        try:
            step.set_accumulated(
                [values * 2], owed_nothing(model)
            )  # allocates nothing: what was checked cannot fail half-way
        finally:
            _C_testing.alloc_fail_at(0)
        assert torch.equal(step.accumulated()[0], values * 2)
        assert shows_as(reduced) or strategy == "NO_SHARD"
        for p, grad in zip(model.parameters(), reduced, strict=True):
            _C.set_grad(p, grad)
        step.show_accumulated(True)
        step.show_accumulated(True)
        assert shows_as([None if grad is None else grad * 2 for grad in grads]) or strategy == "NO_SHARD"
        step.show_accumulated(False)
        step.show_accumulated(False)
        assert shows_as(reduced) or strategy == "NO_SHARD"
        step.set_accumulated([None], owed_nothing(model))
        step.show_accumulated(True)
        assert step.accumulated() == [None]
        assert shows_as(reduced) or strategy == "NO_SHARD"


def test_gradients_are_not_given_in_the_middle_of_a_pass():
    step, run = step_of(part_of(module_with())), run_of()
    step.make_views()
    step.join(run)
    step.pre_forward()
    with pytest.raises(RuntimeError, match="unit cannot be given gradients in the middle of a pass"):
        step.set_accumulated([None], [(False,)])
    step.abort_forward()
    del step, run
    gc.collect()  # the next test counts what lives


def test_profilers_see_each_unit(capfd):
    with fake_world(2):
        model, x = model_and_data(True)
        model(x).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as taken:
            model(x).sum().backward()
    capfd.readouterr()  # the profiler tells when it starts and stops
    names = [event.name for event in taken.events() if event.name.startswith("flatparam ")]
    for path in ("", "0", "1"):
        name = f"the unit of Linear at `{path}`" if path else "the unit of Sequential"
        phases = ("pre_forward", "forward", "post_forward", "end of backward")
        # the outermost has no parameters, so nothing comes to it after its backward
        for phase in (*phases, "pre_backward", *(("post_backward",) if path else ())):
            assert names.count(f"flatparam {phase}: {name}") == 1, (phase, path, names)


def in_another_thread(call):
    """What ``call`` raised there, or None."""
    raised = []

    def run():
        try:
            call()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None


@pytest.mark.parametrize("uo", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_second_thread_is_refused_while_one_is_in_the_model(uo, strategy):
    with fake_world(1):
        model, x = model_and_data(uo, strategy)
        model(x).sum().backward()
        wanted = [param.grad.clone() for param in model.parameters()]
        said = []
        inner = next(module for module in model.modules() if isinstance(module, nn.Linear))

        def intrude(*ignored):
            said.append(in_another_thread(lambda: model(x)))
            said.append(in_another_thread(lambda: model[0](x)))

        for where in ("forward", "backward"):
            model.zero_grad()
            if where == "forward":
                handle = inner.register_forward_hook(intrude)
            else:
                handle = inner.register_full_backward_hook(intrude)
            model(x).sum().backward()
            handle.remove()
            for param, grad in zip(model.parameters(), wanted, strict=True):
                assert torch.equal(param.grad, grad), where
        assert len(said) == 4
        assert all("another thread is in a forward or backward" in text for text in said)
        assert in_another_thread(lambda: model(x).sum().backward()) is None  # one after the other is fine
        for param, grad in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(param.grad, 2 * grad)
