"""install() puts our handle in place of torch's wherever torch keeps it, uninstall() puts torch's back.

Each case runs in an interpreter of its own, because what was imported before is the point.
"""

import pathlib
import subprocess
import sys
import textwrap

import pytest

import flatparam

pytestmark = pytest.mark.multiprocess

PRELUDE = """
import sys

def places():
    # every module that holds a name FlatParamHandle, and whose class it is
    return {
        name: module.__dict__["FlatParamHandle"].__module__.split(".")[0]
        for name, module in list(sys.modules.items())
        if name.startswith("torch.distributed") and module is not None and "FlatParamHandle" in vars(module)
    }

def wrap():
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(torch.nn.Linear(5, 3), device_id=torch.device("cpu"), use_orig_params=True)
    return model

def owner(model):
    return type(model._handle).__module__.split(".")[0]

def step(model):
    import torch
    model(torch.ones(2, 5)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())
"""

CASES = {
    "before torch.distributed.fsdp is imported": """
        import flatparam
        flatparam.install()
        import torch.distributed.fsdp
        from torch.distributed.fsdp._flat_param import FlatParamHandle
        assert FlatParamHandle is flatparam.FlatParamHandle
        assert set(places().values()) == {"flatparam"}, places()
        assert owner(wrap()) == "flatparam"
        """,
    "after it is imported": """
        import torch.distributed.fsdp, torch.distributed.fsdp._optim_utils
        assert set(places().values()) == {"torch"} and len(places()) >= 5
        import flatparam
        assert set(places().values()) == {"torch"}, "importing flatparam alone must change nothing"
        flatparam.install()
        assert set(places().values()) == {"flatparam"}, places()
        assert owner(wrap()) == "flatparam"
        """,
    "before torch is imported": """
        assert "torch" not in sys.modules
        import flatparam
        flatparam.install()
        import torch
        assert owner(wrap()) == "flatparam"
        """,
    "a module imported after install": """
        import flatparam
        flatparam.install()
        import importlib
        for name in ("_runtime_utils", "_init_utils", "_optim_utils", "_unshard_param_utils", "_exec_order_utils"):
            module = importlib.import_module("torch.distributed.fsdp." + name)
            assert module.FlatParamHandle is flatparam.FlatParamHandle, name
        """,
    "is_installed": """
        import flatparam
        assert flatparam.is_installed() is False
        flatparam.install()
        assert flatparam.is_installed() is True
        flatparam.uninstall()
        assert flatparam.is_installed() is False
        """,
    "twice": """
        import flatparam
        import torch.distributed.fsdp._flat_param as module
        torchs = module.FlatParamHandle
        assert flatparam.install() is None
        flatparam.install()
        assert flatparam.is_installed()
        flatparam.uninstall()
        assert not flatparam.is_installed()
        assert module.FlatParamHandle is torchs
        flatparam.uninstall()
        assert module.FlatParamHandle is torchs
        flatparam.install()
        assert module.FlatParamHandle is flatparam.FlatParamHandle
        """,
    "uninstall without install": """
        import flatparam
        flatparam.uninstall()
        assert not flatparam.is_installed()
        assert owner(wrap()) == "torch"
        """,
    "uninstall puts back all that there was": """
        import torch.distributed.fsdp, torch.distributed.fsdp._optim_utils
        def everything():
            return {
                (name, key): id(value)
                for name, module in sorted(sys.modules.items())
                if name.startswith("torch.distributed") and module is not None
                for key, value in vars(module).items()
                if not key.startswith("__")
            }
        import flatparam
        before = everything()
        flatparam.install()
        assert everything() != before
        flatparam.uninstall()
        after = everything()
        changed = [key for key in before if after.get(key) != before[key]]
        assert not changed, changed
        """,
    "models keep their handles": """
        import flatparam
        first = wrap()
        flatparam.install()
        second = wrap()
        flatparam.uninstall()
        third = wrap()
        flatparam.install()
        fourth = wrap()
        owners = [owner(model) for model in (first, second, third, fourth)]
        assert owners == ["torch", "flatparam", "torch", "flatparam"], owners
        for installed in (True, False):
            (flatparam.install if installed else flatparam.uninstall)()
            for model in (first, second, third, fourth):
                step(model)
                step(model)
        assert [owner(model) for model in (first, second, third, fourth)] == owners
        """,
    "torch's enums and tuples stay": """
        import torch.distributed.fsdp._flat_param as module
        import torch.distributed.fsdp._init_utils as init_utils
        names = ("FlatParameter", "ParamInfo", "SharedParamInfo", "FlatParamShardMetadata", "HandleShardingStrategy")
        before = [getattr(module, name) for name in names]
        import flatparam
        flatparam.install()
        from torch.distributed.fsdp import FlatParameter
        assert FlatParameter is before[0]
        assert [getattr(module, name) for name in names] == before
        assert [getattr(flatparam, name) for name in names] == before
        for strategy in init_utils.SHARDING_STRATEGY_MAP.values():
            assert isinstance(strategy, flatparam.HandleShardingStrategy)
        """,
    "a method replaced by the user": """
        import flatparam
        flatparam.install()
        from torch.distributed.fsdp._flat_param import FlatParamHandle
        calls = []
        original = FlatParamHandle.unshard
        FlatParamHandle.unshard = lambda self: (calls.append(self), original(self))[1]
        step(wrap())
        assert calls
        """,
    "in a forked child": """
        import os
        import flatparam
        flatparam.install()
        child = os.fork()
        if child == 0:
            try:
                assert flatparam.is_installed() and owner(wrap()) == "flatparam"
                flatparam.uninstall()
                assert owner(wrap()) == "torch"
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert flatparam.is_installed() and owner(wrap()) == "flatparam"
        """,
    "from several threads": """
        import threading
        import flatparam
        import torch.distributed.fsdp._flat_param as module
        torchs = module.FlatParamHandle
        threads = [threading.Thread(target=flatparam.install) for _ in range(20)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert set(places().values()) == {"flatparam"}
        flatparam.uninstall()
        assert module.FlatParamHandle is torchs
        """,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_in_an_interpreter_of_its_own(name):
    package = str(pathlib.Path(flatparam.__file__).parent.parent)
    code = (
        f"import sys; sys.path.insert(0, {package!r})\n{PRELUDE}\n{textwrap.dedent(CASES[name])}\nprint('to the end')"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("to the end\n")
