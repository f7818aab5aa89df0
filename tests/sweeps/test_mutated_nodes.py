"""Nodes in which something is wrong: a slice of `python tests/sweeps/mutate_nodes.py --count 2000`."""

from __future__ import annotations

import ctypes
import json
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import amount
from support import node_mutations as mutations
from support.calls import CASES, make_model
from sweeps import mutate_nodes

import ortgrad
from ortgrad.operators.call import make_call, parse_call
from ortgrad.operators.declaration import LIMITS, all_operators
from ortgrad.ops._windows import windows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of processes")
SEEDS = (*range(0, 2000, amount(167, 1)), 77, 111, 149, 168, 20785)


@pytest.fixture(scope="module")
def server() -> Iterator[mutate_nodes.Server]:
    server = mutate_nodes.Server()
    yield server
    server.close()


def test_mutated_nodes(server: mutate_nodes.Server) -> None:
    wrong = {}
    for seed in SEEDS:
        found = server.try_mutation(seed, seconds=mutate_nodes.PATIENCE)
        bad = {way: outcome for way, outcome in found.items() if not mutate_nodes.is_allowed(outcome)}
        if bad:
            wrong[mutate_nodes.describe(seed)] = bad
    assert not wrong


def test_every_operator_and_every_kind_of_change_is_tried() -> None:
    names = {subject.node.op_type for subject in mutations.subjects()}
    assert names == {operator.name for operator in all_operators(internal=True)} - OWN | {
        "Fused",
        "FusedDouble",
    }
    changes = [change for seed in range(200) for change in mutations.mutated(seed).changes]
    assert len(set(changes)) > 150


# Operators that other tests declare in this process.
OWN = {o.name for o in all_operators() if o.domain not in ("com.microsoft", "ortgrad")}


def test_memory_of_others_is_recognized() -> None:
    """Uninitialized memory has other contents in the second session."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library does not fill memory")

    class Session:
        def get_inputs(self) -> list[Any]:
            return []

        def run(self, *_: Any) -> list[np.ndarray]:
            return [np.empty(1 << 20, np.uint8)]

    try:
        assert mutate_nodes.attempt("python", Session, {}) == "FOREIGN MEMORY"
    finally:
        mutate_nodes.fill_memory(0)


def test_large_attributes_are_refused_before_anything_is_made_of_them() -> None:
    tracemalloc.start()
    for operator in all_operators(internal=True):
        call = make_call(operator, "n", {}, [True] * len(operator.inputs), [True] * len(operator.outputs))
        for name in LIMITS.keys() & operator.attributes.keys():
            for value in (LIMITS[name] + 1, -LIMITS[name] - 1, 10**8 + 2**31, 2**63, -(10**30)):
                fields = json.loads(call.to_json())
                fields["attributes"][name] = [1, value] if operator.attributes[name].is_list else value
                with pytest.raises(ortgrad.NodeError, match=f"attribute '{name}' is {value}; it must be"):
                    parse_call(operator, json.dumps(fields))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_so_are_those_of_other_nodes(name: str) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy")
    value: Any = LIMITS[name] + 1 if name in ("axis", "batch_dims") else [1, -LIMITS[name] - 1]
    node = helper.make_node("Other", ["x"], ["y"], "the node", domain="other", **{name: value})
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("other", 1)]
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=10)
    for call in (ortgrad.build_gradient_model, ortgrad.prepare, ortgrad.InferenceSession):
        with pytest.raises(ortgrad.ModelError, match=f"attribute '{name}' .* must be between"):
            call(model)


SHAPES = ["GatherGrad", "GatherElementsGrad", "GatherNDGrad", "SliceGrad", "MaxPoolGrad", "AveragePoolGrad"]


@pytest.mark.parametrize("op_type", SHAPES)
def test_shapes_of_millions_of_numbers(op_type: str) -> None:
    """Nothing as long is made of them, whether the length is declared or found in a run."""
    case = next(case for case in CASES if case.op_type == op_type)
    name = next(name for name in case.arrays if name in ("shape", "X_shape"))
    declared = make_model(case, "static")
    value = next(value for value in declared.graph.input if value.name == name)
    value.type.tensor_type.shape.dim[0].dim_value = 2**31
    with pytest.raises(ortgrad.NodeError, match="no tensor has so many dimensions"):
        ortgrad.InferenceSession(declared)
    session = ortgrad.InferenceSession(make_model(case, "undeclared"), kernels="python")
    feeds = {**case.arrays, name: np.ones(10**7, np.int64)}
    tracemalloc.start()
    with pytest.raises(ortgrad.KernelError, match="has 10000000 numbers: no tensor has so many dimensions"):
        session.run(None, feeds)
    # A copy for the error, and no list.
    assert tracemalloc.get_traced_memory()[1] < 2 * feeds[name].nbytes
    tracemalloc.stop()


@pytest.mark.parametrize(
    "attributes",
    [
        {"pads": [2**30] * 4, "strides": [2**29] * 2},
        {"dilations": [2**20] * 2, "pads": [2**20] * 4, "strides": [2**31] * 2},
        {"dilations": [2**31] * 2, "auto_pad": "SAME_UPPER"},
    ],
)
def test_windows_that_reach_too_far(attributes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="too far"):
        windows([5, 4], [3, 3], **attributes)
    with pytest.raises(ValueError, match=r"too far|not fit"):
        windows([5, 4], [2**31 - 1] * 2, pool=True, strides=[2**31] * 2)
    # A dilated window over a single position.
    assert windows([1, 1], [3, 3], dilations=[36, 36], pads=[36] * 4).outputs == (1, 1)


@pytest.mark.parametrize("kernels", mutate_nodes.OWN)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda node: node.input.pop(), "it has 2 inputs; the operator has 3|not in range"),
        (lambda node: node.input.append("dY"), "it has 4 inputs; the operator has 3|not in range"),
        (lambda node: node.input.__setitem__(0, ""), "dY, one of its inputs, is left out"),
        (
            lambda node: swap_flag(node, "outputs"),
            "dX is used, and its kernel does not compute it",
        ),
    ],
)
def test_nodes_that_are_not_what_their_call_says(change: Any, text: str, kernels: Any) -> None:
    case = next(case for case in CASES if case.op_type == "ConvGrad")
    model = ortgrad.prepare(make_model(case, "static"), kernels="python")
    change(model.graph.node[0])
    with pytest.raises(ortgrad.ModelError, match=text):
        ortgrad.InferenceSession(model, kernels=kernels)


def swap_flag(node: onnx.NodeProto, name: str) -> None:
    attribute = next(a for a in node.attribute if a.name == "ortgrad")
    attribute.s = attribute.s.replace(f'"{name}":[1'.encode(), f'"{name}":[0'.encode())
