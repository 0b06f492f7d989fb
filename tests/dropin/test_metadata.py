"""The layout, the shard and all metadata of our handle equal, field by field, what torch's handle computes.

Oracle: torch's FlatParamHandle on the same random module, in the same process, on a fake group of up to 64 ranks.
"""

import pickle
import random

import pytest
import torch
import torch.distributed as dist
from gloo import fake_world
from random_modules import WORLD_SIZES, Case, difference, picture_of_handle
from recording import describe
from torch import nn
from torch.distributed.fsdp import _flat_param
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

import flatparam

TORCHS = _flat_param.FlatParamHandle
CASES_EACH = 110  # times the 20 seeds: more than 2,000 random parameter lists


def outcome(call):
    """Return what a call gives: its result, or the type of its error."""
    try:
        return "ok", call()
    except Exception as error:
        return "error", type(error)


def pictures_of(case, kind, group, names_of=None):
    """Build, shard and prepare a handle of one kind; return its pictures after each of these steps, and itself."""
    module, parameters = case.build()
    handle = case.handle(kind, group, module, parameters)
    pictures = [picture_of_handle(handle, module, names_of)]
    handle.shard()
    pictures.append(picture_of_handle(handle, module, names_of))
    handle.init_flat_param_attributes()
    pictures.append(picture_of_handle(handle, module, names_of))
    return pictures, handle, module


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(20))
def test_random_parameter_lists(seed):
    source = random.Random(seed)
    built = 0
    for number in range(CASES_EACH):
        case = Case(source)
        with fake_world(case.world_size, case.rank) as group:
            expected_state, expected = outcome(lambda case=case, group=group: pictures_of(case, TORCHS, group))
            names_of = vars(expected[1]) if expected_state == "ok" else None
            got_state, got = outcome(
                lambda case=case, group=group, names=names_of: pictures_of(
                    case, flatparam.FlatParamHandle, group, names
                )
            )
            where = f"seed {seed} case {number}: {vars(case)}"
            assert got_state == expected_state, f"{where}: torch gives {expected}, ours {got}"
            if expected_state == "error":
                assert issubclass(got, expected), where
                continue
            built += 1
            for step, a, b in zip(("built", "sharded", "prepared"), expected[0], got[0], strict=True):
                found = difference(a, b)
                assert not found, f"{where}\n{step}: {found}"
    assert built > CASES_EACH * 0.8


def test_there_are_enough_cases_of_each_kind():
    cases = [Case(source) for source in map(random.Random, range(20)) for _ in range(CASES_EACH)]
    assert len(cases) >= 2000
    assert {case.world_size for case in cases} == set(WORLD_SIZES)
    assert len({(case.dtype, case.use_orig_params, case.strategy) for case in cases}) == 4 * 2 * 5
    assert sum(bool(case.shared) for case in cases) > 500
    totals = [(sum(torch.Size(p[2]).numel() for p in case.parameters), case.world_size) for case in cases]
    assert sum(total < world_size for total, world_size in totals) > 100


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(6))
def test_unshard_and_reshard_by_hand(seed):
    """Drive the handle without the wrapper; the gathered values are those that the module had before."""
    source = random.Random(1000 + seed)
    completed = 0
    for number in range(40):
        case = Case(source)
        with fake_world(case.world_size, case.rank) as group:
            state, expected = outcome(lambda case=case, group=group: steps_by_hand(case, TORCHS, group))
            if state == "error":
                continue
            completed += 1
            names = expected[0][1]["names"]
            got = steps_by_hand(case, flatparam.FlatParamHandle, group, names)
            for (step, a), (_, b) in zip(expected, got, strict=True):
                assert not difference(a, b), f"seed {seed} case {number} {vars(case)}\n{step}: {difference(a, b)}"
    assert completed > 30


def steps_by_hand(case, kind, group, names=None):
    module, parameters = case.build()
    before = {name: value.detach().clone() for name, value in module.named_parameters(remove_duplicate=False)}
    handle = case.handle(kind, group, module, parameters)
    managed = [*handle.flat_param._fqns]
    full = handle.flat_param.detach().clone()
    handle.shard()
    handle.init_flat_param_attributes()
    names = sorted(vars(handle)) if names is None else names
    steps = [("attributes", {"names": names})]

    def picture(step):
        steps.append((step, picture_of_handle(handle, module, names)))

    for state in (HandleTrainingState.FORWARD, HandleTrainingState.SUMMON_FULL_PARAMS):
        handle._training_state = state
        with pretended_gather(full):
            steps.append(("pre_unshard", {"returned": handle.pre_unshard()}))
            picture("pre-unsharded")
            handle.unshard()
        handle.post_unshard()
        picture(f"unsharded in {state}")
        wanted = full.to(handle.flat_param.dtype)
        assert torch.equal(handle.flat_param[: full.numel()], wanted)
        for name in managed if case.use_orig_params or state == HandleTrainingState.FORWARD else ():
            path, _, leaf = name.rpartition(".")
            assert torch.equal(getattr(module.get_submodule(path), leaf), before[name].to(wanted.dtype)), name
        handle.reshard(handle.uses_sharded_strategy)
        handle.post_reshard()
        picture(f"resharded in {state}")
        handle._training_state = HandleTrainingState.IDLE
    return steps


