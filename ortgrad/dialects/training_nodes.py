"""Adapts the gradient nodes of onnxruntime-training to the declarations in ortgrad.

onnxruntime-training has some operators in the default domain. Its pool gradients take the shape of X from the
graph, its LSTMGrad takes the biases from its LSTMTraining, and its accumulator changes a buffer in place.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortgrad.dialects.training import ACCUMULATOR, IN_DEFAULT_DOMAIN
from ortgrad.errors import NodeError
from ortgrad.graph.gradient_nodes import gradient_nodes
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import MINIMUM_OPSET, Recorder
from ortgrad.graph.traversal import all_nodes
from ortgrad.operators.call import EMPTY_PREFIX
from ortgrad.operators.declaration import CALL_ATTRIBUTE, DOMAIN, Operator, find_operator

POOL_GRADIENTS = ("MaxPoolGrad", "AveragePoolGrad")


def adopt_training_nodes(model: ir.Model) -> ir.Model:
    """Add the inputs and outputs that onnxruntime-training's gradient nodes leave implicit."""
    for node in all_nodes(model.graph):
        if node.op_type in (*POOL_GRADIENTS, *IN_DEFAULT_DOMAIN) and node.domain in ("", "ai.onnx"):
            node.domain = DOMAIN
            model.opset_imports.setdefault(DOMAIN, 1)
    foreign = [(n, operator) for n, operator in gradient_nodes(model) if CALL_ATTRIBUTE not in n.attributes]
    names = Names.of(model) if foreign else Names()
    for node, operator in foreign:
        if operator.name in POOL_GRADIENTS and len(node.inputs) == len(operator.inputs) - 1:
            try:
                _add_shape_input(model, node, names)
            except NodeError as error:
                raise NodeError(f"{node.op_type} node {node.name!r}: {error}") from error
        elif operator.name == "LSTMGrad":
            _add_cell_inputs(node, operator)
        elif operator.name == ACCUMULATOR and node.graph is model.graph:
            _expose_sum(model.graph, node, names)
    return model


def _add_shape_input(model: ir.Model, node: ir.Node, names: Names) -> None:
    """Add the shape of X to a pool gradient; onnxruntime-training takes it from the graph."""
    graph, output, dy = node.graph, node.outputs[0], node.inputs[0]
    assert graph is not None
    op = Recorder(model.opset_imports.get("", MINIMUM_OPSET), names, node.name or f"{output.name}")
    shape = output.shape
    if shape is not None and shape.is_static():
        x_shape = op.shape_of(output)
    elif (x := _pooled(node)) is not None:
        x_shape = op.Shape(x)
    elif shape is not None and dy is not None and all(isinstance(dim, int) for dim in shape[2:]):
        sizes = np.array(ir.Shape(shape[2:]).numpy(), np.int64)
        x_shape = op.Concat(op.Slice(op.Shape(dy), [0], [2]), sizes, axis=0)
    else:
        raise NodeError(
            f"the shape of its output {output.name!r} is not known in the graph ({shape}); "
            "add the input X_shape (int64), or declare the shape as value_info"
        )
    graph.insert_before(node, op.nodes)
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, x_shape)


def _pooled(node: ir.Node) -> ir.Value | None:
    """Return the input X of the forward node, or None if the graph does not determine it."""
    if node.op_type == "MaxPoolGrad":
        indices = node.inputs[1]
        forward = None if indices is None else indices.producer()
        return forward.inputs[0] if forward is not None and forward.op_type == "MaxPool" else None
    # Found by name: onnxruntime-training names a gradient of X "X_grad", or "X_grad_0" if there are several.
    dy, dx = (str(v and v.name) for v in (node.inputs[0], node.outputs[0]))
    for forward in node.graph or ():
        x, y = forward.inputs[0] if forward.inputs else None, forward.outputs[0]
        if (
            forward.op_type == "AveragePool"
            and x is not None
            and dy == f"{y.name}_grad"
            and f"{dx}_".startswith(f"{x.name}_grad_")
        ):
            return x
    return None


def _add_cell_inputs(node: ir.Node, operator: Operator) -> None:
    """Add the inputs B and P of the LSTMTraining node to LSTMGrad; onnxruntime-training omits them."""
    parameters = {parameter.name: i for i, parameter in enumerate(operator.inputs)}
    gates = node.inputs[parameters["iofc"]] if len(node.inputs) > parameters["iofc"] else None
    forward = None if gates is None else gates.producer()
    if forward is None or forward.op_type != "LSTMTraining" or len(node.inputs) > parameters["B"]:
        return
    node.resize_inputs(len(parameters))
    training = find_operator("LSTMTraining")
    assert training is not None
    for parameter, value in zip(training.inputs, forward.inputs, strict=False):
        # The biases are needed only to determine which elements were clipped.
        needed = parameter.name == "P" or (parameter.name == "B" and "clip" in node.attributes)
        if needed and value is not None and not (value.name or "").startswith(EMPTY_PREFIX):
            node.replace_input_with(parameters[parameter.name], value)


def _expose_sum(graph: ir.Graph, node: ir.Node, names: Names) -> None:
    """Make the updated buffer a graph output; onnxruntime-training changes the buffer in place instead."""
    buffer = node.inputs[0]
    if buffer is None or (len(node.outputs) > 1 and node.outputs[1].name):
        return
    node.resize_outputs(2)
    total = node.outputs[1]
    total.name, total.type, total.shape = names.fresh(f"{buffer.name}.out"), buffer.type, buffer.shape
    graph.outputs.append(total)
