"""Random training programs on simulated ranks compute what the unsharded module does, bit for bit (`make simulate`).

Promises:
- while faults strike every second program, all others are told alike and in time, nobody waits for ever, and no rank
  computes anything else: `test_random_programs_train_as_the_unsharded_module`
- random models, settings, accumulation, exceptions that all ranks catch, saves and loads into other strategies and
  numbers of ranks: `test_random_programs_train_as_the_unsharded_module`
- seeds from before younger choices keep their programs, and the others have each of these:
  `test_old_seeds_keep_their_programs`
- a step that one rank alone skips is noticed: `test_a_step_that_ranks_do_not_skip_alike_is_noticed`
- ranks that hear in one group of a stopped rank do not wait in another for its reading, nor for that of a rank that was
  told in a save and has ended: `test_what_programs_have_found`
- a rank that runs out of memory in the comparison of a unit, when others have gone on, ends with that error, and all
  others are told it alike, also in grids of groups:
  `test_what_programs_have_found`
- a parameter without elements, which has no optimizer state, hinders no load into flat parameters:
  `test_what_programs_have_found`
- momentum of flatparam's SGD begins with the first step that no scaler skips, of each parameter:
  `test_what_programs_have_found`
"""

from types import SimpleNamespace

import pytest

from flatparam.fsdp.desync import liveness
from flatparam.fsdp.interop import patches
from tests.simulation import process, reference, shrinking, training
from tests.simulation.programs import draw, is_valid

SEEDS = 15
LAYER = {"name": "l0", "kind": "plain", "unit": True, "how": "call", "frozen": False, "double": False}
FOUND = {  # programs that failed once, made small
    "ranks that hear of a stopped rank in a group without it, and wait until it has read": {
        "seed": 2323,
        "width": 1,
        "tied": False,
        "layers": [LAYER, LAYER | {"name": "l1"}, LAYER | {"name": "l2"}],
        "phases": [
            {"size": 4, "strategy": "LAYER_ZERO", "inner": 2, "optimizer": "SGD", "ops": [["backward", 31, True]]},
        ],
        "faults": [{"kind": "is stopped", "rank": 0, "point": 38, "seconds": 15.0}],
    },
    "a rank out of memory as it reads the comparison of a unit, when the other has gone on": {
        "seed": 40405,
        "width": 1,
        "tied": False,
        "layers": [LAYER | {"unit": False}],
        "phases": [{"size": 2, "strategy": "_HYBRID_SHARD_ZERO2", "optimizer": "SGD", "ops": [["backward", 0, True]]}],
        "faults": [{"kind": "is out of memory", "rank": 0, "point": 4, "seconds": 0.0}],
    },
    "a rank out of memory between the comparisons of a unit in the two groups of a grid": {
        "seed": 52269,
        "width": 1,
        "tied": False,
        "layers": [LAYER | {"unit": False}],
        "phases": [{"size": 4, "strategy": "HYBRID_SHARD", "inner": 2, "optimizer": "SGD", "ops": []}],
        "faults": [{"kind": "is out of memory", "rank": 2, "point": 4, "seconds": 0.0}],
    },
    "a rank that waits until one has read that was told of a stopped rank in a save, and has ended": {
        "seed": 20481,
        "width": 3,
        "tied": False,
        "layers": [LAYER | {"kind": "convolution"}],
        "phases": [
            {
                "size": 8,
                "strategy": "HYBRID_SHARD",
                "inner": 4,
                "prefetch": "BACKWARD_POST",
                "forward_prefetch": True,
                "optimizer": "SGD",
                "ops": [
                    ["backward", 0, True],
                    ["step"],
                    ["backward", 10, True],
                    ["step"],
                    ["freeze", "l0", False],
                    ["backward", 20, True],
                    ["step"],
                ],
            },
        ],
        "faults": [{"kind": "is stopped", "rank": 6, "point": 120, "seconds": 30.0}],
    },
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
    "momentum of a fused step that a scaler skips, kept uninitialized": {
        "seed": 98,
        "width": 2,
        "tied": False,
        "layers": [LAYER],
        "phases": [
            {
                "size": 2,
                "optimizer": "fused momentum",
                "scaler": "GradScaler",
                "ops": [["backward", 1, True], ["overflow", 0.5], ["step"], ["backward", 2, True], ["step"]],
            },
        ],
    },
    "a fused step of parameters of which some have momentum": {
        "seed": 98,
        "width": 2,
        "tied": False,
        "layers": [LAYER],
        "phases": [
            {
                "size": 2,
                "optimizer": "fused momentum",
                "ops": [
                    ["freeze", "l0", True],
                    ["backward", 1, True],
                    ["step"],
                    ["freeze", "l0", False],
                    ["backward", 2, True],
                    ["step"],
                ],
            },
        ],
    },
}
YOUNGER = {  # settings, and some values that they must have
    "reduction": {"ordered"},
    "buffers": {"bfloat16"},
    "scaler": {"GradScaler", "ShardedGradScaler"},
    "average": {"lerp", "AveragedModel"},
    "kind": {"dcp"},
    "optimizer": {"fused SGD", "AdamW + SGD", "momentum + SGD"},
}
STEPS = [op for key in range(3) for op in (["backward", key, True], ["step"])]
STRUCK = {
    "seed": 1,
    "width": 2,
    "tied": False,
    "layers": [LAYER],
    "phases": [{"size": 3, "optimizer": "SGD", "ops": STEPS}],
    "faults": [{"kind": "is killed", "rank": 1, "point": 60, "seconds": 0.0}],
}


