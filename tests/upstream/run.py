"""Run PyTorch's own FSDP1 tests on the CPU, with gloo and flatparam's handle, and compare with torch's handle.

Usage: python tests/upstream/run.py [--fast | FILE ...] [-k REGEX] [--stock] ...     (see --help and README.md)

A line for each file, then the tests that pass in the baseline and do not pass now (LOST) and those that pass only now.
Exit status: 1 if a test was lost or a file could not be run, else 0.
"""

import argparse
import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = Path("test", "distributed", "fsdp")  # of the test files, in torch's tree

# --fast, in the order of how directly they exercise the handle: a regular expression on the test ids of each file
FAST = {
    "test_fsdp_flatten_params": "",
    "test_fsdp_use_orig_params": r"^(?!.*(test_diff_hyperparams_sharding_strategy|test_fsdp_compile))",
    "test_fsdp_core": "nested_wrapped_model|mixture_of_experts_offload|TestHooks|TestNoGrad|TestAutograd|TestParamInit",
    "test_fsdp_misc": "",
    "test_fsdp_state_dict": r"^(?!.*rank0(_and)?_offload).*(use_orig_params_True|buffers|local|sharded|skip)",
    "test_fsdp_optim_state": "test_optim_state_dict_nested|flatten_sharded|use_orig_params|no_shard",
    "test_fsdp_unshard_params": "",
    "test_fsdp_grad_acc": "",
    "test_fsdp_mixed_precision": r"^(?!.*test_train_ema_eval_flow)",
    "test_fsdp_hybrid_shard": "",
    "test_fsdp_comm": "",
    "test_fsdp_comm_hooks": "",
    "test_fsdp_meta": "",
    "test_fsdp_pure_fp16": "",
    "test_fsdp_ignored_modules": "",
    "test_fsdp_fine_tune": "",
    "test_fsdp_tp_integration": "",
}
WORLD_SIZE = {"test_fsdp_tp_integration": 4}  # of classes that take the default; 2 elsewhere
DEVICES = {"test_fsdp_comm_hooks": 2}  # pretended, where the default of 4 is not what the file expects of two ranks


