"""Bring gradient nodes, however they were written, into the complete form.

onnxruntime-training leaves out optional inputs and outputs, and keeps the pool gradients in the
default domain, where they read the shape of X off the graph. Afterwards every node is in
the operator's domain, names all its inputs and outputs, and carries the attribute that its
Python kernel reads. A second time changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.dialects.training import IN_DEFAULT_DOMAIN
from ortgrad.errors import NodeError
from ortgrad.graph.gradient_nodes import call_of, gradient_nodes
from ortgrad.graph.inference import infer_types
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import MINIMUM_OPSET, Recorder
from ortgrad.operators.call import EMPTY_PREFIX, Call
from ortgrad.operators.declaration import CALL_ATTRIBUTE, DOMAIN, Operator, find_operator

POOL_GRADIENTS = ("MaxPoolGrad", "AveragePoolGrad")
ACCUMULATOR = "InPlaceAccumulatorV2"


def complete(model: ir.Model, *, built: bool = False) -> None:
    """Complete all gradient nodes of the model, in place.

    With `built`, those that are not complete yet come from gradient rules, so their shapes are right.
    """
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type in (*POOL_GRADIENTS, *IN_DEFAULT_DOMAIN) and node.domain in ("", "ai.onnx"):
            node.domain = DOMAIN
    nodes = list(gradient_nodes(model))
    if not nodes:
        return
    model.opset_imports.setdefault(DOMAIN, 1)
    names = Names.of(model)
    for node, operator in nodes:
        if CALL_ATTRIBUTE not in node.attributes:
            try:
                _describe(model, node, operator, names, built)
            except NodeError as error:
                raise NodeError(f"{node.op_type} node {node.name!r}: {error}") from error
    infer_types(model)
    for node, operator in nodes:
        _fill_inputs(model, node, operator)
        _check_shapes(node, call_of(node, operator))


def _check_shapes(node: ir.Node, call: Call) -> None:
    """Raise NodeError if what is known of the inputs' shapes does not fit."""
    present = [value if real else None for value, real in zip(node.inputs, call.present, strict=True)]
    try:
        call.contract.check_values(present)
    except ValueError as error:
        raise NodeError(f"{node.op_type} node {node.name!r}: {error}") from error


def _describe(model: ir.Model, node: ir.Node, operator: Operator, names: Names, built: bool) -> None:
    """Write down what the node says by leaving things out, and name all its outputs."""
    if operator.name in POOL_GRADIENTS and len(node.inputs) == len(operator.inputs) - 1:
        _add_shape_input(model, node, names)
    if operator.name == "LSTMGrad":
        _add_cell_inputs(node, operator)
    if operator.name == ACCUMULATOR and node.graph is model.graph:
        _expose_sum(model.graph, node, names)
    present = [value is not None for value in node.inputs]
    if len(present) > len(operator.inputs) or len(node.outputs) > len(operator.outputs):
        raise NodeError(
            f"it has {len(node.inputs)} inputs and {len(node.outputs)} outputs; the operator "
            f"has at most {len(operator.inputs)} and {len(operator.outputs)}"
        )
    present += [False] * (len(operator.inputs) - len(present))
    for parameter, given in zip(operator.inputs, present, strict=True):
        if not (given or parameter.optional):
            raise NodeError(f"input {parameter.name} is missing")
    wanted = [
        bool(value.name and (value.uses() or value.is_graph_output() or not parameter.optional))
        for parameter, value in zip(operator.outputs, node.outputs, strict=False)
    ]
    wanted += [False] * (len(operator.outputs) - len(wanted))
    for parameter, want in zip(operator.outputs, wanted, strict=True):
        if not (want or parameter.optional):
            raise NodeError(f"output {parameter.name} is missing")
    for name in operator.forward_attributes:
        node.attributes.pop(name, None)
    attributes = operator.complete({a.name: _plain(a) for a in node.attributes.values()})
    node.resize_inputs(len(operator.inputs))
    node.resize_outputs(len(operator.outputs))
    first = next(v.name for v in node.outputs if v.name)
    node.name = node.name or names.fresh(f"{operator.name}_{first}")
    for parameter, value, want in zip(operator.outputs, node.outputs, wanted, strict=True):
        value.name = value.name or names.fresh(f"{node.name}.unused.{parameter.name}")
        if not want:
            # What the graph says of its shape would have onnxruntime reuse memory that is not there.
            value.shape = None if value.type is None else ir.Shape([0])
    call = Call(operator, node.name, attributes, tuple(present), tuple(wanted), built=built)
    node.attributes.add(ir.AttrString(CALL_ATTRIBUTE, call.to_json()))