def ask(function, *args):
    return process.ask(training.__name__, function, *args)


def _steps_on_several_ranks(program):
    return program["phases"][0]["size"] > 1 and ["step"] in program["phases"][0]["ops"]


def play_without_watching(program):
    """Let the ranks look for nobody."""
    liveness.HealthBoard.find_dead = liveness.HealthBoard.diagnose = lambda *args: None
    training.play(program)


def play_with_another_average(program):
    reference.divisors = lambda size: (1.0, size + 1.0)
    training.play(program)


def play_with_scalers_apart(program):
    """Let each rank skip the steps of its own overflows."""
    patches.checked_collectives = SimpleNamespace(all_reduce=lambda *args: None)
    training.play(program)


def play_all(seeds, *which):
    """Play each of the first ``seeds``. Returns the number of processes: one ends when faults have struck."""
    first = children = 0
    while first < seeds:
        *_, (last, _, _, error) = ask(training.play_seeds, first, seeds, *which)
        assert error is None, (last, error)
        first, children = last + 1, children + 1
    return children


def test_random_programs_train_as_the_unsharded_module():
    assert play_all(SEEDS) > SEEDS / 4, "the faults seldom strike"


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


def test_old_seeds_keep_their_programs():
    drawn = {seed: draw(seed) for seed in range(2000)}
    for name, values in YOUNGER.items():
        assert values <= {phase.get(name) for program in drawn.values() for phase in program["phases"]}, name
        old = (program for seed, program in drawn.items() if seed % 2 and seed % 5)
        assert not any(phase.get(name) in values for program in old for phase in program["phases"]), name
    assert all(map(is_valid, drawn.values()))


def test_a_step_that_ranks_do_not_skip_alike_is_noticed():
    program = FOUND["momentum of a fused step that a scaler skips, kept uninitialized"]
    with pytest.raises(process.SimulatedError, match=r"differs by|the scale is"):
        ask(play_with_scalers_apart, program)


def test_what_faulty_ranks_tell_is_checked():
    assert ask(training.play, STRUCK)[2] == ["rank 1 is killed at its point 60"]
    with pytest.raises(process.SimulatedError, match=r"not true: all_are_told"):
        ask(play_without_watching, STRUCK)


def test_a_failing_program_with_faults_is_shrunk():
    def fails(program):
        return any(each["kind"] == "is killed" for each in program["faults"])

    late = {"kind": "is late", "rank": 2, "point": 3, "seconds": 0.5}
    program = draw(0) | STRUCK | {"faults": [late, *STRUCK["faults"]], "machines": True}
    smallest = shrinking.shrunk(program, fails)
    assert smallest["faults"] == [{"kind": "is killed", "rank": 0, "point": 0, "seconds": 0.0}]
    assert smallest["machines"] is False


def test_a_failing_program_is_shrunk_and_runs_alone(tmp_path):
    def is_chosen(program):
        return "lstm" in str(program) and "'raise'" in str(program)

    program = next(draw(seed) for seed in range(1000) if is_chosen(draw(seed)))
    smallest = shrinking.shrunk(program, is_chosen)
    assert is_valid(smallest)
    assert len(smallest["layers"]) == len(smallest["phases"]) == len(smallest["phases"][0]["ops"]) == 1
    found = {}
    exec(shrinking.write(smallest, "it", tmp_path).read_text(), found)
    assert found["PROGRAM"] == smallest
    assert ask(training.play, found["PROGRAM"])[1]
