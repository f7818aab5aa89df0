"""Output shapes of operators for which onnx infers none.

onnx infers the shape of an STFT only if all sizes of the signal are known, none for most operators of
ai.onnx.ml, and none for Unsqueeze and Squeeze in a subgraph if the axes are a constant outside of it. Behind
them no rule would know the number of dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

Result = tuple[ir.DataType, ir.Shape]


def fill_in_shapes(graph: ir.Graph) -> bool:
    """Set types and shapes of outputs that follow from the first input; returns whether there are new ones.

    onnx keeps the type of an intermediate value only together with its shape.
    """
    found = False
    for node in graph.all_nodes():
        function = _FUNCTIONS.get((node.domain, node.op_type))
        x = node.inputs[0] if function is not None and node.inputs else None
        if function is None or x is None or x.shape is None or x.dtype is None:
            continue
        for output, (element, shape) in zip(node.outputs, function(node, x.dtype, x.shape), strict=False):
            if output.shape is None:
                output.type, output.shape = ir.TensorType(element), shape
                found = True
    return found


def _stft(node: ir.Node, element: ir.DataType, signal: ir.Shape) -> list[Result]:
    return [(element, ir.Shape([signal[0], None, None, 2]))] if len(signal) in (2, 3) else []


def _unsqueeze(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    given = _vector(node, 1)
    rank = len(x) + len(given or ())
    new, old = _axes(given, rank), iter(x)
    return [] if new is None else [(element, ir.Shape([1 if i in new else next(old) for i in range(rank)]))]


def _squeeze(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    gone = _axes(_vector(node, 1), len(x))
    return [] if gone is None else [(element, ir.Shape([n for i, n in enumerate(x) if i not in gone]))]


def _vector(node: ir.Node, i: int) -> list[int] | None:
    """The i-th input if it is a constant; an initializer that can be fed is none."""
    given = node.inputs[i] if len(node.inputs) > i else None
    if given is None or given.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(given)
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def _axes(given: list[int] | None, rank: int) -> set[int] | None:
    """The axes counted from the front, or None if they are not known or not valid."""
    if given is None or not all(-rank <= axis < rank for axis in given):
        return None
    axes = {axis % rank for axis in given}
    return axes if len(axes) == len(given) else None


def _same(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    return [(element, ir.Shape(x))]


def _same_in_float(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    return [(ir.DataType.FLOAT, ir.Shape(x))]


def _regressor(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    targets = node.attributes.get("targets")
    return [(ir.DataType.FLOAT, ir.Shape([_rows(x), 1 if targets is None else targets.as_int()]))]


def _columns(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    sizes = node.attributes.get("inputdimensions")
    return [(ir.DataType.FLOAT, ir.Shape([_rows(x), None if sizes is None else sum(sizes.as_ints())]))]


def _classifier(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    label = ir.DataType.STRING if "classlabels_strings" in node.attributes else ir.DataType.INT64
    return [(label, ir.Shape([_rows(x)])), (ir.DataType.FLOAT, ir.Shape([_rows(x), None]))]


def _rows(x: ir.Shape) -> int | ir.SymbolicDim:
    """A vector counts as one row."""
    return x[0] if len(x) > 1 else 1


_FUNCTIONS: dict[tuple[str, str], Callable[[ir.Node, ir.DataType, ir.Shape], list[Result]]] = {
    ("", "STFT"): _stft,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("ai.onnx.ml", "Scaler"): _same_in_float,
    ("ai.onnx.ml", "Normalizer"): _same_in_float,
    ("ai.onnx.ml", "Imputer"): _same,
    ("ai.onnx.ml", "LinearRegressor"): _regressor,
    ("ai.onnx.ml", "SVMRegressor"): _regressor,
    ("ai.onnx.ml", "SVMClassifier"): _classifier,
    ("ai.onnx.ml", "FeatureVectorizer"): _columns,
}
