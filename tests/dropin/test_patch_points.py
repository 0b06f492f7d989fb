"""Users replace members of FlatParamHandle, on the class, in a subclass and on an instance. Each replacement is called
as often as torch's handle calls it, and what it returns or does counts.

Oracle: torch's handle, changed in the same way."""

import functools
import inspect
import re
from collections import Counter

import pytest
import torch
from gloo import fake_world, handle_of
from one_handle import TORCHS
from patching import MODE_IDS, MODES, train
from recording import first_difference
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import HandleTrainingState

from flatparam import FlatParamHandle

# what torch's class defines, and how often it is called
MEMBERS = [
    name
    for name, value in vars(TORCHS).items()
    if isinstance(value, (staticmethod, property)) or (inspect.isfunction(value) and name != "__repr__")
]
PROPERTIES = [name for name in MEMBERS if isinstance(vars(TORCHS)[name], property)]
# Pure questions: how often they are asked is no behaviour. What a changed one answers is, see CHANGES
QUESTIONS = {*PROPERTIES, "_validate_tensors_to_flatten"}

# Where a user's own method allocates, ours first takes back the message that it put on the freed memory
ALLOCATE = ("_alloc_padded_unsharded_flat_param", "_use_low_precision_shard")


@functools.cache
def unchanged(mode):
    return train("torch", mode, {}, "class")


def counting(log, name, original, *args, **kwargs):
    log.append(name)
    return original(*args, **kwargs)


def counters(log, names):
    return {name: functools.partial(counting, log, name) for name in names}


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_each_replaced_member_is_called_as_often_and_in_the_same_order(mode):
    expected, got = [], []
    names = [name for name in MEMBERS if name not in ALLOCATE]
    before = train("torch", mode, counters(expected, names), "class")
    after = train("flatparam", mode, counters(got, names), "class")
    assert first_difference(before, after) is None
    assert set(expected) == set(got)
    expected, got = ([name for name in log if name not in QUESTIONS] for log in (expected, got))
    assert len(set(expected)) > 25
    assert first_difference([(name, ()) for name in expected], [(name, ()) for name in got]) is None


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_each_member_replaced_alone_is_called_as_often(mode):
    """Alone: our fused paths are taken by all the others."""
    log = []
    events = train("torch", mode, counters(log, MEMBERS), "class")
    expected = Counter(log)
    with handle_of("flatparam"):  # installed once, as that takes as long as a training
        for name in expected:
            got = []
            difference = first_difference(events, train("flatparam", mode, counters(got, [name]), "class"))
            assert difference is None, f"{name}: {difference}"
            assert set(got) == {name}
            if name not in QUESTIONS:
                assert len(got) == expected[name], name


@pytest.mark.parametrize("mode", MODES[:3], ids=MODE_IDS[:3])
def test_each_check_replaced_on_an_instance_is_called_as_often(mode):
    log, checks = [], [name for name in MEMBERS if name.startswith("_check_")]
    events = train("torch", mode, counters(log, checks), "instance")
    expected = Counter(log)
    assert len(expected) > 4
    with handle_of("flatparam"):
        for name in expected:
            got = []
            difference = first_difference(events, train("flatparam", mode, counters(got, [name]), "instance"))
            assert difference is None, f"{name}: {difference}"
            assert len(got) == expected[name], name


# What users make the members do. Each function gets the original and the arguments of the call.


def scale_result(original, *args, **kwargs):
    result = original(*args, **kwargs)
    return None if result is None else result * 1.5


def scale_in_place(original, *args):
    return original(*args).mul_(1.5)


def scale_first(original, *args):
    first, *rest = original(*args)
    return first * 1.5, *rest


def scale_each(original, handle, *tensor):
    return original(handle, *tensor) if tensor else [view * 1.5 for view in original(handle)]


def scale_data(original, *args, **kwargs):
    flat_param = original(*args, **kwargs)
    flat_param.data.mul_(1.5)
    return flat_param


def allocate_otherwise(original, handle):
    unsharded = handle._get_padded_unsharded_flat_param()
    unsharded.untyped_storage().resize_(unsharded.numel() * unsharded.element_size())
    handle.flat_param.users_mark = True
    return unsharded


def send_scaled(original, handle):
    """Quantized communication and the like: what is gathered is not the local shard."""
    result = original(handle)
    handle.flat_param.data = handle.flat_param.data * 1.5
    return result


