"""LAYER_ZERO in its three ways behind one interface: two strategies of the wrapper, and the handle driven by hand."""

import torch
from fsdp_models import full_grads, full_params, loss_of, make
from layer_zero_driver import State, drive, held
from layer_zero_driver import full_grads as grads_by_hand
from layer_zero_driver import full_params as params_by_hand
from layer_zero_ranks import MODES, layer_zero, micro_batches

from benchmarks.c_testing import _C_testing
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision
from flatparam.layer_zero import agree

BF16 = torch.bfloat16
BY_HAND = "by hand"
WAYS = (*MODES, BY_HAND)


class Wrapped:
    """The tests' model under a strategy of the wrapper."""

    def __init__(self, mode, inner, low, offload, uo):
        precision = MixedPrecision(param_dtype=BF16) if low else None
        self.model = layer_zero(inner, mode, use_orig_params=uo, mixed_precision=precision, offload_grads=offload)
        self.units = [unit._unit for unit in FSDP.fsdp_modules(self.model)]
        self.share = inner if mode == "LAYER_ZERO_NESTED" else 1  # ranks over which a sum of micro-batches is spread

    def forward(self, x):
        return self.model(x)

    def backward(self, batches):
        """Micro-batches of one step; the last one reduces."""
        micro_batches(self.model, batches)

    def hold_back(self, x, loss=None):
        """A micro-batch that does not reduce. ``loss``: of its forward, which has run."""
        with self.model.no_sync():
            (loss_of(self.model, x) if loss is None else loss).backward()

    def clear(self, to_none=True):
        self.model.zero_grad(to_none)

    def params(self):
        return list(full_params(self.model).values())

    def grads(self):
        return list(full_grads(self.model).values())

    def load(self, change):
        """Load ``change`` of each value of the state dict."""
        whole = {name: change(value) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(whole)

    def paddings(self):
        """Of each unit: the padding in this rank's shard, and in its gradient, if there is one of the whole shard."""
        for flat_param in (unit.flat_params[0] for unit in self.units):
            mask = mask_of(flat_param.flat, flat_param.piece_ranges())
            yield flat_param.flat.detach()[mask], None if flat_param.flat.grad is None else flat_param.flat.grad[mask]

    def sums(self):
        """Of each unit: the bytes of its sum of micro-batches on the device, and of one that is not offloaded."""
        sizes = [4 * unit.flat_params[0].layout.padded_numel // self.share for unit in self.units]
        return [_C_testing.accumulated_bytes(unit.core)[0] for unit in self.units], sizes


class ByHand:
    """The tests' model, and the driver of the docs."""

    def __init__(self, inner, low, offload):
        self.model = make()
        self.dtype = BF16 if low else torch.float32
        self.driver = drive(self.model, inner, BF16 if low else None, offload)
        self.handles = self.driver.handles

    def forward(self, x):
        agree(self.handles)
        return self.model(x.to(self.dtype))

    def backward(self, batches):
        self.driver.backward([lambda x=x: loss_of(self.model, x.to(self.dtype)) for x in batches])

    def hold_back(self, x, loss=None):
        self.driver.sync = False
        (loss_of(self.forward, x) if loss is None else loss).backward()
        for handle in self.handles:
            handle._training_state = State.IDLE

    def clear(self, to_none=True):
        self.model.zero_grad(to_none)
        for handle in self.handles:
            handle._reset_flat_param_grad_info_if_needed()

    def params(self):
        return params_by_hand(self.handles, self.model)

    def grads(self):
        return grads_by_hand(self.handles, self.model)

    def load(self, change):
        self.model.load_state_dict({name: change(value) for name, value in self.model.state_dict().items()})

    def paddings(self):
        for flat in (handle.flat_param for handle in self.handles):
            pieces = [(i.offset_in_shard, i.numel_in_shard) for i in flat._shard_param_infos if i.in_shard]
            mask = mask_of(flat._zero1_shard, pieces)
            yield flat._zero1_shard.detach()[mask], None if flat.grad is None else flat.grad[mask]

    def sums(self):
        flats = [handle.flat_param for handle in self.handles]
        return (
            [held(flat._full_prec_grad_padded) for flat in flats],
            [4 * flat._padded_unsharded_size.numel() for flat in flats],
        )


def mask_of(shard, pieces):
    mask = torch.ones(shard.numel(), dtype=torch.bool)
    for start, numel in pieces:
        mask[start : start + max(numel, 0)] = False
    return mask


def driven(way, inner=2, *, low=False, offload=False, uo=False):
    """The tests' model of four units in one of ``WAYS``. By hand the modules have the original parameters (``uo``)."""
    return ByHand(inner, low, offload) if way == BY_HAND else Wrapped(way, inner, low, offload, uo)
