"""A pytest plugin: one JSON line an event, written at once, so that a crash of the process loses nothing.

Environment, set by the runner: UPSTREAM_LOG: the file to append to; UPSTREAM_DONE: a file of test ids, one a line, that
are not to run again; UPSTREAM_ONLY: a regular expression that the ids of the tests to run match.
"""

import json
import os
import re
import sys

import upstream_shim

_reports = {}  # of the test that runs now, by its node id


def pytest_collection_modifyitems(config, items):
    with open(os.environ["UPSTREAM_DONE"], encoding="utf-8") as file:
        done = set(file.read().splitlines())
    wanted = re.compile(os.environ.get("UPSTREAM_ONLY", ""))
    run = [item for item in items if _id(item.nodeid) not in done and wanted.search(_id(item.nodeid))]
    _write(event="collected", ids=[_id(item.nodeid) for item in run])
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = run


def pytest_collectreport(report):
    if report.failed:
        _write(event="collect-error", text=str(report.longrepr)[-4000:])


def pytest_sessionfinish():
    if upstream_shim.FLAT_PARAM in sys.modules:
        _write(event="handle", file=upstream_shim.handle_in_use())


def pytest_runtest_logstart(nodeid):
    _reports[nodeid] = []
    _write(event="start", id=_id(nodeid))


def pytest_runtest_logreport(report):
    _reports[report.nodeid].append(report)


def pytest_runtest_logfinish(nodeid):
    outcome, text = "pass", ""
    for report in _reports.pop(nodeid):
        if report.failed:
            outcome, text = "fail" if report.when == "call" else "error", str(report.longrepr)
            break
        if report.skipped:
            outcome = "xfail" if hasattr(report, "wasxfail") else "skip"
            text = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    if outcome in ("fail", "error") and ("pytest-timeout" in text or "timed out after" in text):
        outcome = "timeout"
    _write(event="end", id=_id(nodeid), outcome=outcome, text=text[-6000:])


def _id(nodeid):
    file, separator, name = nodeid.partition("::")
    return os.path.basename(file) + separator + name


def _write(**event):
    with open(os.environ["UPSTREAM_LOG"], "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
