"""Random programs of `flatparam.elastic` on simulated ranks (`python -m tests.simulation --elastic`).

Oracle: the unsharded module, trained on the batches of the ranks that each step had in the end, gradients summed by
hand, bit for bit: outputs of each step, parameters and random numbers at the end.

Promises:
- ranks are killed, stopped, late, or raise at random points, also new ones that join, and copies and parities change:
  what is left trains on as the unsharded module, or all raise one error, and only if the state is lost; nobody waits
  for ever, and copies and process groups of older worlds are gone: `test_random_elastic_programs`; on devices, too,
  whose communicators nothing but an abort ends: `test_random_elastic_programs_on_devices`
- a strategy over two groups goes on with groups of another size, where the ranks that are left need one, and has its
  own again when a new process has joined: `test_a_grid_of_ranks_is_cut_anew`
- ranks that have built models of several numbers of units are told, all alike: `test_other_models_are_told`
- seeds that failed once do not fail again: `test_what_seeds_have_found`
- each promise of the checker is one that can fail: `test_what_is_wrong_is_noticed`
"""

import time

import pytest

from flatparam.elastic import training as product
from flatparam.elastic.resizing import inner_sizes
from flatparam.fsdp.desync import liveness
from tests.simulation import process, random_elastic, reference, training
from tests.simulation.programs import GRIDS
from tests.simulation.test_simulated_programs import LAYER, ask, play_all

FOUND = {
    1080: "ranks on other machines were stopped and killed while all caught an exception, and nobody missed them",
    1101: "two machines were lost while all caught an exception, and nobody missed them",
    2210: "a rank that destroyed its first world took the names of the others' groups in C++ away",
    5012: "a machine was lost that had answered no call before, and the others raised gloo's error",
    7014: "a rank that is late by 8 s while another is killed is replaced, and the checker took that for wrong",
    6400: "a stopped rank went on alone, and the checker asked only a new one from which state each epoch began",
    2002562: "a rank was stopped as all connected, and those that had connected dropped the others that had not",
    1000907: "a rank was killed in the first build, and the others waited 30 minutes to make a group with it",
    90238: "ranks that were late in a new world, as others were killed, ended the job",
}
FOUND_ON_DEVICES = {
    617: "ranks waited 30 minutes to make a group, in gloo, whose other backend was none of torch's own",
}
KILLED = {
    "seed": 1,
    "width": 2,
    "tied": False,
    "layers": [LAYER],
    "phases": [
        {"size": 3, "optimizer": "SGD", "ops": [op for key in range(4) for op in (["backward", key, True], ["step"])]},
    ],
    "elastic": {"redundancy": "parity", "every": 1, "joins": [[1, 0.0]], "harms": []},
    "faults": [{"kind": "is killed", "rank": 1, "point": 90, "seconds": 0.0}],
}


def play_with_another_average(program):
    reference.divisors = lambda size: (1.0, size + 1.0)
    training.play(program)


def play_without_random_numbers(program):
    product.torch.set_rng_state = lambda state: None
    training.play(program)


def play_without_watching(program):
    liveness.HealthBoard.find_lost = lambda *args: []
    training.play(program | {"machines": True})  # with no launcher that tells


def play_without_copies(program):
    product._choose = lambda *args: f"nothing is kept: {random_elastic.LOST}"
    training.play(program)


@pytest.mark.parametrize("seeds", [12, pytest.param(25, marks=pytest.mark.thorough)])
def test_random_elastic_programs(seeds):
    assert play_all(seeds, "elastic") > seeds / 2, "the faults seldom strike"


@pytest.mark.parametrize("seeds", [8, pytest.param(40, marks=pytest.mark.thorough)])
def test_random_elastic_programs_on_devices(seeds):
    play_all(seeds, "elastic device")


def of_grid(strategy):
    (phase,) = KILLED["phases"]
    phase = phase | {"size": 4, "inner": 2, "strategy": strategy, "ops": [*phase["ops"], *phase["ops"]]}
    faults = [KILLED["faults"][0] | {"point": 150}]  # in step 2
    return KILLED | {"phases": [phase], "faults": faults, "elastic": KILLED["elastic"] | {"joins": [[1, 3.0]]}}


def play_slowly(program):
    """Play with steps of a second. Returns: the faults that have struck; the sizes of world and inner groups."""
    look, found = random_elastic._look, []

    def look_and_sleep(session, *arguments):
        look(session, *arguments)
        found.append((product.size(), *inner_sizes(session.model)))
        time.sleep(1.0)

    random_elastic._look = look_and_sleep
    return training.play(program)[2], sorted(set(found))


@pytest.mark.parametrize("strategy", GRIDS)
def test_a_grid_of_ranks_is_cut_anew(strategy):
    struck, found = ask(play_slowly, of_grid(strategy))
    assert struck == ["rank 1 is killed at its point 150"]
    assert found == [(3, 3, 3), (4, 2, 2)]


def play_with_another_model(program):
    wrap, calls = random_elastic.wrap, []

    def wrap_in_a_new_process(program, *arguments):
        calls.append(program)
        if len(calls) > program["phases"][0]["size"]:
            program = program | {"layers": [each | {"unit": False} for each in program["layers"]]}
        return wrap(program, *arguments)

    random_elastic.wrap = wrap_in_a_new_process
    play_slowly(program)


def test_other_models_are_told():
    with pytest.raises(process.SimulatedError) as raised:
        ask(play_with_another_model, KILLED)
    told = "StateError: elastic: build() must return one model on all ranks, which have [2, 1, 2] units"
    assert str(raised.value).count(f"raises {told}") == 3


@pytest.mark.parametrize(
    ("kind", "seed", "what"),
    [("elastic", *each) for each in FOUND.items()] + [("elastic device", *each) for each in FOUND_ON_DEVICES.items()],
)
def test_what_seeds_have_found(kind, seed, what):
    ((_, _, _, error),) = ask(training.play_seeds, seed, seed + 1, kind)
    assert error is None, f"{what}: {error}"


@pytest.mark.parametrize(
    ("play", "told"),
    [
        (play_with_another_average, "computes other values in step"),
        (play_without_random_numbers, "computes other values in step"),
        (play_without_watching, "OrderError"),
        (play_without_copies, "are lost"),
    ],
)
def test_what_is_wrong_is_noticed(play, told):
    assert ask(training.play, KILLED)[2] == ["rank 1 is killed at its point 90"]
    with pytest.raises(process.SimulatedError, match=told):
        ask(play, KILLED)
