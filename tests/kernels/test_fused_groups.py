"""Groups of fused nodes never need each other's results in a circle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import dependencies
from ortgrad.lowering.fusion.fusable import read_fusable
from ortgrad.lowering.fusion.fusable_sums import read_sum
from ortgrad.lowering.fusion.groups import Groups
from ortgrad.shapes.inference import infer_types


def random_model(rng: np.random.Generator, nodes: int) -> ir.Model:
    """Element-wise nodes, sums and nodes that are never fused, each of random earlier values."""
    shape = ir.Shape([64, 32])
    inputs = [ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=shape) for i in range(3)]
    op = Recorder(18, Names(value.name for value in inputs))
    values, results = list(inputs), []
    for _ in range(nodes):
        # Mostly late ones, as in a network; sometimes early ones, as in its backward part.
        x, y = (values[-1 - min(int(rng.exponential(8)), len(values) - 1)] for _ in range(2))
        kind = rng.integers(8)
        if kind == 0:
            results.append(op.ReduceSum(op.Mul(x, y), [0], keepdims=0))
        elif kind == 1:
            values.append(op.CumSum(x, np.int64(rng.integers(2))))
        elif kind == 2:
            values.append(op.Tanh(x))
        else:
            values.append((op.Mul, op.Add, op.Sub)[kind % 3](x, y))
    graph = ir.Graph(inputs, [*values[-3:], *results], nodes=op.nodes, opset_imports={"": 18})
    model = ir.Model(graph, ir_version=10)
    infer_types(model)
    return model


def circle(graph: ir.Graph, owners: Mapping[ir.Node, int]) -> bool:
    """Whether the groups cannot be put into an order in which each comes behind what it reads."""
    number = {node: owners.get(node, -1 - i) for i, node in enumerate(graph)}
    needs: dict[int, set[int]] = {group: set() for group in number.values()}
    for node in graph:
        for value in dependencies(node):
            producer = value.producer()
            if producer is not None and number[producer] != number[node]:
                needs[number[node]].add(number[producer])
    while ready := {group for group, others in needs.items() if not others}:
        needs = {group: others - ready for group, others in needs.items() if group not in ready}
    return bool(needs)


@pytest.mark.parametrize("seed", range(40))
def test_groups_can_be_ordered(seed: int) -> None:
    model = random_model(np.random.default_rng([7, seed]), 60)
    nodes = list(model.graph)
    fusable = [each for node in nodes if (each := read_fusable(node) or read_sum(node)) is not None]
    groups = Groups(nodes, fusable).merge_all()
    assert any(len(group) > 2 for group in groups)
    owners = {each.node: i for i, group in enumerate(groups) for each in group}
    assert not circle(model.graph, owners)
