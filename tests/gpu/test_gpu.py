"""The tests of ``make test-gpu``. Without a GPU they run on the simulated device, with as many ranks as they like."""

import accelerator
import pytest
import simulated
from bodies import BODIES, HERE
from gloo import run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def library():
    return "" if accelerator.ON_CUDA else str(simulated.build())


@pytest.mark.parametrize("ranks", HERE)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_a_gpu(library, body, ranks):
    run_ranks(body, ranks, library, timeout=240.0)
