"""flatparam's class under torch's name: which modules get it, how torch's models go on, and the way back.

Promises:
- `install(runtime=True)`: every name of torch's class means ours, also in modules that imported it before and in
  children; models of torch's class go on; the way back
- a release of a trainer that was not tested is named where it is imported, and one that saves less than it should:
  `integrations/test_peft.py`
"""

import ast
import importlib
import pathlib
import re
import sys
import types

import forked_scripts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from fsdp_models import Averaged, assert_same, data, loss_of, make
from gloo import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchsFSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatparam
from flatparam.fsdp.wrapper.substitute import TESTED

STOCK = types.SimpleNamespace(FSDP=TorchsFSDP)  # install() rebinds what is bound in a module, here too
TRAVERSAL = importlib.import_module("torch.distributed.fsdp._traversal_utils")
FILE = "torch.distributed.fsdp.fully_sharded_data_parallel"
CPU = {"device_id": torch.device("cpu"), "use_orig_params": True, "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}


@pytest.fixture
def trainer():
    """A module that has imported torch's class under a name of its own, before anything was installed."""
    module = types.ModuleType("some_trainer")
    module.FSDP = module.Other = STOCK.FSDP
    sys.modules["some_trainer"] = module
    yield module
    del sys.modules["some_trainer"]
    flatparam.uninstall()


def test_every_name_of_torchs_class_means_ours(trainer, monkeypatch):
    ours = flatparam.FullyShardedDataParallel
    for _ in range(2):
        flatparam.install(runtime=True)
        assert trainer.FSDP is trainer.Other is ours
        assert torch.distributed.fsdp.FullyShardedDataParallel is ours
        scope = {}
        exec(f"from {FILE} import FullyShardedDataParallel; import {FILE} as file", scope)
        assert scope["FullyShardedDataParallel"] is scope["file"].FullyShardedDataParallel is ours
        assert scope["file"].MixedPrecision is torch.distributed.fsdp.MixedPrecision
        assert flatparam.is_installed(runtime=True)
        assert not flatparam.is_installed()
        monkeypatch.delitem(sys.modules, "torch.distributed.optim.named_optimizer", raising=False)
        assert importlib.import_module("torch.distributed.optim.named_optimizer").FSDP is ours
    flatparam.uninstall()
    assert not flatparam.is_installed(runtime=True)
    assert torch.distributed.optim.named_optimizer.FSDP is STOCK.FSDP
    assert trainer.FSDP is trainer.Other is STOCK.FSDP
    assert torch.distributed.fsdp.FullyShardedDataParallel is sys.modules[FILE].FullyShardedDataParallel is STOCK.FSDP


def test_what_is_set_in_torchs_module_reaches_torchs_functions(trainer, monkeypatch):
    stock = sys.modules[FILE]
    flatparam.install(runtime=True)
    monkeypatch.setattr(sys.modules[FILE], "_root_pre_forward", "replaced")
    assert stock._root_pre_forward == "replaced"
    monkeypatch.undo()
    assert callable(stock._root_pre_forward)
    assert dir(sys.modules[FILE]) == dir(stock)


def helpers_of_torch():
    """torch's own functions that list units and their handles do so for ours, and for those of torch's class."""
    stock = TRAVERSAL
    models = [STOCK.FSDP(make(), **CPU), flatparam.FullyShardedDataParallel(make(), **CPU)]
    flatparam.install(runtime=True)
    try:
        import torch.distributed.fsdp._traversal_utils as helpers

        assert helpers is not stock
        for model in models:
            units = [module for module in model.modules() if type(module).__name__ == "FullyShardedDataParallel"]
            assert len(units) > 1
            assert helpers._get_fsdp_states(model) == units
            flat = [unit._handle.flat_param for unit in units if unit._handle is not None]
            assert all(a.flat_param is b for a, b in zip(helpers._get_fsdp_handles(model), flat, strict=True))
        with pytest.raises(RuntimeError, match="do not know the unit of"):  # torch's runtime asks its own
            stock._get_fsdp_states(models[1])
    finally:
        flatparam.uninstall()
    import torch.distributed.fsdp._traversal_utils as helpers

    assert helpers is stock
    dist.barrier()


@pytest.mark.multiprocess
def test_helpers_of_torch_that_list_units():
    run_ranks(helpers_of_torch, 2)


def step_of(model, optimizer, oracle, i):
    loss_of(model, data(i)).backward()
    oracle.backward(lambda rank: [data(i, rank)])
    optimizer.step()
    optimizer.zero_grad()


def both_kinds():
    """A model that torch's class has wrapped before trains, saves and is known; so is one that is wrapped after."""
    name = "FullyShardedDataParallel"
    modules = [make(), make()]
    models = [STOCK.FSDP(make(), **CPU)]
    try:
        flatparam.install(runtime=True)
        cls = getattr(torch.distributed.fsdp, name)
        models.append(cls(make(), **CPU))
        assert [type(model) for model in models] == [STOCK.FSDP, flatparam.FullyShardedDataParallel]
        from torch.distributed.checkpoint.state_dict import get_state_dict

        for model, module in zip(models, modules, strict=True):
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, module)]
            assert isinstance(model, cls)
            assert not isinstance(module, cls)
            with model.no_sync():
                loss_of(model, data(7)).backward()
            model.zero_grad()
            for i in range(3):
                step_of(model, optimizers[0], Averaged(module, 2), i)
                optimizers[1].step()
                optimizers[1].zero_grad()
            assert len(cls.fsdp_modules(model)) > 1
            with cls.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                assert cls.get_state_dict_type(model).state_dict_type is StateDictType.SHARDED_STATE_DICT
            expected = module.state_dict()
            states = model.state_dict(), get_state_dict(model, optimizers[0])[0]
            for key, value in states[0].items():
                assert torch.equal(value, expected[key]), key
            assert set(states[0]) == set(states[1]) == set(expected)
            whole = cls.full_optim_state_dict(model, optimizers[0], rank0_only=False)
            assert set(whole["state"]) == {key for key, _ in module.named_parameters()}
            with cls.summon_full_params(model):
                for key, param in model.module.named_parameters():
                    clean = key.replace("_fsdp_wrapped_module.", "")
                    assert torch.equal(param, expected[clean]), key
        assert_same(models[1], modules[1])
        with pytest.raises(ValueError, match=r"would hold a FullyShardedDataParallel of torch \(at `0`\)"):
            cls(nn.Sequential(models[0]), **CPU)
    finally:
        flatparam.uninstall()
    assert not isinstance(models[0], flatparam.FullyShardedDataParallel)
    with pytest.raises(RuntimeError, match="do not know the unit of"):
        STOCK.FSDP(nn.Sequential(models[1]), **CPU)
    dist.barrier()