class pretended_gather:
    """Has dist.all_gather give the shards that the ranks of a real world would have: the chunks of ``full``."""

    def __init__(self, full):
        self.full = full

    def __enter__(self):
        self.original = dist.all_gather
        dist.all_gather = self.gather

    def __exit__(self, *error):
        dist.all_gather = self.original

    def gather(self, outputs, mine, group=None, async_op=False):
        chunks = self.full.to(mine.dtype).chunk(len(outputs))
        for rank, output in enumerate(outputs):
            output.zero_()
            if rank < len(chunks):
                output[: chunks[rank].numel()].copy_(chunks[rank])
        assert torch.equal(mine.view(torch.uint8), outputs[dist.get_rank(group)].view(torch.uint8))


@pytest.mark.parametrize("numel", [1, 2, 7, 63, 64, 65, 1000])
def test_the_static_shard_functions(numel):
    tensor = torch.randn(numel)
    for world_size in WORLD_SIZES:
        for rank in range(world_size):
            for name in ("_get_shard", "_get_unpadded_shard"):
                shard, padding = getattr(flatparam.FlatParamHandle, name)(tensor, rank, world_size)
                expected, expected_padding = getattr(TORCHS, name)(tensor, rank, world_size)
                assert (describe(shard), padding) == (describe(expected), expected_padding)
                aliases = shard.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                assert aliases == (expected.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr())
            size = flatparam.FlatParamHandle._get_sharded_size(tensor, rank, world_size)
            assert size == TORCHS._get_sharded_size(tensor, rank, world_size)
            assert type(size) is torch.Size


def test_the_metadata_classes_are_torchs():
    for name in ("FlatParameter", "ParamInfo", "SharedParamInfo", "FlatParamShardMetadata", "HandleShardingStrategy"):
        assert getattr(flatparam, name) is getattr(_flat_param, name)


def test_metadata_survives_a_pickle():
    with fake_world(2, 1) as group:
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
        strategy = HandleShardingStrategy.FULL_SHARD
        settings = (torch.device("cpu"), strategy, False, None, None, False, group, True)
        handle = flatparam.FlatParamHandle(list(module.parameters()), module, *settings)
        handle.shard()
        metadata = handle.shard_metadata()
        data = pickle.dumps(metadata)
        assert b"torch.distributed.fsdp._flat_param" in data
        assert b"flatparam" not in data.replace(b"torch.distributed.fsdp._flat_param", b"")
        assert pickle.loads(data) == metadata


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flatten_tensors_pads_as_torchs(use_orig_params):
    source = random.Random(5)
    with fake_world(3, 0) as group:
        for _ in range(60):
            case = Case(source, world_size=3, rank=0, use_orig_params=use_orig_params)
            handles = [case.handle(kind, group, *case.build()) for kind in (TORCHS, flatparam.FlatParamHandle)]
            tensors = [torch.randn(shape).to(case.dtype) for _, _, shape, _, _ in case.parameters]
            for aligned_numel in (0, 1, 2, 4, 8):
                expected, got = (handle.flatten_tensors(tensors, aligned_numel) for handle in handles)
                assert describe(got) == describe(expected)
                expected, got = (
                    handle.flatten_tensors_into_flat_param(tensors, aligned_numel, True) for handle in handles
                )
                assert describe(got) == describe(expected)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_views_of_any_flat_tensor(use_orig_params):
    """_get_unflat_views takes a gradient or an optimizer state in place of the flat parameter."""
    source = random.Random(6)
    with fake_world(3, 0) as group:
        for _ in range(60):
            case = Case(source, world_size=3, rank=0, use_orig_params=use_orig_params)
            handles = [case.handle(kind, group, *case.build()) for kind in (TORCHS, flatparam.FlatParamHandle)]
            other = torch.randn(handles[0].flat_param.numel(), dtype=torch.float64)
            for tensor in (other, other.clone().requires_grad_()):
                expected, got = (list(handle._get_unflat_views(tensor)) for handle in handles)
                assert [describe(view) for view in got] == [describe(view) for view in expected]
                assert [view.data_ptr() for view in got] == [view.data_ptr() for view in expected]
