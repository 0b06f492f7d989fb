"""Frozen parameters that are bytes (integers, fp8, 4-bit weights) in state dicts of all kinds, files and meta modules.

The oracle is the unsharded module's own state dict.

Promises:
- the same in state dicts of all kinds, files, meta modules, plans and tables; an error names tensors that cannot be
  sent as bytes
"""

import copy
import io
import math
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from safetensors.torch import load_file, save_file
from test_fsdp_kept_classes import KINDS, Block, adam, bits, losses_of, model, wrapped
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import CPUOffload, ShardingStrategy, checkpoint, defer_init, load_safetensors
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.common.tensors import has_gradients

pytestmark = pytest.mark.multiprocess


SENT = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64)


def fill(ours, value):
    """Have other bytes in all parameters, so that a load has to bring those that are compared."""
    with torch.no_grad(), FSDP.summon_full_params(ours):
        for param in ours.parameters():
            param.fill_(value)


def listed(ours):
    """The names of its parameters, each part that the unsharded module has of them."""
    return [name.replace("_fsdp_wrapped_module.", "") for name, _ in ours.named_parameters()]


def assert_bytes(state, wanted):
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(bits(state[name]), bits(value)), name


def dict_kinds():
    wanted = model().state_dict()
    mesh = init_device_mesh("cpu", (2,))
    for uses in (False, True):
        for arguments in ({}, {"device_mesh": mesh}, {"sharding_strategy": ShardingStrategy.NO_SHARD}):
            ours = wrapped(use_orig_params=uses, **arguments)
            assert_bytes(ours.state_dict(), wanted)
            kinds = [
                (StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)),
                (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()),
                (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()),
            ]
            for kind, config in kinds:
                if kind is StateDictType.LOCAL_STATE_DICT and arguments:
                    continue  # of shards, without a mesh
                with FSDP.state_dict_type(ours, kind, config):
                    saved = copy.deepcopy(ours.state_dict())
                fill(ours, 1)
                with FSDP.state_dict_type(ours, kind, config):
                    ours.load_state_dict(saved)
                assert_bytes(ours.state_dict(), wanted)
            full = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
            assert_bytes(full, wanted)
            fill(ours, 1)
            sent = {name: value for name, value in wanted.items() if value.dtype in SENT}  # torch's helper, by gloo
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            set_model_state_dict(ours, dict(sent) if dist.get_rank() == 0 else {}, options=options)
            found = ours.state_dict()
            assert_bytes({name: found[name] for name in sent}, sent)


def files(folder):
    plain = model()
    wanted = {name: bits(value).view(value.dtype).view(value.shape) for name, value in plain.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(wanted, f"{folder}/plain.safetensors")
    dist.barrier()
    for uses in (False, True):
        ours = wrapped(use_orig_params=uses)
        losses = losses_of(wrapped(use_orig_params=uses))
        fill(ours, 1)
        assert load_safetensors(ours, f"{folder}/plain.safetensors") == ([], [])
        assert_bytes(ours.state_dict(), wanted)
        checkpoint.save(f"{folder}/{uses}", ours, adam(ours))
        if dist.get_rank() == 0:
            checkpoint.export(f"{folder}/{uses}", f"{folder}/{uses}.safetensors")
            exported = load_file(f"{folder}/{uses}.safetensors")
            assert_bytes({name: exported[name] for name in wanted}, wanted)
        dist.barrier()
        fill(ours, 1)
        checkpoint.load(f"{folder}/{uses}", ours)
        assert losses_of(ours) == losses
        written = io.BytesIO()
        torch.save(ours, written)  # pickle alone writes no fp8, in torch
        written.seek(0)
        assert_bytes(torch.load(written, weights_only=False).state_dict(), ours.state_dict())
        adapter = f"{folder}/adapter-{uses}"
        checkpoint.save(adapter, ours, adam(ours), trainable_only=True)
        again = wrapped(use_orig_params=uses)
        checkpoint.load(adapter, again, adam(again))
        assert_bytes(again.state_dict(), ours.state_dict())


class Meta(nn.Module):
    """Integers and fp8 that a module makes on the meta device, as a quantized model that is loaded later."""

    kinds = {name: dtype for name, (_, dtype) in KINDS.items() if not has_gradients(dtype)}

    def __init__(self):
        super().__init__()
        for name, dtype in self.kinds.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(5, 5, dtype=dtype), requires_grad=False))
        self.up = nn.Linear(5, 5)

    def reset_parameters(self):
        self.up.reset_parameters()
        for name in self.kinds:
            getattr(self, name).data.fill_(1)

    def forward(self, x):
        weights = [getattr(self, name) for name in self.kinds]
        return self.up(x) @ sum(weight.to(x.dtype) for weight in weights)


