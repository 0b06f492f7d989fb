"""Every pair of settings trains as the unsharded module and as torch's FSDP1 (see equality.py).

Promises:
- the same at 4 ranks within bounds: `test_four_ranks_train_as_one_within_bounds`
"""

import itertools

import equality
import pytest
from gloo import run_ranks
from pairs import pairwise


def test_every_pair_of_values_occurs():
    for factors in (
        equality.FACTORS,
        {"a": (1,), "b": (1, 2)},
        {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2), "d": (3, 4)},
    ):
        rows = pairwise(factors)
        for a, b in itertools.combinations(factors, 2):
            assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b])), (a, b)
        assert all(list(row) == list(factors) for row in rows)
        assert rows == pairwise(factors)
    assert len(pairwise(equality.FACTORS)) <= 34  # 28 at least


@pytest.mark.multiprocess
def test_two_ranks_train_bit_for_bit_as_one_and_as_torch():
    cases = pairwise(equality.FACTORS)
    compared = 0
    for of_rank in run_ranks(equality.measure, 2, cases, 2):
        for case, (to_plain, to_torch) in zip(cases, of_rank, strict=True):
            assert to_plain == 0, case
            assert (to_torch is None) == (not equality.torch_adds_alike(case))
            if to_torch is not None:
                exact = equality.torch_reduces_alike(case)
                assert to_torch <= (0 if exact else equality.BOUNDS[equality.wire_of(case)]), case
                compared += exact
    assert compared > 30


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_four_ranks_train_as_one_within_bounds():
    cases = equality.cases_of_four()
    for of_rank in run_ranks(equality.measure, 4, cases, 4):
        for case, (to_plain, _) in zip(cases, of_rank, strict=True):
            assert to_plain <= equality.BOUNDS[equality.wire_of(case)], case


def test_the_document_has_these_cases():
    lines = [line.split(" | ") for line in equality.DOCS.read_text().splitlines() if line.startswith("| ")]
    lines = [[cell.strip("| ") for cell in line] for line in lines]
    for ranks, cases in ((2, pairwise(equality.FACTORS)), (4, equality.cases_of_four())):
        for line in equality.table(cases, [(0.0, 0.0)] * len(cases), ("to unsharded", "to torch FSDP1")[: 4 // ranks]):
            cells = [cell.strip("| ") for cell in line.split(" | ")]
            width = len(cells) - 4 // ranks
            assert any(cells[:width] == found[:width] for found in lines) or line.startswith("|---"), line
