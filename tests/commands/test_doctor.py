"""`python -m flatparam doctor` tells what flatparam runs on, and fails where torch's internals are not as expected.

Each check is tried on a torch that lacks a name or behaves differently: one change, and the check that finds it."""

import sys

import pytest
import torch
from torch.distributed.fsdp import _flat_param as torch_flat_param

import flatparam
from flatparam.__main__ import main
from flatparam.commands import doctor

pytestmark = pytest.mark.multiprocess  # a rank alone, but gloo


def add_a_function(patch):
    def _new_function():
        pass

    _new_function.__module__ = torch_flat_param.__name__
    patch.setattr(torch_flat_param, "_new_function", _new_function, raising=False)


class Untrained(flatparam.FullyShardedDataParallel):
    def state_dict(self, *args, **kwargs):
        return {name: value + 1 for name, value in super().state_dict(*args, **kwargs).items()}


FAULTS = {
    "torch.distributed.utils._p_assert": lambda patch: patch.delattr(torch.distributed.utils, "_p_assert"),
    "torch.nn.utils.clip_grad:_get_total_norm": lambda patch: patch.delattr(
        torch.nn.utils.clip_grad, "_get_total_norm"
    ),
    "_new_function": add_a_function,
    "the shard (use_orig_params": lambda patch: patch.setattr(
        torch_flat_param.FlatParamHandle, "shard", lambda handle: handle.flat_param.zero_()
    ),
    "0.weight": lambda patch: patch.setattr(flatparam, "FullyShardedDataParallel", Untrained),
}


def test_the_report_names_versions_and_the_extension_and_every_check_passes(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines[:7])
    assert list(facts) == ["flatparam", "Python", "torch", "device", "NCCL", "extension", "kernels"]
    assert facts["flatparam"].startswith(f"{flatparam.__version__}, ")
    assert facts["Python"].startswith("{}.{}.{}, ".format(*sys.version_info[:3]))
    assert facts["torch"].startswith(f"{torch.__version__}, ")
    assert facts["extension"].startswith(f"{flatparam._C.__file__}: ")
    assert [line.split()[0] for line in lines[7:]] == ["passed"] * len(doctor.CHECKS)


@pytest.mark.parametrize(("problem", "check"), list(zip(FAULTS, doctor.CHECKS, strict=True)))
def test_a_check_that_fails_says_why(problem, check, monkeypatch, capsys):
    FAULTS[problem](monkeypatch)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    [place] = [place for place, line in enumerate(lines) if line == f"FAILED     {check}"]
    assert lines[place + 1].startswith(f"           {problem}")


def test_it_takes_no_arguments(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "usage: python -m flatparam doctor" in capsys.readouterr().out
    assert main(["doctor", "now"]) == 2