@pytest.mark.multiprocess
def test_models_of_both_classes_go_on():
    run_ranks(both_kinds, 2)


SCRIPT = """
import sys
from torch.distributed.fsdp import FullyShardedDataParallel
import torch.multiprocessing as mp

def child(rank):
    print("child", FullyShardedDataParallel.__module__, flush=True)

if __name__ == "__main__":
    print("parent", FullyShardedDataParallel.__module__, sys.argv[1:], flush=True)
    mp.spawn(child, nprocs=1)
"""


RUN = """
import os, runpy, sys
how, path = sys.argv[1:]
os.environ["FLATPARAM_RUNTIME"] = "1" if how == "environment" else ""
sys.argv = ["flatparam", "run", *["--runtime"] * (how == "option"), path, "--runtime"]
runpy.run_module("flatparam", run_name="__main__", alter_sys=True)
"""
VERSIONS = """
import importlib.util, sys, warnings
sys.path.insert(0, sys.argv[1])  # the trainers
warnings.simplefilter("always")
import transformers, flatparam
with warnings.catch_warnings(record=True) as found:
    flatparam.install(runtime=True)
    assert importlib.util.find_spec("accelerate") is not None  # asked for, not imported
    import accelerate, peft
    assert accelerate.loaded == peft.loaded == 1
    flatparam.uninstall()
    flatparam.install(runtime=True)
    flatparam.uninstall()
    import lightning
messages = [str(warning.message) for warning in found]
print(*(message for message in messages if "flatparam" in message or "PEFT" in message), sep="\\n")
"""
OTHERS = {"transformers": "5.24.0", "accelerate": "1.15.0", "lightning": "2.6.0"}
UNTESTED = {
    **{"transformers": "99.1.0", "accelerate": "99.2.0", "lightning": "99.3.0"},
    "peft": TESTED["peft"][0] + ".7",
}
TRAINERS = {"untested": UNTESTED, **{version: {**OTHERS, "peft": version} for version in ("0.21.2", "0.22.0")}}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Of all these programs, by their argument: forks of one process, as each would import torch for seconds."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "script.py").write_text(SCRIPT)
    programs = {how: (RUN, [how, str(folder / "script.py")]) for how in ("option", "environment")}
    for name, versions in TRAINERS.items():
        (folder / name).mkdir()
        for trainer, version in versions.items():
            text = f"__version__ = {version!r}\nloaded = globals().get('loaded', 0) + 1\n"
            (folder / name / f"{trainer}.py").write_text(text)
        programs[name] = VERSIONS, [str(folder / name)]
    [found] = forked_scripts.run_side_by_side([list(programs.values())], folder)
    return dict(zip(programs, found, strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["option", "environment"])
def test_run_puts_it_under_a_script_and_its_children(ends, how):
    assert ends[how].status == 0, ends[how].err
    ours = "flatparam.fsdp.wrapper.fully_sharded"
    assert ends[how].out.split("\n")[:2] == [f"parent {ours} ['--runtime']", f"child {ours}"]


def warned_of(end):
    """The messages of a program that imported trainers."""
    assert end.status == 0, end.err
    return end.out.splitlines()


@pytest.mark.multiprocess
def test_a_trainer_of_a_version_that_was_not_tested_is_named(ends):
    named = [
        re.search(r"for (\w+ [\d.]+)\. It was tested with (\w+ [\d. and]+):", line)
        for line in warned_of(ends["untested"])
    ]
    expected = [
        (f"{name} {UNTESTED[name]}", f"{name} {' and '.join(TESTED[name])}") for name in ("transformers", "accelerate")
    ]
    assert [match and match.groups() for match in named] == expected


@pytest.mark.multiprocess
@pytest.mark.parametrize("version", ["0.21.2", "0.22.0"])
def test_a_release_that_loses_what_it_saves_is_told_of(ends, version):
    """PEFT since 0.21 saves empty adapters: tests/integrations/test_peft.py shows it, and the way that is told."""
    *others, last = warned_of(ends[version])
    assert last.startswith(f"PEFT {version} saves empty adapters (adapter_model.safetensors without a tensor)")
    assert ["flatparam's FullyShardedDataParallel" in other for other in others] == [True] * (version == "0.22.0")


def test_the_tested_versions_are_those_that_are_installed_and_told():
    root = pathlib.Path(__file__).parents[3]
    [extra] = re.findall(r"^integrations = (\[[^]]*\])", (root / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = dict(requirement.split("==") for requirement in ast.literal_eval(extra))
    assert {name: pinned[name].rpartition(".")[0] for name in TESTED} == {name: TESTED[name][-1] for name in TESTED}
    told = (root / "docs" / "integrations.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(?:\n|- .*\n|  .*\n)*?- \*\*Version\*\*: ([\d.]+)\.$", told, re.MULTILINE))
    sections = {name.lower(): version for name, version in sections.items()}
    assert sections == pinned
