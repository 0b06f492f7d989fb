"""Our changes of torch and of the process come with the first model or with install(), and go with the last.

The oracle is a snapshot of torch before: each object that a name of a module or class refers to, the contents of the
closures, the global hooks, the finders of modules.

Promises:
- After the last wrapped model is gone every function of torch is the object that it was, and no hook or finder of ours
  is left: `test_torch_is_as_before`.
- Functions that another library has put in the place of ours, or over ours, stay and work: `test_torch_is_as_before`.
- A model may die at any moment and in any thread: no call of another library fails: `test_torch_is_as_before`.
- docs/patches.md lists the changes, each with its time, its reason, its undo and a test:
  `test_the_page_is_that_of_the_table`.
- The table has every registration that the sources make for the whole process: `test_the_table_is_complete`.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import forked_scripts
import pytest

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = '''
import copyreg, gc, os, pickle, sys, threading, types, warnings
warnings.simplefilter("ignore")
import torch, torch._dynamo, torch.nn as nn, torch.distributed as dist
import torch.distributed.fsdp, torch.utils.checkpoint, torch.utils.dlpack
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()  # torch itself changes the class
make_world = dist.distributed_c10d._update_default_pg
types.CapsuleType = type(vars(torch.Tensor)["__dlpack_c_exchange_api__"])
import flatparam
from flatparam import FullyShardedDataParallel as FSDP

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
HOOKS = {  # not as attributes: a frame whose code has these names counts as one that calls the hooks
    "steps before": vars(optimizers)["_global_optimizer_pre_hooks"],
    "steps after": vars(optimizers)["_global_optimizer_post_hooks"],
    "modules": vars(modules)["_global_module_registration_hooks"],
    "parameters": vars(modules)["_global_parameter_registration_hooks"],
}

def snapshot():
    """Each place in torch -> the object that is there; what is in a class or function once, whatever names it has."""
    seen = set()
    found = {("hook", kind, key): hook for kind, hooks in HOOKS.items() for key, hook in hooks.items()}
    found |= {("finder", i): finder for i, finder in enumerate(sys.meta_path)}
    found |= {("copyreg", kind): function for kind, function in copyreg.dispatch_table.items()}
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.split(".")[0] == "torch":
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if not isinstance(value, (types.FunctionType, type)) or id(value) in seen:
                    continue
                seen.add(id(value))
                for i, cell in enumerate(value.__closure__ or ()) if isinstance(value, types.FunctionType) else ():
                    found[name, key, i] = cell_contents(cell)
                if isinstance(value, type) and str(value.__module__).split(".")[0] == "torch":
                    found |= {(name, key, attribute): it for attribute, it in list(vars(value).items())}
    found["torch.distributed.distributed_c10d", "_update_default_pg"] = None  # it is changed as flatparam is imported
    return found

def cell_contents(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return None

def is_ours(value):
    value = getattr(value, "__func__", value)
    spaces = getattr(value, "__globals__", {})
    return str(spaces.get("__name__", type(value).__module__)).split(".")[0] == "flatparam"

def is_function(value):
    return callable(value) or isinstance(value, (staticmethod, classmethod, property, types.CapsuleType))

def check(before, but=()):
    after = snapshot()
    kinds = ("hook", "finder", "copyreg")
    changed = [key for key, value in before.items() if key in after and after[key] is not value and is_function(value)]
    changed += [key for key in before if key not in after and key[0] in kinds]
    changed += [key for key, value in after.items() if key not in before and (key[0] in kinds or is_ours(value))]
    assert set(changed) == set(but), changed

def wrap(**settings):
    torch.manual_seed(0)
    return FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), use_orig_params=True, **settings)

def is_in_force():
    """Whether torch knows units now: a change of each kind answers."""
    answers = {
        is_ours(torch.autograd.graph._engine_run_backward),
        is_ours(vars(torch.Tensor).get("requires_grad_")),
        any(is_ours(cell.cell_contents) for cell in torch.nn.utils.clip_grad_norm_.__closure__),
        *(any(map(is_ours, hooks.values())) for hooks in HOOKS.values()),
    }
    assert len(answers) == 1, answers
    return answers.pop()

def step(model):
    model(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

def gone(thing):
    """Drop the last reference in the list ``thing``."""
    thing.clear()
    gc.collect()
'''

CASES = {
    "a model": """
        before = snapshot()
        model = wrap()
        assert is_in_force()
        step(model)
        del model
        gc.collect()
        assert not is_in_force()
        check(before)
        """,
    "again and again": """
        before = snapshot()
        for _ in range(3):
            model = wrap()
            assert is_in_force()
            step(model)
            try:
                nn.parallel.DataParallel(model)
            except RuntimeError as error:
                assert "DataParallel does not know" in str(error)
            else:
                raise AssertionError
            del model
            gc.collect()
            check(before)
        """,
    "two models": """
        before = snapshot()
        first, second = wrap(), wrap()
        del first
        gc.collect()
        assert is_in_force()
        step(second)
        del second
        gc.collect()
        check(before)
        """,
    "a constructor that fails": """
        before = snapshot()
        try:
            FSDP(nn.Linear(4, 4), cpu_offload=3)
        except (TypeError, ValueError):
            pass
        else:
            raise AssertionError
        gc.collect()
        check(before)
        """,
    "copies and pickles": """
        import copy
        before = snapshot()
        model = wrap()
        copied, text = copy.deepcopy(model), pickle.dumps(model)
        del model
        gc.collect()
        assert is_in_force()
        step(copied)
        del copied
        gc.collect()
        check(before)
        loaded = pickle.loads(text)
        assert is_in_force()
        step(loaded)
        del loaded
        gc.collect()
        check(before)
        """,
    "install": """
        before = snapshot()
        for _ in range(2):
            flatparam.install()
            model = torch.distributed.fsdp.FullyShardedDataParallel(
                nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
            )
            assert type(model._handle) is flatparam.FlatParamHandle
            step(model)
            pickle.dumps(model)
            del model
            gc.collect()
            flatparam.uninstall()
            check(before)
            assert dist.distributed_c10d._update_default_pg is make_world
        """,
    "models that outlive uninstall": """
        before = snapshot()
        flatparam.install()
        model = torch.distributed.fsdp.FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
        )
        other = wrap()
        flatparam.uninstall()
        step(model)
        step(other)
        assert is_in_force()
        del other
        gc.collect()
        step(model)
        del model
        gc.collect()
        check(before)
        """,
    "install of the runtime": """
        before = snapshot()
        flatparam.install(runtime=True)
        model = torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(4, 4))
        assert type(model) is FSDP
        flatparam.install()
        step(model)
        flatparam.uninstall()
        step(model)
        del model
        gc.collect()
        check(before)
        """,
    "a sum of micro-batches in LayerZero": """
        from layer_zero_driver import drive
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = snapshot()
        for _ in range(2):
            driver = drive(module, 1, units=[module])
            (handle,) = driver.handles
            driver.backward([lambda: module(torch.ones(2, 4)).sum()])
            hooks = [hook.__module__ for hook in HOOKS["steps before"].values()]
            assert "flatparam.layer_zero._sums" not in hooks, hooks
            driver.sync = False
            module(torch.ones(2, 4)).sum().backward()
            handle._training_state = type(handle._training_state).IDLE
            handle.prepare_gradient_for_zero1()
            try:
                torch.optim.SGD(handle.flat_param._params, lr=0.1).step()
            except ValueError as error:
                assert "not reduced" in str(error), error
            else:
                raise AssertionError
            module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            handle.flat_param._post_accumulate_grad_hooks.clear()  # the driver's, which refers to the handle
            del driver, handle
            gc.collect()
            check(before)
        """,
    "modules that are imported in between": """
        before = snapshot()
        assert "torch.distributed.checkpoint" not in sys.modules
        model = wrap()
        import torch.distributed.checkpoint.state_dict as helpers
        import torch.distributed.checkpoint.default_planner as planner
        import torch.distributed.algorithms.model_averaging.averagers
        plan = planner.create_default_local_save_plan
        assert is_ours(plan) and is_ours(helpers.FSDP)
        del model
        gc.collect()
        assert not is_ours(planner.create_default_local_save_plan) and not is_ours(helpers.FSDP)
        before |= {key: it for key, it in snapshot().items() if key not in before and not is_ours(it)}
        check(before)
        plan({"a": torch.ones(2)}, True)  # a caller that has kept ours
        model = wrap()
        assert helpers.FSDP is not torch.distributed.fsdp.FullyShardedDataParallel
        assert helpers.get_model_state_dict(model)
        del model
        gc.collect()
        check(before)
        """,
    "a finder of others that finds nothing": """
        model = wrap()
        class Old:  # has no find_spec(): Python up to 3.11 calls this instead, later ones go on
            find_module = staticmethod(lambda name, path=None: None)
        sys.meta_path.insert(1, Old)
        import torch.distributed.checkpoint.default_planner as planner
        sys.meta_path.remove(Old)
        assert is_ours(planner.create_default_local_save_plan)
        """,
    "modules that are not imported": """
        before = snapshot()
        model = wrap()
        assert len(sys.meta_path) == 1 + len([key for key in before if key[0] == "finder"])
        del model
        gc.collect()
        check(before)
        import torch.distributed.checkpoint.default_planner as planner
        assert not is_ours(planner.create_default_local_save_plan)
        """,
    "another thread": """
        before = snapshot()
        held = [wrap()]
        thread = threading.Thread(target=gone, args=(held,))
        thread.start()
        thread.join()
        check(before)
        """,
    "threads that wrap and drop": """
        before = snapshot()
        sys.setswitchinterval(1e-5)
        faults = []
        def work():
            try:
                for _ in range(20):
                    model = wrap()
                    assert is_in_force()
                    del model
            except BaseException as error:
                faults.append(error)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults, faults
        gc.collect()
        check(before)
        """,
    "a death inside of a changed function": """
        before = snapshot()
        held = [wrap()]
        def params():
            yield torch.nn.Parameter(torch.ones(2))
            gone(held)
        assert torch.nn.utils.clip_grad_norm_(params(), 1.0) == 0
        check(before)
        """,
    "a death inside of the hooks of a step": """
        for place in range(3):  # before ours, behind ours
            held, calls = [], []
            def drop(*args):
                calls.append(len(held))
                gone(held)
            def count(*args):
                calls.append("after")
            handles = [optimizers.register_optimizer_step_pre_hook(drop)] if place == 0 else []
            handles += [optimizers.register_optimizer_step_post_hook(drop)] if place == 2 else []
            handles += [optimizers.register_optimizer_step_pre_hook(count)]
            before = snapshot()
            held.append(wrap())
            if place == 1:
                handles.append(optimizers.register_optimizer_step_pre_hook(drop))
                handles.append(optimizers.register_optimizer_step_pre_hook(count))
            other = nn.Parameter(torch.ones(2))
            other.grad = torch.ones(2)
            torch.optim.SGD([other], lr=1.0).step()
            assert not held and 1 in calls and "after" in calls, calls
            assert torch.equal(other, torch.zeros(2))
            gc.collect()
            assert not any(is_ours(hook) for hooks in HOOKS.values() for hook in hooks.values())
            for handle in handles:
                handle.remove()
            gc.collect()
        """,
    "a death inside of the hooks of a registration": """
        held = []
        before = snapshot()
        first = modules.register_module_module_registration_hook(lambda *args: gone(held))
        held.append(wrap())
        calls = []
        last = modules.register_module_module_registration_hook(lambda *args: calls.append(1))
        parent = nn.Module()
        parent.add_module("child", nn.Linear(2, 2))
        assert calls and not held
        first.remove()
        last.remove()
        gc.collect()
        check(before)
        """,
    "a death inside of an import": """
        held = []
        class Dropping:
            def find_spec(self, name, path, target=None):
                if name == "module_of_no_library" and held:
                    gone(held)
        finder = Dropping()
        before = snapshot()
        held.append(wrap())
        asked = []
        class Asked:
            def find_spec(self, name, path, target=None):
                asked.extend([1] if name == "module_of_no_library" else [])
        behind = Asked()
        sys.meta_path[1:1] = finder, behind  # ours is the first
        try:
            import module_of_no_library
        except ImportError:
            pass
        assert not held and asked == [1], (held, asked)
        sys.meta_path.remove(finder)
        sys.meta_path.remove(behind)
        gc.collect()
        check(before)
        """,
    "every allocation collects": """
        before = snapshot()
        gc.set_threshold(1)
        for _ in range(2):
            model = wrap()
            cycle = [model]
            cycle.append(cycle)
            del model, cycle
        gc.set_threshold(700)
        gc.collect()
        check(before)
        """,
    "a fork": """
        before = snapshot()
        held = [wrap()]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert is_in_force()
                gone(held)
                check(before)
                held.append(wrap())
                assert is_in_force()
                gone(held)
                check(before)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_in_force()
        gone(held)
        check(before)
        """,
    "a fork while another thread changes torch": """
        from flatparam.common import patches
        before = snapshot()
        is_inside, may_leave, parent = threading.Event(), threading.Event(), os.getpid()
        @patches.flat_params_live.change("torch:nothing", test="")
        def slow():
            if os.getpid() == parent:
                is_inside.set()
                may_leave.wait()
            yield
        held = []
        thread = threading.Thread(target=lambda: held.append(wrap()))
        thread.start()
        is_inside.wait()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                gone([wrap()])
                status = 0
            finally:
                os._exit(status)
        may_leave.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gone(held)
        check(before)
        """,
    "another library's functions over ours": """
        before = snapshot()
        graph, calls = torch.autograd.graph, []
        original = graph._engine_run_backward
        model = wrap()
        ours = graph._engine_run_backward
        def theirs(*args, **kwargs):
            calls.append(1)
            return ours(*args, **kwargs)
        graph._engine_run_backward = torch.autograd._engine_run_backward = theirs
        places = [("torch.autograd.graph", "_engine_run_backward"), ("torch.autograd", "_engine_run_backward")]
        for _ in range(2):
            step(model)
            del model
            gc.collect()
            assert graph._engine_run_backward is theirs and torch.autograd._engine_run_backward is theirs
            check(before, but=places)
            torch.ones(1, requires_grad=True).sum().backward()  # through theirs and ours
            model = wrap()
            assert graph._engine_run_backward is theirs and torch.autograd._engine_run_backward is theirs
            weight = model.module[0].weight
            model(torch.ones(2, 4)).sum().backward(inputs=[weight])  # ours is below theirs
            assert weight.grad is not None and model.module[1].weight.grad is None
            weight.grad = None
        assert len(calls) >= 5
        graph._engine_run_backward = torch.autograd._engine_run_backward = ours  # as a library undoes its own
        del model, weight
        gc.collect()
        check(before)
        """,
    "another library's function in the place of ours": """
        before = snapshot()
        model = wrap()
        theirs = lambda self, requires_grad=True: self
        torch.Tensor.requires_grad_ = theirs
        del model
        gc.collect()
        assert torch.Tensor.requires_grad_ is theirs
        del torch.Tensor.requires_grad_
        model = wrap()
        assert is_in_force()
        del model
        gc.collect()
        check(before)
        """,
    "another library's function before ours": """
        import functools
        graph = torch.autograd.graph
        original = graph._engine_run_backward
        theirs = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))
        graph._engine_run_backward = theirs
        before = snapshot()
        model = wrap()
        step(model)
        del model
        gc.collect()
        assert graph._engine_run_backward is theirs
        check(before)
        """,
    "a hook that a library has removed": """
        before = snapshot()
        model = wrap()
        for hooks in HOOKS.values():
            hooks.clear()
        del model
        gc.collect()
        check(before)
        """,
}


DRIVER = """
import traceback
gc.collect()
gc.freeze()  # a child that collects looks at its own objects only
for name, code in CASES.items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            exec(compile(code, name, "exec"))
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(status)
    print(f"{name}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)
"""


def test_torch_is_as_before():
    """Each case runs in a fork of one interpreter, in which torch and flatparam are imported."""
    cases = {name: textwrap.dedent(code) for name, code in CASES.items()}
    program = f"{PRELUDE}\nCASES = {cases!r}\n{DRIVER}"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    failed = [name for name in CASES if f"{name}: 0\n" not in done.stdout]
    assert not failed, f"{failed}\n{done.stdout}\n{done.stderr[-3000:]}"
    assert "Exception ignored" not in done.stderr, done.stderr


def test_the_page_is_that_of_the_table():
    tool = ROOT / "tools" / "patches.py"
    done = forked_scripts.completed([sys.executable, tool, "--check"])
    assert done.returncode == 0, done.stdout + done.stderr


IN_THE_SOURCES = {  # code that changes the process -> the target that the table has for it
    r"\batexit\.register\b": "atexit:register",
    r"\bos\.register_at_fork\(": "os:register_at_fork",
    r"\bmultiprocessing\.util\.register_after_fork\(": "multiprocessing.util:register_after_fork",
    r"\bcopyreg\.dispatch_table\[.*\] = reduce\b": "copyreg:dispatch_table",
    r"\btrace_rules\b": "torch._dynamo.trace_rules:add",
    r"\bTORCH_LIBRARY_IMPL\(": "torch.library:Library.impl",
    r"\bon_exit\(": "libc:on_exit",
}


def test_the_table_is_complete():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import patches as tool
    finally:
        sys.path.remove(str(ROOT / "tools"))
    tool.page()
    from flatparam.common.patches import TABLE

    sources = [*ROOT.glob("flatparam/**/*.py"), *ROOT.glob("csrc/**/*.c*")]
    texts = ["\n".join(line.partition("  # ")[0] for line in path.read_text().splitlines()) for path in sources]
    for pattern, target in IN_THE_SOURCES.items():
        found = sum(re.search(pattern, text) is not None for text in texts)
        assert 0 < found <= sum(target in entry.targets for entry in TABLE), (target, found)