def then_scale_unsharded(original, handle, *args):
    original(handle, *args)
    handle.flat_param.data.mul_(1.5)


def never_free(original, handle, free_unsharded_flat_param):
    original(handle, False)


def do_nothing(original, *args):
    return False


def scale_views(original, handle, as_params):
    original(handle, as_params)
    if not as_params:
        for info in handle.flat_param._param_infos:
            handle._setattr_tensor(info.module, info.param_name, getattr(info.module, info.param_name) * 1.5)


def scale_pieces(original, handle):
    original(handle)
    if handle._training_state == HandleTrainingState.BACKWARD_POST:
        with torch.no_grad():
            for param in handle.flat_param._params:
                param.mul_(1.5)


def scale_gradients(original, handle):
    original(handle)
    for param in handle.flat_param._params or ():
        if param.grad is not None:
            param.grad = param.grad * 1.5


def scale_gradients_in_place(original, handle):
    original(handle)
    for param in handle.flat_param._params or ():
        if param.grad is not None:
            param.grad.mul_(1.5)


def scale_saved_gradient(original, handle):
    original(handle)
    if hasattr(handle.flat_param, "_saved_grad_shard"):
        handle.flat_param._saved_grad_shard.mul_(1.5)


def hide_gradients(original, handle):
    original(handle)
    mask = handle.flat_param._is_grad_none_mask
    mask[:] = [True] * len(mask)


def scale_flat_gradient(original, handle):
    original(handle)
    if handle.flat_param.grad is not None:
        handle.flat_param.grad.mul_(0.5)


def freeze(original, handle, tensors):
    dtype, _, device = original(handle, tensors)
    return dtype, False, device


def reduce_in_fp64(original, handle, param_dtype, reduce_dtype):
    original(handle, param_dtype, torch.float64)


def own_way_to_unflatten(original, handle, align_addresses):
    original(handle, align_addresses)
    torchs = handle._get_unflat_views
    handle._get_unflat_views = lambda *tensor: torchs(*tensor) if tensor else [v * 1.5 for v in torchs()]


def set_scaled(module, name, value):
    if hasattr(module, name):
        delattr(module, name)
    setattr(module, name, value if isinstance(value, torch.nn.Parameter) else value * 1.5)


def own_ways_to_set(original, handle):
    original(handle)
    handle._setattr_tensor = set_scaled


def scale_low_precision_shard(original, handle):
    original(handle)
    handle.flat_param._mp_shard.mul_(1.5)


def always(original, handle):
    return True


def other_pieces(original, handle, start, end):
    """Pieces of which the first has one element less."""
    first, *rest = original(handle, start, end)
    if first.in_shard and first.numel_in_shard > 1:
        first = first._replace(numel_in_shard=first.numel_in_shard - 1)
    return (first, *rest)


