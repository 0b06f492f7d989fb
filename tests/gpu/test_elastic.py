"""Elastic training of a model on a device, under stock torchrun: on CUDA, else on the simulated one.

Two or three ranks share one GPU, so that their collectives go through the host. Oracle: as in tests/elastic.

Promises:
- after SIGKILL in a forward, or a stop, the others go on and a new process joins; all train as the unsharded module
  does, bit for bit: `test_a_lost_rank_is_replaced`
"""

import accelerator
import pytest
import staged

from tests.elastic.test_launch import SUPPORT, ended, launched, trains_as_the_unsharded_module

pytestmark = pytest.mark.multiprocess
DEVICES = ["cuda"] if accelerator.ON_CUDA else ["sim", pytest.param("sim:staged", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("2.0:5:kill", {}),
        pytest.param("1.0:5:stop", {"FLATPARAM_HEARTBEAT": "2"}, marks=pytest.mark.thorough),
    ],
)
def test_a_lost_rank_is_replaced(fault, settings, device):
    accelerator.build()
    if device == "sim:staged":
        staged.build()
    script = SUPPORT / "elastic_script.py"
    said, errors, status = ended(launched(3, script, "40", fault, ELASTIC_DEVICE=device, **settings))
    assert status == 0, said + errors
    sizes = trains_as_the_unsharded_module(said, 40, "cuda" if accelerator.ON_CUDA else "cpu")
    assert sizes[0] == sizes[-1] == 3, sizes
    assert "2 ranks go on from step" in errors
