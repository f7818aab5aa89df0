"""Output shapes of operators for which onnx infers none, or a wrong one.

onnx infers the shape of an STFT only if all sizes of the signal are known, and none for most operators of
ai.onnx.ml. Behind them no rule would know the number of dimensions. It takes an STFT without the attribute
`onesided` for two-sided, but the default is 1.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from ortgrad.graph import protos
from ortgrad.graph.traversal import all_nodes

Result = tuple[ir.DataType, ir.Shape]


def fill_in_shapes(graph: ir.Graph) -> bool:
    """Set types and shapes of outputs that follow from the first input; returns whether there are new ones.

    onnx keeps the type of an intermediate value only together with its shape.
    """
    found = False
    for node in all_nodes(graph):
        function = _FUNCTIONS.get((node.domain, node.op_type))
        x = node.inputs[0] if function is not None and node.inputs else None
        if function is None or x is None or x.shape is None or x.dtype is None:
            continue
        for output, (element, shape) in zip(node.outputs, function(node, x.dtype, x.shape), strict=False):
            if output.shape is None:
                output.type, output.shape = ir.TensorType(element), shape
                found = True
    return found


def write_out_sides(graph: onnx.GraphProto) -> None:
    """Give every STFT node the attribute `onesided`, in place, for shape inference only."""
    for node in protos.all_nodes(graph.node):
        if protos.is_operator(node, "STFT") and not any(
            attribute.name == "onesided" for attribute in node.attribute
        ):
            node.attribute.append(onnx.helper.make_attribute("onesided", 1))


def _stft(node: ir.Node, element: ir.DataType, signal: ir.Shape) -> list[Result]:
    return [(element, ir.Shape([signal[0], None, None, 2]))] if len(signal) in (2, 3) else []


def _same(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    return [(element, ir.Shape(x))]


def _same_in_float(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    return [(ir.DataType.FLOAT, ir.Shape(x))]


def _regressor(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    return [(ir.DataType.FLOAT, ir.Shape([_rows(x), node.attributes.get_int("targets", 1)]))]


def _columns(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    sizes = node.attributes.get_ints("inputdimensions")
    return [(ir.DataType.FLOAT, ir.Shape([_rows(x), None if sizes is None else sum(sizes)]))]


def _classifier(node: ir.Node, element: ir.DataType, x: ir.Shape) -> list[Result]:
    label = ir.DataType.STRING if "classlabels_strings" in node.attributes else ir.DataType.INT64
    return [(label, ir.Shape([_rows(x)])), (ir.DataType.FLOAT, ir.Shape([_rows(x), None]))]


def _rows(x: ir.Shape) -> int | ir.SymbolicDim:
    """A vector counts as one row."""
    return x[0] if len(x) > 1 else 1


_FUNCTIONS: dict[tuple[str, str], Callable[[ir.Node, ir.DataType, ir.Shape], list[Result]]] = {
    ("", "STFT"): _stft,
    ("ai.onnx.ml", "Scaler"): _same_in_float,
    ("ai.onnx.ml", "Normalizer"): _same_in_float,
    ("ai.onnx.ml", "Imputer"): _same,
    ("ai.onnx.ml", "LinearRegressor"): _regressor,
    ("ai.onnx.ml", "SVMRegressor"): _regressor,
    ("ai.onnx.ml", "SVMClassifier"): _classifier,
    ("ai.onnx.ml", "FeatureVectorizer"): _columns,
}
