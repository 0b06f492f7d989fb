"""The cost of `import flatparam`, and the modules that it imports, each in a new interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]

CASES = {
    "nothing but the extension until a name is asked for": """
        import flatparam
        assert "flatparam._C" in sys.modules
        for late in ("torch._dynamo", "torch.distributed.fsdp", "flatparam.fsdp", "flatparam.dropin.handle"):
            assert late not in sys.modules, late
        assert {"FullyShardedDataParallel", "install", "fsdp"} <= set(dir(flatparam))
        """,
    "Dynamo is left to the first wrapped model": """
        import flatparam
        assert flatparam.FullyShardedDataParallel is flatparam.fsdp.FullyShardedDataParallel
        assert flatparam.FlatParamHandle and flatparam.FlatLayout and flatparam.install
        assert "torch._dynamo" not in sys.modules
        """,
    "every name is there in every order": """
        import flatparam.commands.run, flatparam.common.layout, flatparam.dropin.handle
        import flatparam
        assert callable(flatparam.install) and callable(flatparam.wrap)
        for name in flatparam.__all__:
            assert getattr(flatparam, name) is not None, name
        """,
    "from flatparam import *": """
        from flatparam import *
        assert FullyShardedDataParallel.__module__ == "flatparam.fsdp.wrapper.fully_sharded"
        assert callable(install)
        """,
    "distributed checkpoints are met as they are imported": """
        import torch, torch.distributed as dist, flatparam
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        model = flatparam.FullyShardedDataParallel(torch.nn.Linear(4, 4))
        assert "torch.distributed.checkpoint" not in sys.modules
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
        for plan in (create_default_local_save_plan, dcp.default_planner.create_default_local_load_plan):
            try:
                plan({"a": list(model.parameters())[0].data}, True)
            except RuntimeError as error:
                assert "shards of parameters" in str(error), error
            else:
                raise AssertionError
        from torch.distributed.checkpoint.state_dict import FSDP
        assert isinstance(model, FSDP)
        import torch.distributed.algorithms.model_averaging.utils
        finders = [finder for finder in sys.meta_path if type(finder).__module__ == "flatparam.common.patches"]
        assert {name.partition(".")[0] for finder in finders for name in finder.wanted} <= {"transformers", "peft"}
        import gc
        del model
        dist.destroy_process_group()
        gc.collect()
        assert not set(finders) & set(sys.meta_path)
        """,
    "what is not there": """
        import flatparam
        try:
            flatparam.nothing_of_this_name
        except AttributeError as error:
            assert str(error) == "module 'flatparam' has no attribute 'nothing_of_this_name'"
        else:
            raise AssertionError
        assert not hasattr(flatparam, "_nothing") and "flatparam.dropin.handle" not in sys.modules
        """,
}


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_what_is_imported_when(name):
    lines = CASES[name].split("\n        ")
    python("\n".join(["import sys", *lines]))


def test_the_import_takes_less_than_50_ms_over_torch():
    """Of processor time, in one of three processes: others may use the machine."""
    code = "import torch, time; begin = time.process_time(); import flatparam; print(time.process_time() - begin)"
    assert any(float(python(code)) < 0.05 for _ in range(3))
