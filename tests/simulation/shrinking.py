"""Make a failing program smaller: drop its decisions one at a time while it fails, and write it as a file."""

import copy
import pprint
from pathlib import Path

from .programs import DEFAULTS, PLAIN, is_valid

SIMPLEST = {"kind": "plain", "unit": False, "how": "call", "frozen": False, "double": False}
FILE = '''"""{error}

The smallest program found for seed {seed}. Run it: PYTHONPATH=.:tests/support python {name}
"""

from tests.simulation import training
from tests.simulation.process import ask

PROGRAM = {program}

if __name__ == "__main__":
    print(ask(training.__name__, training.play, PROGRAM))
'''


def shrunk(program, fails):
    """Drop one decision at a time while ``fails(program)`` is true; return what is left."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(program):
            if is_valid(candidate) and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def write(program, error, folder):
    """Write ``program`` as a Python file that runs alone; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(folder, f"seed-{program['seed']}.py")
    text = pprint.pformat(program, width=100, sort_dicts=False)
    path.write_text(FILE.format(error=error, seed=program["seed"], name=path, program=text))
    return path


def _simpler(program):
    """Yield the programs with one decision less, the ones that save most first."""
    phases, layers = program["phases"], program["layers"]

    def changed(change):
        candidate = copy.deepcopy(program)
        change(candidate)
        return candidate

    for i in range(len(phases)) if len(phases) > 1 else ():
        yield changed(lambda it, i=i: it["phases"].pop(i))
    for key, default in PLAIN.items():
        if program[key] != default:
            yield changed(lambda it, key=key, default=default: it.update({key: default}))
    for i, fault in enumerate(program["faults"]):
        if len(program["faults"]) > 1:
            yield changed(lambda it, i=i: it["faults"].pop(i))
        for key, simplest in (("rank", 0), ("point", 0), ("point", fault["point"] // 2)):
            if fault[key] != simplest:
                yield changed(lambda it, i=i, key=key, simplest=simplest: it["faults"][i].update({key: simplest}))
    for i in range(len(layers)) if len(layers) > 1 else ():
        yield changed(lambda it, i=i: _drop_layer(it, i))
    for i, phase in enumerate(phases):
        for j in range(len(phase["ops"])):
            yield changed(lambda it, i=i, j=j: it["phases"][i]["ops"].pop(j))
        for size in range(1, phase["size"]):
            for inner in range(1, size + 1):
                if size % inner == 0:
                    yield changed(lambda it, i=i, s=size, n=inner: it["phases"][i].update(size=s, inner=n))
        for key, default in DEFAULTS.items():
            if key != "inner" and phase.get(key, default) != default:
                if key == "optimizer":
                    yield changed(lambda it: [each.update(optimizer="SGD") for each in it["phases"]])
                else:
                    yield changed(lambda it, i=i, key=key, default=default: it["phases"][i].update({key: default}))
    for i, layer in enumerate(layers):
        for key, simplest in SIMPLEST.items():
            if layer[key] != simplest:
                yield changed(lambda it, i=i, key=key, simplest=simplest: it["layers"][i].update({key: simplest}))
    if program["tied"]:
        yield changed(lambda it: it.update(tied=False))
    if program["width"] > 1:
        yield changed(lambda it: it.update(width=it["width"] - 1))


def _drop_layer(program, i):
    name = program["layers"].pop(i)["name"]
    for phase in program["phases"]:
        phase["ops"] = [op for op in phase["ops"] if name not in op]
