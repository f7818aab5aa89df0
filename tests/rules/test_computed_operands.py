"""Weights from which operands are computed that ONNX declares not differentiable, or that are often constant.

A bound, an initial state or a sampling grid that is a constant is not a parameter. One that a network
computes has a gradient, and the weights of that network are parameters.
"""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ortgrad

# By operand: its shape, and nodes that compute y from it and from the other inputs, which get random values.
Case = tuple[list[int], dict[str, list[int]], str]
CASES: dict[str, Case] = {
    "AffineGrid theta": ([2, 2, 3], {}, "y = AffineGrid (operand, size4)"),
    "BatchNormalization mean": (
        [3],
        {"x": [2, 3], "s": [3]},
        "y = BatchNormalization (x, s, s, operand, var)",
    ),
    "BatchNormalization var": ([3], {"x": [2, 3], "s": [3]}, "y = BatchNormalization (x, s, s, s, operand)"),
    "Clip min": ([], {"x": [2, 3]}, "y = Clip (x, operand)"),
    "Clip max": ([], {"x": [2, 3]}, "y = Clip (x, , operand)"),
    "DFT input": ([2, 8, 1], {}, "y = DFT (operand)"),
    "GridSample grid": ([2, 3, 4, 2], {"x": [2, 2, 5, 5]}, "y = GridSample (x, operand)"),
    "GRU initial_h": (
        [1, 2, 3],
        {"x": [4, 2, 2], "g": [1, 9, 2], "r": [1, 9, 3]},
        "y = GRU <hidden_size = 3> (x, g, r, , , operand)",
    ),
    "LSTM initial_h": (
        [1, 2, 3],
        {"x": [4, 2, 2], "g": [1, 12, 2], "r": [1, 12, 3]},
        "y = LSTM <hidden_size = 3> (x, g, r, , , operand)",
    ),
    "LSTM initial_c": (
        [1, 2, 3],
        {"x": [4, 2, 2], "g": [1, 12, 2], "r": [1, 12, 3]},
        "y = LSTM <hidden_size = 3> (x, g, r, , , , operand)",
    ),
    "OneHot values": ([2], {"x": [2]}, "y = OneHot (labels, depth, operand)"),
    "Pad constant_value": ([], {"x": [2, 3]}, "y = Pad (x, pads, operand)"),
    "Pow exponent": ([3], {"x": [2, 3]}, "p = Exp (x) \n y = Pow (p, operand)"),
    "RNN initial_h": (
        [1, 2, 3],
        {"x": [4, 2, 2], "g": [1, 3, 2], "r": [1, 3, 3]},
        "y = RNN <hidden_size = 3> (x, g, r, , , operand)",
    ),
    "STFT signal": ([2, 32, 1], {"win": [8]}, "y = STFT (operand, step, win)"),
    "STFT window": ([8], {"x": [2, 32, 1]}, "y = STFT (x, step, operand)"),
}
CONSTANTS = {
    "size4": np.array([2, 1, 3, 4]),
    "var": np.array([1, 2, 3], np.float32),
    "labels": np.array([1, 3]),
    "depth": np.array(4),
    "pads": np.array([1, 0, 0, 1]),
    "step": np.array(4),
}


def model(name: str, *, computed: bool) -> onnx.ModelProto:
    """The operand as a function of a weight `w`, or as an initializer."""
    shape, inputs, nodes = CASES[name]
    declared = ", ".join(f"float[{', '.join(map(str, dims))}] {name}" for name, dims in inputs.items())
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({declared}) => (float y) {{ {nodes} }}'
    parsed = onnx.parser.parse_model(text)
    graph = parsed.graph
    graph.output[0].type.tensor_type.ClearField("shape")
    read = {given for node in graph.node for given in node.input}
    arrays = {given: array for given, array in CONSTANTS.items() if given in read}
    values = (0.2 + 0.6 * np.random.default_rng(1).random(shape or [2])).astype(np.float32)
    if computed:
        arrays["w"] = values
        maker = helper.make_node("Tanh", ["w"], ["operand"])
        # A scalar of two weights: single numbers are not parameters.
        graph.node.insert(
            0, maker if shape else helper.make_node("ReduceMean", ["w"], ["operand"], keepdims=0)
        )
    else:
        arrays["operand"] = values if shape else np.asarray(values.mean())
    graph.initializer.extend(numpy_helper.from_array(array, given) for given, array in arrays.items())
    return parsed


def targets(model: onnx.ModelProto) -> list[str]:
    """The names that the pattern * matches: inputs and parameters."""
    built = ortgrad.build_gradient_model(model, wrt="*", of="y")
    return json.loads(next(entry.value for entry in built.metadata_props if entry.key == "ortgrad.wrt"))


def feeds(name: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(2)
    return {k: generator.standard_normal(dims).astype(np.float32) for k, dims in CASES[name][1].items()}


@pytest.mark.parametrize("name", CASES)
def test_weights_behind_a_computed_operand_are_parameters(name: str) -> None:
    computed = model(name, computed=True)
    assert "w" in targets(computed)
    result = ortgrad.check_gradients(computed, feeds(name), wrt=["w"])
    assert result.rows[0].ok, str(result)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] and "OneHot" not in name])
def test_the_same_operand_as_a_constant_is_none(name: str) -> None:
    constant = model(name, computed=False)
    assert "operand" not in targets(constant)
    # PyTorch's exporters write copies of equal constants.
    for node in constant.graph.node:
        node.input[:] = ["copy" if given == "operand" else given for given in node.input]
    constant.graph.node.insert(0, helper.make_node("Identity", ["operand"], ["copy"]))
    assert "operand" not in targets(constant)


CHECKED = {"AffineGrid", "DFT", "GridSample", "GRU", "LSTM", "RNN", "STFT"}


@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0] in CHECKED])
def test_check_covers_the_operand_as_an_input(name: str) -> None:
    shape = CASES[name][0]
    given = model(name, computed=False)
    (operand,) = (tensor for tensor in given.graph.initializer if tensor.name == "operand")
    given.graph.initializer.remove(operand)
    given.graph.input.append(helper.make_tensor_value_info("operand", operand.data_type, shape))
    result = ortgrad.check_gradients(given, {**feeds(name), "operand": numpy_helper.to_array(operand)})
    assert next(row for row in result.rows if row.name == "operand").ok, str(result)
