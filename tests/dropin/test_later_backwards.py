"""More than one backward after the forwards: of a graph that is kept, and of each of several forwards.

torch's runtime gathers and reduces in the first one only. The oracle is the unsharded module; bit for bit.
"""

import pytest
from later_backwards import STRATEGIES, all_wrong, backward_after_a_step, backward_after_others_step, cases_of_all
from pairs import cover
from simulated_ranks import simulate_ranks

pytestmark = pytest.mark.multiprocess


def check(cases):
    for results in simulate_ranks(all_wrong, 2, cases):
        assert len(results) == len(cases)
        assert [(case, found) for case, found in results if found] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_backward_counts(strategy):
    cases = [case for case in cover(cases_of_all()) if case[0] == strategy]
    assert len(cases) > 20
    check(cases)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_backward_counts_in_all_settings(strategy):
    cases = [case for case in cases_of_all() if case[0] == strategy]
    assert len(cases) > 200
    check(cases)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_after_the_optimizers_step_is_refused(strategy):
    for orig in (True, False):
        for said, right_after in simulate_ranks(backward_after_a_step, 2, strategy, orig):
            assert "after an optimizer has stepped" in said
            assert "first.weight" in said or "right.weight" in said or "left.weight" in said
            assert right_after


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_after_the_step_of_another_models_optimizer_counts(strategy):
    for orig in (True, False):
        assert simulate_ranks(backward_after_others_step, 2, strategy, orig) == [True, True]
