"""More than one backward after the forwards: of a graph that is kept, and of each of several forwards.

torch's runtime gathers and reduces in the first one only. The oracle is the unsharded module; bit for bit.
"""

import pytest
from gloo import run_ranks
from later_backwards import SETTINGS, STRATEGIES, all_wrong, backward_after_a_step, backward_after_others_step

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_backward_counts(strategy):
    settings = [setting for setting in SETTINGS if setting["strategy"] == strategy]
    for results in run_ranks(all_wrong, 2, settings):
        assert len(results) > 30
        assert [(setting, found) for setting, _, found in results if found] == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_after_the_optimizers_step_is_refused(strategy):
    for orig in (True, False):
        for said, right_after in run_ranks(backward_after_a_step, 2, strategy, orig):
            assert "after an optimizer has stepped" in said
            assert "first.weight" in said or "right.weight" in said or "left.weight" in said
            assert right_after


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_after_the_step_of_another_models_optimizer_counts(strategy):
    for orig in (True, False):
        assert run_ranks(backward_after_others_step, 2, strategy, orig) == [True, True]