def _plain(attribute: ir.Attr) -> Any:
    """The value as plain Python data (bytes are decoded by the declaration)."""
    if attribute.is_ref():
        raise NodeError(
            f"attribute {attribute.name!r} refers to a function's parameter; inline the function first"
        )
    return attribute.value if not isinstance(attribute.value, tuple) else list(attribute.value)


def _add_shape_input(model: ir.Model, node: ir.Node, names: Names) -> None:
    """Give a pool gradient the shape of X, which onnxruntime-training leaves to the graph."""
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
    """The X of the forward node, if the graph tells which that is."""
    if node.op_type == "MaxPoolGrad":
        indices = node.inputs[1]
        forward = None if indices is None else indices.producer()
        return forward.inputs[0] if forward is not None and forward.op_type == "MaxPool" else None
    # Only names tell: onnxruntime-training calls a gradient of X X_grad, or X_grad_0 if there are several.
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
    """Give LSTMGrad the B and P of its LSTMTraining, which onnxruntime-training leaves out."""
    parameters = {parameter.name: i for i, parameter in enumerate(operator.inputs)}
    gates = node.inputs[parameters["iofc"]] if len(node.inputs) > parameters["iofc"] else None
    forward = None if gates is None else gates.producer()
    if forward is None or forward.op_type != "LSTMTraining" or len(node.inputs) > parameters["B"]:
        return
    node.resize_inputs(len(parameters))
    training = find_operator("LSTMTraining")
    assert training is not None
    for parameter, value in zip(training.inputs, forward.inputs, strict=False):
        # The biases only tell what was clipped.
        needed = parameter.name == "P" or (parameter.name == "B" and "clip" in node.attributes)
        if needed and value is not None and not (value.name or "").startswith(EMPTY_PREFIX):
            node.replace_input_with(parameters[parameter.name], value)


def _expose_sum(graph: ir.Graph, node: ir.Node, names: Names) -> None:
    """Make the updated buffer a graph output: onnxruntime-training changes the buffer in place instead."""
    buffer = node.inputs[0]
    if buffer is None or (len(node.outputs) > 1 and node.outputs[1].name):
        return
    node.resize_outputs(2)
    total = node.outputs[1]
    total.name, total.type, total.shape = names.fresh(f"{buffer.name}.out"), buffer.type, buffer.shape
    graph.outputs.append(total)


def _fill_inputs(model: ir.Model, node: ir.Node, operator: Operator) -> None:
    """Put an empty tensor of the right type where an optional input is absent."""
    call = call_of(node, operator)
    bound: dict[str, str] = {}
    for parameter, value, real in zip(operator.inputs, node.inputs, call.present, strict=True):
        if real and value is not None and value.dtype is not None:
            bound.setdefault(parameter.type, value.dtype.numpy().name)
    for i, (parameter, real) in enumerate(zip(operator.inputs, call.present, strict=True)):
        if real:
            continue
        default = operator.types.get(parameter.type, (parameter.type,))[0]
        node.replace_input_with(i, _empty(model, bound.get(parameter.type, default)))


def _empty(model: ir.Model, type_: str) -> ir.Value:
    name = EMPTY_PREFIX + type_
    if name not in model.graph.initializers:
        dtype = ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(type_, type_.upper())]
        tensor = ir.tensor(np.zeros(0, dtype.numpy()), dtype=dtype, name=name)
        model.graph.register_initializer(
            ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([0]), const_value=tensor)
        )
    return model.graph.initializers[name]
