"""Frozen parameters that are bytes: of a subclass over plain memory, as 4-bit weights are, and of integers and fp8.

As torch's class trains them as buffers: it takes no parameters of integers, and of one dtype in a unit alone.

Promises:
- frozen parameters that are bytes (integers, fp8, a subclass over plain memory, as 4-bit weights are) are sharded,
  never cast, and keep their class and attributes
- one on the meta device is made by `param_init_fn`, or refused by name:
  `test_on_the_meta_device_it_is_made_by_the_user_or_refused_by_name`
"""

import copy

import pytest
import torch
import torch.distributed as dist
from gloo import fake_world
from simulated_ranks import simulate_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy, checkpoint, defer_init

pytestmark = pytest.mark.multiprocess

HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)


class Packed(nn.Parameter):
    """As the 4-bit weights of bitsandbytes: bytes, and a state that says how they are read."""

    def __new__(cls, data, requires_grad=False, scale=None):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.scale = scale
        return self


class Wide(Packed):
    """Another class, in another dtype."""


KINDS = {
    "one": (Packed, torch.bfloat16),
    "two": (Wide, torch.float64),
    "three": (Packed, torch.uint8),
    "four": (nn.Parameter, torch.uint8),  # in one flat parameter with three
    "five": (nn.Parameter, torch.int16),
    "six": (Wide, torch.float8_e4m3fn),
    "seven": (nn.Parameter, torch.bool),
    "eight": (nn.Parameter, torch.int64),
}
KEPT = [torch.bfloat16, torch.float64, torch.uint8, torch.int16, torch.float8_e4m3fn, torch.bool, torch.int64]


def bits(tensor):
    return tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)


class Base(nn.Module):
    """A frozen weight that is read as its class says; with ``packed=False`` the same bytes are a buffer."""

    def __init__(self, cls, dtype, packed):
        super().__init__()
        made = torch.randn(25, 1).mul(1 if dtype.is_floating_point else 3).abs().to(dtype)
        self.given = None  # data that it gives to its weight in a forward
        self.expected, self.cls, self.scale = bits(made).clone(), cls if packed else None, torch.tensor(0.125)
        if packed:
            self.weight = cls(made, requires_grad=False)
            self.weight.scale = self.scale
        else:
            self.register_buffer("weight", made)

    def forward(self, x):
        weight = self.weight
        assert torch.equal(bits(weight), self.expected), "other bytes"
        assert weight.grad is None
        if self.cls not in (None, nn.Parameter):
            assert type(weight) is self.cls
            assert isinstance(weight, nn.Parameter)
            assert weight.scale is self.scale
        if self.given is not None:
            weight.data = self.given
        return x @ (weight.detach().as_subclass(torch.Tensor).reshape(5, 5).to(x.dtype) * self.scale.to(x.dtype)).t()


class Block(nn.Module):
    def __init__(self, packed):
        super().__init__()
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5)
        for name, (cls, dtype) in KINDS.items():
            self.add_module(name, Base(cls, dtype, packed))

    def forward(self, x):
        return x + self.up(self.down(x)) + sum(getattr(self, name)(x) for name in KINDS)


def model(packed=True):
    torch.manual_seed(3)
    return nn.Sequential(Block(packed), Block(packed))


