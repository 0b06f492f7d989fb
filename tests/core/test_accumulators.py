"""The nodes that accumulate one tensor's gradient: noted in the order of the graphs, and kept by these alone."""

import sys

import pytest
import torch
from torch import nn

from flatparam import _C


def test_nodes_are_known_as_long_as_graphs_have_them():
    flat = nn.Parameter(torch.ones(3))
    known = _C.note_accumulator(None, flat)
    assert _C.accumulators(known) == _C.accumulators(None) == []
    graphs = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat.data = flat.data.to(dtype)
        graphs.append(flat * 2)
        for _ in range(2):
            assert _C.note_accumulator(known, flat) is known
    expected = [graph.grad_fn.next_functions[0][0] for graph in graphs]
    assert _C.accumulators(known) == expected
    del expected, graphs[1]
    assert _C.accumulators(known) == [graph.grad_fn.next_functions[0][0] for graph in graphs]
    assert {node.name() for node in _C.accumulators(known)} == {"torch::autograd::AccumulateGrad"}
    graphs.clear()
    assert _C.accumulators(known) == []


def test_without_a_graph_no_node_is_made():
    flat = nn.Parameter(torch.ones(3))
    for tensor in (flat, torch.ones(2)):
        assert _C.accumulators(_C.note_accumulator(None, tensor)) == []


@pytest.mark.parametrize("known", [3, object()])
def test_what_was_not_noted_here_is_refused(known):
    flat = nn.Parameter(torch.ones(3))
    references = sys.getrefcount(known)
    with pytest.raises(ValueError, match="PyCapsule"):
        _C.note_accumulator(known, flat)
    with pytest.raises(ValueError, match="PyCapsule"):
        _C.accumulators(known)
    assert sys.getrefcount(known) == references
    with pytest.raises(TypeError, match="expected a tensor, got object"):
        _C.note_accumulator(None, object())