class FileRun:
    """The tests of one file, run by pytest in a process of its own, and again without them for each that kills it."""

    def __init__(self, name, only, options, tests):
        self.name, self.only, self.options, self.tests = name, only, options, tests
        self.results = {}  # {test id: event with its outcome and text}
        self.collected = None  # the ids of the first attempt
        self.errors = []
        self.handles = set()  # files that the handle in use came from
        self.seconds = 0.0

    def run(self):
        start = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="upstream-"))
        while self._attempt(folder):
            pass
        self.seconds = time.monotonic() - start
        if not self.errors:
            shutil.rmtree(folder, ignore_errors=True)

    def counts(self):
        return collections.Counter(result["outcome"] for result in self.results.values())

    def _attempt(self, folder):
        """Run the tests that have no result yet; return whether some are left because the last one killed pytest."""
        (folder / "done").write_text("".join(f"{id}\n" for id in self.results), encoding="utf-8")
        (folder / "log").write_text("", encoding="utf-8")
        ended = self._pytest(folder)
        killer = self._read(folder / "log")
        if killer is not None:
            self.results[killer] = {"outcome": "crash", "text": f"pytest ended ({ended}) in this test"}
        elif ended not in (0, 1, 5) and not self.errors:
            self.errors.append(f"{self.name}: pytest ended ({ended}); its output is in {folder}")
        return killer is not None and not self.errors and len(self.results) < len(self.collected)

    def _pytest(self, folder):
        """Run pytest; return its exit status, or what ended it. No process of it is left."""
        path = self.tests / FOLDER / f"{self.name}.py"
        command = [sys.executable, "-m", "pytest", "--assert=plain", "-p", "upstream_plugin", "-p", "no:cacheprovider"]
        command += [
            "-q",
            "--tb=short",
            f"--timeout={self.options.timeout + 60}",
            "--rootdir",
            str(path.parent),
            str(path),
        ]
        with open(folder / "output", "ab") as output:
            process = subprocess.Popen(
                command,
                env=self._environment(folder),
                cwd=path.parent,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                return process.wait(timeout=self.options.file_timeout)
            except subprocess.TimeoutExpired:
                return f"after {self.options.file_timeout} s"
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)  # whatever ranks it left behind
                except ProcessLookupError:
                    pass
                process.wait()

    def _environment(self, folder):
        paths = [str(HERE / "shim"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "UPSTREAM_SHIM": "1",
            "UPSTREAM_TESTS": str(self.tests),
            "UPSTREAM_HANDLE": "torch" if self.options.stock else "runtime" if self.options.runtime else "flatparam",
            "UPSTREAM_START": "spawn" if self.options.spawn else "fork",
            "UPSTREAM_WORLD": str(WORLD_SIZE.get(self.name, 2)),
            "UPSTREAM_DEVICES": str(DEVICES.get(self.name, 4)),
            "UPSTREAM_LOG": str(folder / "log"),
            "UPSTREAM_DONE": str(folder / "done"),
            "UPSTREAM_ONLY": self.only,
            "CUDA_VISIBLE_DEVICES": "",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(self.options.timeout),
            "MKL_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(folder),
        }

    def _read(self, log):
        """Take what pytest wrote; return the test that was running when it ended, if any."""
        running = None
        for line in log.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "collected" and self.collected is None:
                self.collected = event["ids"]
            elif event["event"] == "collect-error":
                self.errors.append(event["text"])
            elif event["event"] == "handle":
                self.handles.add(event["file"])
            elif event["event"] == "start":
                running = event["id"]
            elif event["event"] == "end":
                self.results[event["id"]] = {"outcome": event["outcome"], "text": event["text"]}
                running = None
        return running


def compare(baseline, plan, outcomes):
    """Return (number of tests of ``plan`` that pass in the baseline, those lost, those won): sorted test ids.

    Args: ``baseline``: ``{"tests": {id: outcome}, "flaky": [ids that count neither way]}``; ``plan``: for each file the
    regular expression on its test ids; ``outcomes``: ``{id: outcome}`` of this run. A test that did not run is lost.
    """
    before = {id: outcome for id, outcome in baseline["tests"].items() if id not in baseline["flaky"]}
    chosen = [id for id in before if (name := id.split(".py::")[0]) in plan and re.search(plan[name], id)]
    expected = [id for id in chosen if before[id] == "pass"]
    lost = sorted(id for id in expected if outcomes.get(id) != "pass")
    won = sorted(id for id, outcome in outcomes.items() if outcome == "pass" and before.get(id, "pass") != "pass")
    return len(expected), lost, won


def plan_of(options, baseline):
    """Return {file name without .py: regular expression on its test ids}: first those closest to the handle."""
    if options.files:
        return {Path(name).name.removesuffix(".py"): options.k for name in options.files}
    in_baseline = sorted({id.split(".py::")[0] for id in baseline["tests"]})
    return FAST if options.fast else dict.fromkeys([*FAST, *in_baseline], options.k)


def explain(lost):
    """Print how many of ``lost`` runtime.json has a reason for, a line each; return the others."""
    for reason, patterns in json.loads((HERE / "runtime.json").read_text(encoding="utf-8")).items():
        known = [id for id in lost if any(re.search(pattern, id) for pattern in patterns)]
        lost = [id for id in lost if id not in known]
        print(f"  {len(known):3} {reason}")
    return lost


def tests_folder():
    """Return the folder of torch's tests, fetched if it is not there."""
    got = subprocess.run([str(HERE / "get.sh")], stdout=subprocess.PIPE, text=True)
    if got.returncode != 0:
        raise SystemExit("tests/upstream: torch's tests are not there, see above")
    return Path(got.stdout.strip()).resolve()


def parse(arguments):
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", help="test files, such as test_fsdp_core (default: all)")
    parser.add_argument("--fast", action="store_true", help="only the fast subset: 305 tests of 704")
    parser.add_argument("-k", default="", metavar="REGEX", help="only tests whose id matches")
    parser.add_argument("--stock", action="store_true", help="with torch's own handle: what the baseline was made with")
    parser.add_argument("--runtime", action="store_true", help="with flatparam's runtime in the place of torch's class")
    parser.add_argument("--spawn", action="store_true", help="spawn the ranks as torch does; forked ones start faster")
    parser.add_argument("--baseline", type=Path, default=HERE / "baseline.json", help="compare with this file")
    parser.add_argument("--out", type=Path, help="write the outcomes here, in the form of a baseline")
    parser.add_argument("--texts", type=Path, help="write the texts of the tests that did not pass here, as JSON lines")
    parser.add_argument("--timeout", type=int, default=300, metavar="SECONDS", help="for a test (default 300)")
    parser.add_argument("--file-timeout", type=int, default=1500, metavar="SECONDS", help="for a file (default 1500)")
    return parser.parse_args(arguments)


def run_all(plan, options, tests):
    """Run the files of ``plan``, printing a line for each; return their FileRuns."""
    runs = []
    for name, only in plan.items():
        runs.append(FileRun(name, only, options, tests))
        runs[-1].run()
        count = runs[-1].counts()
        shown = [f"{name:32} passed {count.pop('pass', 0):3}  failed {count.pop('fail', 0):3}"]
        shown += [f"skipped {count.pop('skip', 0):3}  {runs[-1].seconds:6.1f} s"]
        shown += [f"{outcome} {number}" for outcome, number in sorted(count.items())]
        print("  ".join(shown), flush=True)
        for error in runs[-1].errors:
            print(error[-3000:], file=sys.stderr, flush=True)
    return runs


def main(arguments):
    options = parse(arguments)
    baseline = json.loads(options.baseline.read_text(encoding="utf-8"))
    plan = plan_of(options, baseline)
    tests = tests_folder()
    unknown = [name for name in plan if not (tests / FOLDER / f"{name}.py").is_file()]
    if unknown:
        raise SystemExit(f"tests/upstream: expected files of {tests / FOLDER}, got {', '.join(unknown)}")
    torch_version = subprocess.check_output([sys.executable, "-c", "import torch; print(torch.__version__)"], text=True)

    runs = run_all(plan, options, tests)
    results = {id: result for run in runs for id, result in run.results.items()}
    outcomes = {id: result["outcome"] for id, result in sorted(results.items())}
    totals = collections.Counter(outcomes.values())
    print(f"{'total':32} " + "  ".join(f"{outcome} {number}" for outcome, number in sorted(totals.items())))
    for file in sorted(set().union(*(run.handles for run in runs))):
        print(f"{'FullyShardedDataParallel' if options.runtime else 'FlatParamHandle'} was that of {file}")
    if options.texts:
        texts = [{"id": id, **result} for id, result in results.items() if result["outcome"] != "pass"]
        options.texts.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    if options.out:
        flaky = [id for id in baseline["flaky"] if id in outcomes]
        document = {"flatparam": not options.stock, "torch": torch_version.strip(), "flaky": flaky, "tests": outcomes}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    expected, lost, won = compare(baseline, plan, outcomes)
    print(f"pass in the baseline (torch {baseline['torch']}): {expected}; of these not passing now: {len(lost)}")
    if options.runtime:
        lost = explain(lost)
    for id in lost:
        print(f"  LOST {id}: {outcomes.get(id, 'not run')}")
    for id in won:
        print(f"  passes now, in the baseline {baseline['tests'][id]}: {id}")
    return 1 if lost or any(run.errors for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