def batch(step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def step_of(module, optimizer, step):
    loss = module(batch(step)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adam(module):
    return torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=0.01)


def losses_of(module, steps=range(3), optimizer=None):
    optimizer = adam(module) if optimizer is None else optimizer
    return [step_of(module, optimizer, step) for step in steps]


def wrapped(**arguments):
    return FSDP(model(), auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def as_torch(steps=range(3), **arguments):
    oracle = Torch(
        model(packed=False), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **arguments
    )
    return losses_of(oracle, steps)


def trains():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for precision in (None, HALF):
        wanted = as_torch(mixed_precision=precision)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "LAYER_ZERO"):
            for uses in (False, True):
                for segments in (False, True):
                    what = (precision, strategy, uses, segments)
                    ours = wrapped(
                        sharding_strategy=ShardingStrategy[strategy],
                        process_group=(alone, dist.group.WORLD) if strategy == "LAYER_ZERO" else None,
                        mixed_precision=precision,
                        use_orig_params=uses,
                        segments=segments,
                    )
                    assert losses_of(ours) == wanted, (what, wanted)
                    frozen = [param for param in ours.parameters() if not param.requires_grad]
                    assert frozen, what
                    assert all(param.grad is None for param in frozen), what
                    shards = 1 if strategy == "NO_SHARD" else 2
                    for unit in (block._unit for block in ours.module):
                        kept = [flat_param for flat_param in unit.flat_params if flat_param.in_bytes]
                        assert [flat_param.flat.dtype for flat_param in kept] == KEPT, what
                        numels = [sum(flat_param.layout.numels) for flat_param in kept]
                        assert numels == [25 * sum(kind[1] == dtype for kind in KINDS.values()) for dtype in KEPT]
                        assert all(s.flat.numel() * shards >= s.layout.numel for s in kept), what
                        assert all(s.flat.numel() < s.layout.numel for s in kept if shards == 2), what


def shows():
    for uses in (False, True):
        ours = wrapped(use_orig_params=uses)
        plain = dict(model().named_parameters())
        losses_of(ours, range(1))
        state = ours.state_dict()
        assert list(state) == list(model().state_dict())
        for name, value in state.items():
            assert (type(value), value.dtype) == (torch.Tensor, plain[name].dtype), name
            if not plain[name].requires_grad:
                assert torch.equal(bits(value), bits(plain[name])), name
        with FSDP.summon_full_params(ours):
            shown = dict(ours.named_parameters())
            for name, value in plain.items():
                assert (type(shown[name]), shown[name].shape) == (type(value), value.shape), name
            assert shown["0.one.weight"].scale is ours.module[0].module.one.scale
            with torch.no_grad():
                shown["0.one.weight"].zero_()
        assert not ours.state_dict()["0.one.weight"].any()
        ours.load_state_dict({**state, "0.one.weight": plain["0.one.weight"]})
        assert torch.equal(bits(ours.state_dict()["0.one.weight"]), bits(plain["0.one.weight"]))
        copied = copy.deepcopy(ours)
        again = losses_of(ours, range(1, 3))
        assert losses_of(copied, range(1, 3)) == again
        one = copied.module[0].module.one
        assert one.scale is not ours.module[0].module.one.scale


def resumes(folder):
    for uses in (False, True):
        path = f"{folder}/{uses}"
        ours = wrapped(use_orig_params=uses)
        optimizer = adam(ours)
        losses_of(ours, range(2), optimizer)
        checkpoint.save(path, ours, optimizer)
        wanted = losses_of(ours, range(2, 4), optimizer)
        other = wrapped(use_orig_params=not uses)
        with torch.no_grad(), FSDP.summon_full_params(other):
            for param in other.parameters():
                param.zero_()
        optimizer = adam(other)
        checkpoint.load(path, other, optimizer)
        assert losses_of(other, range(2, 4), optimizer) == wanted


def synchronizes():
    module = model()
    for param in module.parameters() if dist.get_rank() else ():
        param.data.zero_()
    ours = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, sync_module_states=True)
    assert losses_of(ours) == as_torch()


def writes():
    """As a layer that packs its weights anew in its first evaluation."""
    for uses in (False, True):
        ours = wrapped(use_orig_params=uses)
        losses_of(ours, range(1))
        one = ours.module[0].module.one
        one.given = torch.arange(25.0, dtype=torch.bfloat16).view(25, 1)
        with torch.no_grad():
            ours(batch(0))
        one.expected, one.given = bits(one.given), None
        assert torch.equal(bits(ours.state_dict()["0.one.weight"]), one.expected)
        losses_of(ours, range(1))
        one.given = torch.zeros(1, 25, dtype=torch.bfloat16)
        with torch.no_grad(), pytest.raises(ValueError, match=r"new data of parameter `weight` of a Base have another"):
            ours(batch(0))
        one.given = None
        losses_of(ours, range(1))


def refuses():
    module = model()
    module[0].one.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"`one.weight`.*a Packed, a subclass.*freeze it before it is wrapped"):
        FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}))


def test_trains_as_torchs_class_with_its_bytes_never_cast():
    simulate_ranks(trains, 2)


def test_is_shown_saved_and_copied_with_its_class_and_its_bytes():
    simulate_ranks(shows, 2)


def test_a_checkpoint_resumes(tmp_path):
    simulate_ranks(resumes, 2, str(tmp_path))


def test_rank_0_gives_its_bytes_to_the_others():
    simulate_ranks(synchronizes, 2)


def test_data_that_a_forward_gives_it_are_kept_or_refused_by_name():
    simulate_ranks(writes, 2)


def test_a_trainable_one_is_refused_by_name():
    simulate_ranks(refuses, 2)


class OnMeta(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.up = nn.Linear(6, 2)
            self.base = Packed(torch.ones(4, 6).to(torch.uint8), scale=2.0)

    def reset_parameters(self):
        self.base.fill_(3)

    def forward(self, x):
        return self.up(x @ (self.base.as_subclass(torch.Tensor).float() * self.base.scale))


def fill(module):
    module.to_empty(device="cpu", recurse=False)
    if isinstance(module, OnMeta):
        module.base = Packed(torch.full((4, 6), 3, dtype=torch.uint8), scale=2.0)
    else:
        module.reset_parameters()


@pytest.mark.parametrize("uo", [False, True])
def test_on_the_meta_device_it_is_made_by_the_user_or_refused_by_name(uo):
    with fake_world(2):
        for init in (None, defer_init):
            with pytest.raises(ValueError, match="`base` of OnMeta is a Packed on the meta device, and became a plain"):
                FSDP(OnMeta(), use_orig_params=uo, param_init_fn=init)
        model = FSDP(OnMeta(), use_orig_params=uo, param_init_fn=fill)
        assert model(torch.ones(1, 4)).shape == (1, 2)
        assert any(flat_param.in_bytes for flat_param in model._unit.flat_params)
