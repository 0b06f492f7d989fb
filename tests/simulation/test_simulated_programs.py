"""Random training programs on simulated ranks compute what the unsharded module does, bit for bit (`make simulate`).

Promises:
- random models, settings, accumulation, exceptions that all ranks catch, saves and loads into other strategies and
  numbers of ranks: `test_random_programs_train_as_the_unsharded_module`
- a parameter without elements, which has no optimizer state, hinders no load into flat parameters:
  `test_what_programs_have_found`
"""

import pytest

from tests.simulation import process, reference, shrinking, training
from tests.simulation.programs import draw, is_valid

SEEDS = 30
FOUND = {  # programs that failed once, made small
    "full optimizer state of a parameter without elements, loaded into a flat parameter": {
        "seed": 143,
        "width": 1,
        "tied": False,
        "layers": [
            {"name": "l0", "kind": "listed", "unit": False, "how": "call", "frozen": False, "double": False},
        ],
        "phases": [
            {"size": 2, "orig": True, "optimizer": "Adam", "kind": "full", "ops": [["backward", 1, True], ["step"]]},
            {"size": 2, "orig": False, "optimizer": "Adam", "kind": "full", "ops": [["backward", 2, True], ["step"]]},
        ],
    },
}


def ask(function, *args):
    return process.ask(training.__name__, function, *args)


def _steps_on_several_ranks(program):
    return program["phases"][0]["size"] > 1 and ["step"] in program["phases"][0]["ops"]


def play_with_another_average(program):
    reference.divisors = lambda size: (1.0, size + 1.0)
    training.play(program)


def test_random_programs_train_as_the_unsharded_module():
    found = ask(training.play_seeds, 0, SEEDS)
    assert found[-1][3] is None, found[-1]
    assert len(found) == SEEDS


@pytest.mark.parametrize("what", FOUND)
def test_what_programs_have_found(what):
    ask(training.play, FOUND[what])


def test_another_process_plays_a_program_alike():
    program = next(draw(seed) for seed in range(SEEDS) if len(draw(seed)["phases"]) == 2)
    assert ask(training.play, program) == ask(training.play, program)


def test_other_numbers_are_noticed():
    program = next(draw(seed) for seed in range(SEEDS) if _steps_on_several_ranks(draw(seed)))
    with pytest.raises(process.SimulatedError, match=r"gradient of .* differs by"):
        ask(play_with_another_average, program)


def test_a_failing_program_is_shrunk_and_runs_alone(tmp_path):
    program = next(draw(seed) for seed in range(1000) if "lstm" in str(draw(seed)) and "raise" in str(draw(seed)))
    smallest = shrinking.shrunk(program, lambda it: "lstm" in str(it) and "raise" in str(it))
    assert is_valid(smallest)
    assert len(smallest["layers"]) == len(smallest["phases"]) == len(smallest["phases"][0]["ops"]) == 1
    found = {}
    exec(shrinking.write(smallest, "it", tmp_path).read_text(), found)
    assert found["PROGRAM"] == smallest
    assert ask(training.play, found["PROGRAM"])[1]