FULL, FULL_BF16, GRAD_OP, NONE, NONE_FLAT = MODES
ANY = ("class", "subclass", "instance")
IN_INIT = ("class", "subclass")  # it is done before there is an instance to change
CHANGES = [
    ("_all_gather_flat_param", scale_in_place, ANY, (FULL, FULL_BF16, GRAD_OP)),
    ("_all_gather_flat_param", scale_result, ANY, (FULL, FULL_BF16)),
    ("_alloc_padded_unsharded_flat_param", allocate_otherwise, ANY, (FULL,)),
    ("pre_unshard", send_scaled, ANY, (FULL,)),
    ("unshard", then_scale_unsharded, ANY, (FULL, FULL_BF16)),
    ("post_unshard", then_scale_unsharded, ANY, (FULL, FULL_BF16)),
    ("_use_unsharded_flat_param", then_scale_unsharded, ANY, (FULL, FULL_BF16)),
    ("_writeback_orig_params", do_nothing, ANY, (FULL, NONE)),
    ("_use_unsharded_views", scale_views, ANY, (FULL, NONE)),
    ("_use_sharded_views", scale_pieces, ANY, (FULL, GRAD_OP)),
    ("_use_sharded_grad_views", scale_gradients, ANY, (FULL, GRAD_OP)),
    ("_use_unsharded_grad_views", scale_gradients_in_place, ANY, (FULL, GRAD_OP)),
    ("prepare_gradient_for_backward", scale_saved_gradient, ANY, (FULL, FULL_BF16)),
    ("prepare_gradient_for_optim", scale_flat_gradient, ANY, (FULL, FULL_BF16, GRAD_OP, NONE)),
    ("_get_unflat_views_aligned", scale_each, IN_INIT, (FULL, NONE)),
    ("_get_unflat_views_unaligned", scale_each, IN_INIT, (FULL_BF16, NONE_FLAT)),
    ("_use_low_precision_shard", scale_low_precision_shard, ANY, (FULL_BF16, GRAD_OP)),
    ("_reset_flat_param_grad_info_if_needed", do_nothing, ANY, (FULL,)),
    ("_reset_is_grad_none", hide_gradients, ANY, (FULL, GRAD_OP)),
    ("flatten_tensors", scale_result, IN_INIT, (FULL, NONE_FLAT)),
    ("flatten_tensors_into_flat_param", scale_data, IN_INIT, (FULL, NONE_FLAT)),
    ("_validate_tensors_to_flatten", freeze, IN_INIT, (FULL_BF16, NONE_FLAT)),
    ("_init_param_reduce_dtypes", reduce_in_fp64, IN_INIT, (FULL, FULL_BF16)),
    ("_init_get_unflat_views_fn", own_way_to_unflatten, IN_INIT, (FULL, FULL_BF16)),
    ("_init_setattr_fns", own_ways_to_set, IN_INIT, (FULL, FULL_BF16, NONE)),
    ("_get_shard", scale_first, ("class",), (FULL, FULL_BF16)),
    ("_get_unpadded_shard", scale_first, ("class",), (FULL, FULL_BF16)),
    ("_get_shard_metadata", other_pieces, IN_INIT, (FULL, GRAD_OP)),
    ("_force_full_precision", always, IN_INIT, (FULL_BF16, GRAD_OP)),
    ("sharded_grad", scale_result, IN_INIT, (FULL,)),
]


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    ("name", "change", "where", "mode"),
    [
        pytest.param(name, change, where, mode, id=f"{name}-{change.__name__}-{where}-{MODE_IDS[MODES.index(mode)]}")
        for name, change, places, modes in CHANGES
        for where in places
        for mode in modes
    ],
)
def test_what_a_replacement_does_counts(name, change, where, mode):
    calls = []

    def counted(original, *args, **kwargs):
        calls.append(name)
        return change(original, *args, **kwargs)

    expected = train("torch", mode, {name: counted}, where)
    in_torch = len(calls)
    got = train("flatparam", mode, {name: counted}, where)
    assert first_difference(expected, got) is None
    if name not in QUESTIONS:
        assert len(calls) == 2 * in_torch
    assert first_difference(expected, unchanged(mode)) is not None  # the change can be seen


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mode", [FULL, FULL_BF16, GRAD_OP], ids=["fp32", "bf16", "grad_op"])
@pytest.mark.parametrize("where", ANY)
@pytest.mark.parametrize(
    ("name", "change"), [("reshard", never_free), ("_free_unsharded_flat_param", do_nothing)], ids=["reshard", "free"]
)
def test_weights_that_a_replacement_never_frees_are_gathered_after_a_step(name, change, where, mode):
    """torch's handle goes on with the weights of the first step, silently."""

    def results(events):
        return [event for event in events if re.search("output|evaluation|saved|norm|gradient of the input", event[0])]

    calls = []

    def counted(*args):
        calls.append(args)
        return change(*args)

    fresh = results(unchanged(mode))
    assert fresh
    assert results(train("flatparam", mode, {name: counted}, where)) == fresh
    assert calls
    assert results(train("torch", mode, {name: counted}, where)) != fresh


def test_offsets_of_a_users_own_place_the_shard_infos(monkeypatch):
    def infos(kind, handle):
        original = handle._get_flat_param_offsets

        def shifted(self):
            return [(start + 2, end + 2) for start, end in original(self)]

        with monkeypatch.context() as patch, fake_world(2, 1), handle_of(kind):
            patch.setattr(handle, "_get_flat_param_offsets", shifted)
            model = FullyShardedDataParallel(nn.Linear(5, 3), use_orig_params=True, device_id=torch.device("cpu"))
            return model._handle.flat_param._shard_param_infos

    assert infos("flatparam", FlatParamHandle) == infos("torch", TORCHS)
