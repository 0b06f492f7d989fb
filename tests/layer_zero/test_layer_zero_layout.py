"""Where LayerZero's handle puts parameters: layouts, groups, the reference's names, refused arguments.

Promises:
- layout, both shards, metadata; states; the words and signatures of the reference; bad input on all ranks alike:
  `test_layout`, `test_layer_zero_phases.py::test_phases`
"""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from fsdp_models import data
from gloo import note, run_ranks
from layer_zero_checks import LOW, Example, assert_close, named, train
from layer_zero_driver import (
    CPU,
    State,
    full_params,
    gathered,
    held,
    losses,
    one,
    reshard,
    summoned,
    twins,
    unshard,
    unsharded_backward,
)
from layer_zero_ranks import counted, group_of, pair
from torch import nn

from flatparam import layer_zero
from flatparam.layer_zero import FlatParamHandle, ShardParamInfo, agree

pytestmark = pytest.mark.multiprocess

OUT = (False, None, None, None, None)


# rank -> (offset, numel, first, last) of a, b, c in the zero1 shard; then the places of the parameters
LAYOUTS = {
    LOW: (
        20,
        [
            [(True, 0, 5, 0, 4), OUT, OUT],
            [(True, 0, 1, 5, 5), (True, 3, 2, 0, 1), OUT],
            [OUT, (True, 0, 1, 2, 2), OUT],
            [OUT, OUT, (True, 1, 2, 0, 1)],
        ],
        [(0, 5), (8, 10), (16, 17)],
    ),
    None: (
        16,
        [
            [(True, 0, 4, 0, 3), OUT, OUT],
            [(True, 0, 2, 4, 5), OUT, OUT],
            [OUT, (True, 0, 3, 0, 2), OUT],
            [OUT, OUT, (True, 0, 2, 0, 1)],
        ],
        [(0, 5), (8, 10), (12, 13)],
    ),
}