def meta_modules(folder):
    torch.manual_seed(5)
    plain = nn.Sequential(Meta(), Meta())
    for module in plain:
        module.reset_parameters()
    wanted = plain.state_dict()
    if dist.get_rank() == 0:
        save_file({name: value.contiguous() for name, value in wanted.items()}, f"{folder}/meta.safetensors")
    dist.barrier()
    for uses in (False, True):
        for init in (None, defer_init):
            with torch.device("meta"):
                made = nn.Sequential(Meta(), Meta())
            policy = ModuleWrapPolicy({Meta})
            torch.manual_seed(0)
            ours = FSDP(made, auto_wrap_policy=policy, use_orig_params=uses, param_init_fn=init)
            if init is None:
                with FSDP.summon_full_params(ours):
                    assert all((param == 1).all() for name, param in ours.named_parameters() if "up" not in name)
            else:
                part = {name: value for name, value in wanted.items() if "five" not in name}
                ours.load_state_dict(part, strict=False)
                with pytest.raises(ValueError, match=r"`five` of .* has no values yet"):
                    ours(torch.ones(2, 5))
            assert load_safetensors(ours, f"{folder}/meta.safetensors") == ([], [])
            assert_bytes(ours.state_dict(), wanted)
            x = torch.ones(2, 5)
            assert torch.equal(ours(x), plain(x))


def shown():
    """No gradient, no optimizer state and no cast of them is planned, and each is in the tables."""
    for uses in (False, True):
        ours = wrapped(use_orig_params=uses)
        wanted = list(dict(model().named_parameters()))
        if not uses:
            flat = ["_flat_param", *(f"_flat_param_{i}" for i in range(1, 8))]
            wanted = [f"{block}.{name}" for block in range(2) for name in flat]
        assert listed(ours) == wanted  # before the first forward and after it
        losses_of(ours, range(1))
        assert listed(ours) == wanted
        assert "FULL_SHARD over 2 ranks" in str(ours)
        plan = ours.memory_plan()
        trained = 5 * 2 + 2 * 5 + 5
        dtypes = [dtype for _, dtype in KINDS.values()]
        sizes = {dtype: 25 * dtypes.count(dtype) for dtype in dtypes}
        whole = sum(-(-numel // 2) * dtype.itemsize for dtype, numel in sizes.items())
        for unit in plan.units[1:]:
            extra = unit.shard - unit.gradient
            assert whole <= extra <= whole + 16 * len(sizes) * 8, (uses, unit, whole)
            assert unit.gradient <= 4 * (math.ceil(trained / 2) + 12), unit
        table = str(ours.shard_map())
        assert all(f"{name}.weight" in table for name in KINDS), table


def others():
    """Offloaded, without a warning of frozen ones, converted and unfrozen."""
    wanted = losses_of(wrapped())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = wrapped(cpu_offload=CPUOffload(offload_params=True), use_orig_params=True)
    assert losses_of(ours) == wanted
    assert [p.grad for p in ours.parameters() if not p.requires_grad] == [None] * 2 * len(KINDS)
    for uses in (False, True):
        ours = wrapped(use_orig_params=uses)
        every = torch.optim.AdamW(ours.parameters(), lr=0.01)
        assert losses_of(ours, optimizer=every) == wanted
        ours.clip_grad_norm_(1.0)
        assert {p.dtype for p in ours.parameters() if not p.requires_grad} == {kind[1] for kind in KINDS.values()}


def refused():
    class Shells(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(2, 2)
            self.odd = nn.Parameter(torch.zeros(4, dtype=torch.uint8).view(torch.uint4), requires_grad=False)

    with pytest.raises(ValueError, match=r"`odd`.*torch copies no torch.uint4.*ignored_states"):
        FSDP(Shells())
    for place in ("weight.codes", "state.codes"):
        module = model()
        layer = module[0].three
        holder = layer.weight if place.startswith("weight") else types.SimpleNamespace()
        holder.codes = layer.weight.data  # as 8-bit weights of bitsandbytes: it computes with these
        layer.state = holder if holder is not layer.weight else None
        named = place.replace("weight", "Packed")
        with pytest.raises(ValueError, match=rf"`three.weight`.*`{named}` shares its memory.*ignored_states"):
            FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}))
    module = model()
    module[0].six.weight = nn.Parameter(torch.zeros(25).to(torch.float8_e4m3fn), requires_grad=True)
    with pytest.raises(ValueError, match=r"`six.weight`.*torch.float8_e4m3fn.*freeze it before it is wrapped"):
        FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}))


def test_state_dicts_of_all_kinds_have_its_bytes():
    run_ranks(dict_kinds, 2)


def test_files_and_pickles_have_its_bytes(tmp_path):
    run_ranks(files, 2, str(tmp_path))


def test_meta_modules_are_filled(tmp_path):
    run_ranks(meta_modules, 2, str(tmp_path))


def test_plans_and_tables_have_no_gradient_of_it():
    run_ranks(shown, 2)


def test_offloaded_optimized_and_clipped_beside_what_trains():
    run_ranks(others, 2)


def test_what_cannot_be_bytes_is_refused_by_name():
    run_ranks(refused, 2)
