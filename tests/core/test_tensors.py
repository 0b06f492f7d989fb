"""The extension's functions of tensors: converting and adding in one pass, and versions."""

import itertools

import pytest
import torch
from torch import nn

import flatparam


def test_the_fused_addition_gives_torchs_bits():
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for to, of in itertools.product(dtypes, dtypes):
        source, target = torch.randn(1003, dtype=torch.float64).to(of), torch.randn(1003, dtype=torch.float64).to(to)
        added, version = target.clone(), target._version
        flatparam._C.convert(target, source, False)
        assert torch.equal(target, source.to(to))
        flatparam._C.convert(added, source, True)
        assert target._version == version + 1
        flatparam._C.convert(target, source, True)
        assert torch.equal(target, source.to(to) + source.to(to))
    whole = torch.ones(8)
    freed = torch.ones(4)
    flatparam._C.free(freed)
    for bad in (whole[:4], whole.view(2, 4), freed, whole[:8:2], torch.ones(5)):
        with pytest.raises(ValueError, match=r"expected two|with memory for"):
            flatparam._C.convert(whole[:4], bad, True)
    with pytest.raises(TypeError, match="plain"):
        flatparam._C.convert(whole, None, True)
    assert torch.equal(whole, torch.ones(8))


def test_versions_tell_of_changes_in_place():
    params = [nn.Parameter(torch.ones(3)), torch.ones(2)]
    before = flatparam._C.versions(params)
    with torch.no_grad():
        params[0].add_(1)
    assert flatparam._C.versions(params) == before + 1
    params[1].zero_()
    assert flatparam._C.versions(params) == before + 2
    assert flatparam._C.versions([torch.ones(2, device="meta")]) is None