def layout():
    rank = dist.get_rank()
    for dtype, (numel, shards, places) in LAYOUTS.items():
        module = Example()
        originals = list(module.parameters())
        handle = one(module, 2, dtype)
        flat = handle.flat_param
        expected = tuple(ShardParamInfo(*part, *place) for part, place in zip(shards[rank], places, strict=True))
        assert flat._shard_param_infos == expected
        assert flat._padded_unsharded_size == torch.Size([numel])
        assert flat._sharded_size == flat._zero1_shard.size() == torch.Size([numel // 4])
        assert flat._zero1_shard.dtype == torch.float32
        assert flat._shard_numel_padded == 0
        assert [id(p) for p in module.parameters()] == [id(p) for p in originals]
        for param, info, whole in zip(originals, expected, Example().parameters(), strict=True):
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            part = whole.flatten()[first : last + 1] if info.in_shard else torch.empty(0)
            assert torch.equal(param, part)
        whole = gathered(flat._zero1_shard)
        unshard(handle, State.FORWARD)
        assert torch.equal(flat._full_param_padded, whole.to(dtype or torch.float32))
        assert not isinstance(module.a, nn.Parameter)
        assert torch.equal(module.a.float(), Example().a)
        reshard(handle)
        size, inner = numel // 2, rank % 2
        assert torch.equal(flat._zero3_shard, whole[inner * size : (inner + 1) * size].to(dtype or torch.float32))
        with pytest.raises(ValueError, match="expected div to be 4"):
            handle.flatten_tensors([torch.ones(3)], 4, 3)
        assert handle.flatten_tensors([torch.ones(3), torch.ones(2)], 4, 4).numel() == 8


ARGUMENTS = [
    *("params", "zero3_module", "device", "mp_param_dtype", "mp_reduce_dtype"),
    *("zero3_process_group", "zero1_process_group", "offload_grads"),
]


METHODS = """
    initialize shard init_flat_param_attributes pre_unshard unshard wait_unshard post_unshard needs_unshard reshard
    post_reshard unshard_grad reshard_grad offload_grad alloc_full_prec_grad reload_full_prec_grad free_full_prec_grad
    already_load_full_prec_grad accumulate_grad prepare_gradient_for_backward set_shard_grad free_runtime_unshard_grad
    prepare_gradient_for_zero1 wait_reduce_scatter flatten_tensors flatten_tensors_into_flat_param unflatten_as_params
    is_sharded param_module_names shared_param_module_names
"""


NAMES = """
    FlatParameter FlatParamHandle FlatParamShardMetadata ParamInfo SharedParamInfo HandleShardingStrategy
    HandleTrainingState logger log0 _FSDP_USE_UNSAFE_SETATTR _FLAT_PARAM_PADDING_VALUE _ShardParamInfo
    _FlatParameterMeta _unsafe_setattr_param _unsafe_setattr_tensor _safe_setattr_tensor_or_param _convert_to_params
    _detach_if_needed _get_aligned_numel _get_dtype_size _construct_padding_tensor
"""

# Of the handle, beside its public methods
PRIVATE = """
    _ag_handle _all_gather_flat_param _alloc_padded_unsharded_flat_tensor _check_on_compute_device _check_on_cpu
    _check_padded_unsharded _check_sharded _check_storage_allocated _check_storage_freed _check_unsharded
    _deregister_orig_params _device_handle _fqns_in_shard _free_unsharded_flat_tensor _fwd_bwd_param_dtype
    _get_flat_param_offsets _get_modules _get_padded_unsharded_flat_tensor _get_reduce_scatter_group _get_shard
    _get_unflat_views _get_unflat_views_aligned _get_unflat_views_unaligned _get_unpadded_shard _handle_index
    _is_storage_freed _needs_pre_backward_unshard _needs_pre_forward_unshard _offload_grads _orig_param_dtype
    _post_forward_index _pre_forward_order_index _reduce_dtype _reset_flat_param_grad_info_if_needed _rs_handle
    _skipped_use_sharded_views _use_sharded_flat_param _use_sharded_grad_views _use_sharded_views
    _use_unpadded_unsharded_flat_param _use_unsharded_grad_views _use_unsharded_views _validate_tensors_to_flatten
    device enter_backward prev_iter_synced sharded_grad
"""


def names_of_the_reference():
    assert all(hasattr(layer_zero, name) for name in NAMES.split())
    of_two = layer_zero.FlatParamShardMetadata(("a", "b"), (torch.Size([2]),) * 2, (2, 2), ((0, 1), (0, 0)))
    assert (of_two.param_offsets[1], len(of_two)) == ((0, 0), 4)
    assert list(inspect.signature(FlatParamHandle).parameters) == ARGUMENTS
    assert list(inspect.signature(FlatParamHandle.initialize).parameters) == ["self", *ARGUMENTS]
    assert all(callable(getattr(FlatParamHandle, name)) for name in METHODS.split())
    assert list(inspect.signature(FlatParamHandle.reshard).parameters) == ["self", "free_unsharded_flat_param"]
    handle = one(Example(), 2, LOW)
    assert (handle.zero1_world_size, handle.zero1_group_rank) == (4, dist.get_rank())
    assert (handle.zero3_group_size, handle.zero3_group_rank) == (2, dist.get_rank() % 2)
    assert (handle.param_dtype, handle.grad_dtype, handle.full_prec_dtype) == (LOW, torch.float32, torch.float32)
    assert one(Example(), 2, LOW, LOW).grad_dtype == LOW
    assert one(Example().double(), 2).flat_param._zero1_shard.dtype == torch.float64
    assert one(Example().to(LOW), 2).flat_param._zero1_shard.dtype == torch.float32
    for name in ("needs_param_sync", "param_synced", "grad_synced", "ran_pre_backward_hook", "prefetched"):
        assert getattr(handle, f"_{name}") is (name == "needs_param_sync")
    assert [name for name, _ in handle._named_module_parameters()] == ["a", "b", "c"]
    assert handle._get_orig_param_by_name("b") is handle._get_module_param_by_name("b")
    assert list(handle._shard_grad_list()) == [None] * 3
    assert all(hasattr(handle, name) for name in PRIVATE.split())
    assert list(handle.param_module_names()) == [("a", ""), ("b", ""), ("c", "")]
    assert handle.is_sharded(handle.flat_param)
    assert handle._get_modules() == {handle._zero3_module}
    flat = handle.flatten_tensors_into_flat_param([torch.ones(3), torch.ones(2)], 4, False, 4)
    assert isinstance(flat, layer_zero.FlatParameter)
    assert (flat.numel(), flat.requires_grad) == (8, False)
    assert handle._zero3_module.a is handle.flat_param._params[0]
    for call in (lambda: copy.deepcopy(handle), lambda: copy.copy(handle), lambda: pickle.dumps(handle)):
        with pytest.raises(TypeError, match=r"\(a, b, c\)"):
            call()


def degenerate_groups():
    """All ranks in the inner group: no second shard. One rank in it: no second copy, and no collective over it."""
    world = dist.get_world_size()
    for inner in (1, world):
        model, driver, reference = twins(inner)
        units = len(driver.handles)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with counted(inner) as log:
                driver.backward(losses(model, 0, 2))
            assert {group for _, group, *_ in log} <= {"wide"}
            gathers = sum(kind == "gather" for kind, *_ in log)
            assert gathers == (0 if world == 1 else units * (1 if inner == 1 else 4))
            optimizer.step()
            optimizer.zero_grad()
            for handle in driver.handles:
                flat = handle.flat_param
                assert (held(flat._full_param_padded) > 0) == (inner == 1)
                assert flat._zero3_shard is None
        for _ in range(2):
            reference.zero_grad()
            unsharded_backward(reference, 0, 2)
            with torch.no_grad():
                for param in reference.parameters():
                    param -= 0.1 * param.grad
        assert_close(full_params(driver.handles, model), list(reference.parameters()))
        for handle in driver.handles:
            handle.sync_params()
        with summoned(driver.handles):
            pass
        with torch.no_grad():
            torch.testing.assert_close(model(data(1)), reference(data(1)), rtol=0, atol=1e-6)


def strided_groups():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, driver, reference = twins(2, strided=True)
    train(model, driver, reference, 2, lambda params: torch.optim.SGD(params, lr=0.1))


class Weight(nn.Parameter):
    """A subclass."""


def bad_input():
    zero3, zero1 = pair(2)
    rank = dist.get_rank()

    def refused(error, match, module=None, params=None, groups=(zero3, zero1), on_all=True):
        module = Example() if module is None else module
        before = list(module.parameters())
        params = before if params is None else params
        with pytest.raises(error, match=match):
            FlatParamHandle(params, module, CPU, None, None, *groups)
        assert [id(p) for p in module.parameters()] == [id(p) for p in before]

    some = group_of([0, 1, 2])
    twos, odd = [group_of([0, 1]), group_of([2, 3])], [group_of([0, 3]), group_of([1, 2])]
    refused(ValueError, "zero3_process_group", groups=(None, zero1))
    refused(ValueError, "zero1_process_group", groups=(zero3, dist.GroupMember.NON_GROUP_MEMBER))
    refused(ValueError, "process group that this rank . is in, got 'world'", groups=(zero3, "world"))
    for given in ((None, zero1), (zero3, None), ("world", zero1), (dist.GroupMember.NON_GROUP_MEMBER, zero1)):
        name = "zero1" if given[1] is None else "zero3"
        match = (
            rf"expected {name}_process_group to be a process group that this rank 1 is in, got (None|'world'|.*-100)"
        )
        refused(ValueError, match, groups=given if rank == 1 else (zero3, zero1))
    threes = [some, group_of([3])][rank // 3]
    refused(ValueError, r"one size: rank 0 has \[0, 1, 2\], rank 3 has \[3\]", groups=(threes, zero1))
    overlapping = twos[0] if rank < 2 else odd[1] if rank == 2 else twos[1]
    refused(ValueError, "zero3 groups overlap", groups=(overlapping, zero1))
    alone = [group_of([rank]) for rank in range(4)][rank]
    if rank < 3:
        match = r"zero3 ranks \[2, 3\] the ranks \[3\] are not in its zero1 group \[0, 1, 2\]"
        refused(ValueError, match, groups=(twos[rank // 2], some))
    else:
        one_of_one = Example()
        FlatParamHandle(list(one_of_one.parameters()), one_of_one, CPU, None, None, alone, alone)
    for dtypes, name in (((torch.int8, None), "mp_param_dtype"), ((None, torch.bool), "mp_reduce_dtype")):
        with pytest.raises(ValueError, match=f"expected {name} to be a floating-point dtype or None, got torch"):
            one(Example(), 2, *dtypes)
    refused(ValueError, "empty parameter list", params=[])
    refused(
        ValueError, r"params\[0\] \(shape \(2,\).*not a parameter of this Example", params=[nn.Parameter(torch.ones(2))]
    )
    wrong = Example()
    wrong.b = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    refused(ValueError, r"`b` \(shape \(3,\), torch.int64", wrong)
    wrong.b = nn.Parameter(torch.ones(3, dtype=torch.float64))
    refused(ValueError, "`a` .*torch.float32.*`b` .*torch.float64", wrong)
    wrong.b = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    refused(ValueError, r"`b` \(.*\) is complex", wrong)
    wrong.b = nn.Parameter(torch.ones(3, device="meta"))
    refused(ValueError, r"`b` \(.*meta\) has no values: give the module memory", wrong)
    wrong.b = Weight(torch.ones(3))
    refused(ValueError, r"`b` \(.*\) is no plain tensor but a Weight, and a flat parameter would bypass its", wrong)
    wrong.b = nn.Parameter(wrong.c.data[:1])
    refused(ValueError, "`b` and `c` overlap|`c` and `b` overlap", wrong)
    handle = one(wrong := Example(), 2)
    refused(
        ValueError, r"parameter `a` of .* is flattened already: it belongs to the flat parameter of Example \(a,", wrong
    )
    holder = nn.ModuleDict({"inner": wrong})
    refused(ValueError, "parameter `inner.a` of .*ModuleDict is flattened already", holder)
    del handle
    note("ranks that differ")
    wrong = Example()
    if rank == 2:
        wrong.b = nn.Parameter(torch.ones(4))
    refused(ValueError, r"rank 0 has parameter `b` \(shape \(3,\).*rank 2 has parameter `b` \(shape \(4,\)", wrong)
    if rank == 2:
        wrong.b = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        refused(ValueError, "^Cannot flatten integer", wrong)
    else:
        refused(ValueError, "rank 2 cannot build its part of this unit: Cannot flatten integer", wrong)
    with pytest.raises(ValueError, match="handles of one zero1 group"):
        agree(
            [
                one(Example(), 2),
                FlatParamHandle(
                    list((m := Example()).parameters()), m, CPU, None, None, twos[rank // 2], twos[rank // 2]
                ),
            ]
        )
    agree([])


CASES = [
    (4, layout),
    (4, names_of_the_reference),
    (4, bad_input),
    (4, degenerate_groups),
    (2, degenerate_groups),
    (1, degenerate_groups),
    (4, strided_groups),
]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_layout(case):
    world_size, function, *arguments = case
    run_ranks(function, world_size, *arguments)
