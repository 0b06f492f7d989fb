"""install() holds torch's handle beside ours on a tiny module, and refuses a torch whose handle does something else."""

import sys
import textwrap
import time
from pathlib import Path

import forked_scripts
import pytest
import torch
from torch.distributed.fsdp import _flat_param as torchs

import flatparam
from flatparam.dropin import install

THEIRS = install.TORCH_HANDLE


class OtherInfos(THEIRS):
    def _get_shard_metadata(self, start, end):
        return super()._get_shard_metadata(start, end)[::-1]


class OtherPadding(THEIRS):
    @staticmethod
    def _get_shard(tensor, rank, world_size):
        shard, padding = THEIRS._get_shard(tensor, rank, world_size)
        return shard + 1, padding

    def shard(self):
        super().shard()
        self.flat_param.data += 1


class OtherViews(THEIRS):
    def _use_sharded_views(self):
        super()._use_sharded_views()
        for param in self.flat_param._params:
            param.data = param.data.clone()[:0]


class OtherMetadata(THEIRS):
    def shard_metadata(self):
        return super().shard_metadata()._replace(param_numels=())


class Raising(THEIRS):
    def reshard(self, free):
        raise NotImplementedError("reshard() is gone")


def test_this_torch_behaves_as_ours_and_is_asked_in_a_moment():
    state, seconds = torch.get_rng_state(), []
    for _ in range(3):
        started = time.process_time()
        assert install.differences(flatparam.FlatParamHandle, THEIRS) == []
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.2  # it takes 0.02 s, and more than twice that under the sanitizers on a slow machine
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("theirs", [OtherInfos, OtherPadding, OtherViews, OtherMetadata, Raising])
def test_another_behaviour_is_found(theirs):
    found = install.differences(flatparam.FlatParamHandle, theirs)
    assert found
    assert all("torch's answers" in line for line in found)


def test_such_a_torch_is_refused_and_left_as_it_is(monkeypatch):
    monkeypatch.setattr(install, "_differences", lambda: install.differences(flatparam.FlatParamHandle, Raising))
    with pytest.raises(RuntimeError, match=r"not installed: torch .* On a tiny module: .*reshard\(\) is gone"):
        flatparam.install()
    assert torchs.FlatParamHandle is THEIRS


@pytest.mark.multiprocess
def test_a_process_forked_after_install_can_go_backward():
    code = """
        import os, sys, torch, flatparam
        flatparam.install()
        if os.fork() == 0:
            torch.ones(1, requires_grad=True).sum().backward()
            os._exit(0)
        sys.exit(os.wait()[1])
    """
    folder = Path(flatparam.__file__).parent.parent
    done = forked_scripts.completed([sys.executable, "-c", textwrap.dedent(code)], cwd=folder)
    assert done.returncode == 0, done.stderr
