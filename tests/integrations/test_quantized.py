"""Quantized weights that are frozen beside adapters: bitsandbytes' of 4 and 8 bits, HQQ's and torchao's.

The oracle is the unsharded module. torch's class takes none of these: integers, and wrappers of several tensors.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from trainers import needs, under

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import checkpoint
from flatparam.common.torch_private import TorchsFSDP

pytestmark = pytest.mark.multiprocess


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.up(self.down(x))


def made(quantize, seed=0):
    torch.manual_seed(seed)
    module = nn.Sequential(Block(), Block()).to(torch.bfloat16)
    quantize(module)
    for block in module:
        block.base.requires_grad_(False)
    return module


def of_4_bits(module):
    import bitsandbytes as bnb

    for block in module:
        layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layer.support_avx512bf16_for_cpu = False
        layer.load_state_dict(block.base.state_dict())
        block.base = layer.to("cpu")
        assert block.base.weight.dtype == torch.uint8


def of_8_bits(module):
    import bitsandbytes as bnb

    for block in module:
        layer = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        layer.load_state_dict(block.base.state_dict())
        block.base = layer.to("cpu")


def by_hqq(module):
    from hqq.core import quantize

    for block in module:
        settings = quantize.BaseQuantizeConfig(nbits=4, group_size=64)
        block.base = quantize.HQQLinear(block.base, settings, compute_dtype=torch.bfloat16, device="cpu")


def by_torchao(module):
    import torchao.quantization as quantization

    quantization.quantize_(module, quantization.Int8WeightOnlyConfig(), lambda inner, name: name.endswith("base"))


def adam(module):
    return torch.optim.AdamW([param for param in module.parameters() if param.requires_grad], lr=0.01)


def losses_of(module, steps=range(4), optimizer=None):
    """All ranks have one batch, so that their mean is the unsharded module's gradient."""
    optimizer, losses = adam(module) if optimizer is None else optimizer, []
    for _ in steps:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
        loss = module(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(module, **arguments):
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def sharded(folder, quantize):
    wanted = losses_of(made(quantize))
    assert wanted[-1] < wanted[0]
    for uses in (False, True):
        ours = wrapped(made(quantize), use_orig_params=uses)
        bytes_of_base = [
            flat_param for block in ours.module for flat_param in block._unit.flat_params if flat_param.in_bytes
        ]
        assert [flat_param.flat.numel() for flat_param in bytes_of_base] == [64 * 64 // 2 // 2] * 2  # 4 bits, 2 ranks
        optimizer = adam(ours)
        assert losses_of(ours, range(2), optimizer) == wanted[:2]
        path = f"{folder}/{uses}"
        checkpoint.save(path, ours, optimizer, trainable_only=True)
        assert losses_of(ours, range(2, 4), optimizer) == wanted[2:]
        again = wrapped(made(quantize), use_orig_params=not uses)
        optimizer = adam(again)
        checkpoint.load(path, again, optimizer)
        assert losses_of(again, range(2, 4), optimizer) == wanted[2:]
        path = f"{folder}/whole {uses}"
        checkpoint.save(path, again)
        other = wrapped(made(quantize, seed=1), use_orig_params=uses)  # of other base weights
        if quantize is of_4_bits:  # it writes the scales of the weights, and has no code that loads them
            with pytest.raises(checkpoint.CheckpointError, match=r"`0\.base\.weight\..* is another in the checkpoint"):
                checkpoint.load(path, other)
            other = wrapped(made(quantize), use_orig_params=uses)
        assert losses_of(other, range(1)) != losses_of(again, range(1))
        checkpoint.load(path, other)
        after = [losses_of(one, range(1)) for one in (other, again)]
        checkpoint.load(path, again)
        after.append(losses_of(again, range(1)))
        assert after[0] == after[2] != after[1]


def ignored(quantize, message):
    wanted = losses_of(made(quantize))
    for uses in (False, True):
        with pytest.raises(ValueError, match=rf"`base.weight`.*{message}.*ignored_states"):
            wrapped(made(quantize), use_orig_params=uses)
        module = made(quantize)
        bases = [block.base.weight for block in module]
        assert losses_of(wrapped(module, use_orig_params=uses, ignored_states=bases)) == wanted
    dist.barrier()


def ignored_by_torchs_class():
    """What docs/integrations.md says to do where torch's class stays."""
    wanted = losses_of(made(of_4_bits))
    for kind, uses in itertools.product(("torch", "dropin"), (False, True)):
        with under(kind):
            arguments = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": uses}
            with pytest.raises(ValueError, match="integer dtype" if uses else "requires_grad=True and False"):
                TorchsFSDP(made(of_4_bits), **arguments)
            module = made(of_4_bits)
            bases = [block.base.weight for block in module]
            assert losses_of(TorchsFSDP(module, ignored_states=bases, **arguments)) == wanted
    dist.barrier()


def test_4_bits_in_bytes_are_ignored_by_torchs_class_or_named():
    needs("bitsandbytes")
    run_ranks(ignored_by_torchs_class, 2)


def test_4_bits_of_bitsandbytes_in_bytes_are_sharded(tmp_path):
    needs("bitsandbytes")
    run_ranks(sharded, 2, str(tmp_path), of_4_bits)


def test_4_bits_of_hqq_are_sharded(tmp_path):
    needs("hqq")
    run_ranks(sharded, 2, str(tmp_path), by_hqq)


def test_8_bits_of_bitsandbytes_are_ignored_or_named():
    needs("bitsandbytes")
    run_ranks(ignored, 2, of_8_bits, "Int8Params.CB. shares its memory")


def test_wrappers_of_torchao_are_ignored_or_named():
    needs("torchao")
    run_ranks(ignored, 2, by_torchao, "Int8Tensor, a subclass of torch's")
