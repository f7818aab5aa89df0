"""From a forward model to its backward graph."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from ortgrad.backward import FLOAT_TYPES, BackwardPass, list_failures
from ortgrad.bodies import Ops
from ortgrad.errors import ModelError, NameNotFoundError, UnsupportedGradientError
from ortgrad.models import check_names
from ortgrad.names import free_name, name_nodes, taken_names
from ortgrad.passes.attach import attach, is_body
from ortgrad.passes.complete import complete
from ortgrad.passes.deduplicate import deduplicate
from ortgrad.passes.expand_unsupported import expand_unsupported
from ortgrad.passes.gradient_op import expand_gradient_operator
from ortgrad.passes.inference import infer_types
from ortgrad.passes.inline import inline
from ortgrad.passes.loop_shapes import infer_loop_shapes
from ortgrad.passes.opset import at_minimum_opset
from ortgrad.passes.protos import read, write


@dataclass(frozen=True)
class Plan:
    """A forward model as it is differentiated, and its backward pass, which is not in the graph yet."""

    model: ir.Model
    backward: BackwardPass
    targets: Sequence[ir.Value]
    taken: set[str]


def plan(source: onnx.ModelProto, wrt: Sequence[str] | None, of: Sequence[str] | None) -> Plan:
    """Run the backward pass; what cannot be differentiated is in its `failures`."""
    check_names(source.graph)
    model = inline(read(source), lambda function: not is_body(function))
    complete(model)
    model = at_minimum_opset(model)
    expand_gradient_operator(model)
    graph = model.graph
    infer_types(model)
    infer_loop_shapes(model)
    values = _values_by_name(graph)
    outputs = [_output(graph, name) for name in of] if of is not None else list(graph.outputs[:1])
    if not outputs:
        raise ModelError("the model has no output to differentiate")
    targets = (
        [_target(values, name) for name in wrt] if wrt is not None else _float_initializers(graph, source)
    )
    for value in outputs:
        if value.dtype not in FLOAT_TYPES:
            raise ModelError(
                f"output {value.name!r} has element type {_type_name(value)}, which has no gradient"
            )
    try:
        graph.sort()
    except ValueError as error:
        raise ModelError("the nodes of the model form a cycle") from error
    names = [value.name or "" for value in targets], [value.name or "" for value in outputs]
    expand_unsupported(model, targets, outputs)
    # What was opened up has new values under the old names.
    values = _values_by_name(graph)
    targets, outputs = [_target(values, n) for n in names[0]], [_output(graph, n) for n in names[1]]
    op = Ops(model.opset_imports[""])
    backward = BackwardPass(op, list(graph), targets)
    taken = taken_names(graph)
    for value in outputs:
        backward.seed(value, _seed(graph, op, value, alone=len(outputs) == 1, taken=taken))
    backward.run()
    return Plan(model, backward, targets, taken)


def build(source: onnx.ModelProto, wrt: Sequence[str] | None, of: Sequence[str] | None) -> onnx.ModelProto:
    """`build_gradient_model` for a ModelProto."""
    planned = plan(source, wrt, of)
    model, backward, targets, taken = planned.model, planned.backward, planned.targets, planned.taken
    graph, op = model.graph, backward.op
    if backward.failures:
        raise UnsupportedGradientError(list_failures(backward.failures, model.opset_imports))
    results = [_result(backward, value, taken) for value in targets]
    name_nodes(op.nodes, taken | {value.name for value in results if value.name}, keep=set(results))
    graph.extend(op.nodes)
    for node in graph.all_nodes():
        model.opset_imports.setdefault(node.domain, 1)
    for value, result in zip(targets, results, strict=True):
        graph.outputs.append(result)
        if value.is_initializer() and not value.is_graph_input():
            # With a default, so that a training loop can feed new values.
            graph.inputs.append(value)
    graph.sort()
    deduplicate(model)
    RemoveUnusedNodesPass()(model)
    for node in graph.all_nodes():
        # The pass takes away empty inputs at the end, of which Loop needs two.
        if node.op_type == "Loop" and len(node.inputs) < 2:
            node.resize_inputs(2)
    RemoveUnusedOpsetsPass()(model)
    complete(model, built=True)
    attach(model)
    return write(model)


def _values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    values = [*graph.inputs, *graph.initializers.values()]
    values += [output for node in graph for output in node.outputs]
    return {value.name: value for value in values if value.name}


def _output(graph: ir.Graph, name: str) -> ir.Value:
    outputs = {value.name: value for value in graph.outputs if value.name}
    if name not in outputs:
        raise NameNotFoundError(f"of={name!r} is not an output of the model{_nearest(name, outputs)}")
    return outputs[name]


def _target(values: dict[str, ir.Value], name: str) -> ir.Value:
    if name not in values:
        raise NameNotFoundError(f"wrt={name!r} is not a value of the model{_nearest(name, values)}")
    value = values[name]
    if value.dtype is not None and value.dtype not in FLOAT_TYPES:
        raise ModelError(f"wrt={name!r} has element type {_type_name(value)}, which has no gradient")
    return value


def _type_name(value: ir.Value) -> str:
    return "unknown" if value.dtype is None else value.dtype.name.lower()


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.4)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def _float_initializers(graph: ir.Graph, source: onnx.ModelProto) -> list[ir.Value]:
    # Shape inference does not keep their order.
    found = [graph.initializers.get(tensor.name) for tensor in source.graph.initializer]
    targets = [value for value in found if value is not None and value.dtype in FLOAT_TYPES]
    if not targets:
        raise ModelError("the model has no floating-point initializer; name what you want in wrt")
    return targets


def _seed(graph: ir.Graph, op: Ops, value: ir.Value, *, alone: bool, taken: set[str]) -> ir.Value:
    """The gradient to start from: 1 for a single scalar, else an input of the graph."""
    if alone and value.shape is not None and len(value.shape) == 0:
        assert value.dtype is not None
        return op.constant(np.array(1.0, value.dtype.numpy()))
    name = free_name(f"{value.name}_grad", taken)
    seed = ir.Value(name=name, type=value.type, shape=value.shape)
    graph.inputs.append(seed)
    if value.shape is not None and value.shape.is_static():
        return seed
    # onnxruntime compares what is fed with numbers only; what broadcasts would give other gradients.
    op.checked, op.label = True, f"{name} input"
    checked = op.require_shape(seed, value, f"the shape of {value.name}")
    op.checked = False
    return checked


def _result(backward: BackwardPass, value: ir.Value, taken: set[str]) -> ir.Value:
    """The gradient of a target under the name that belongs to it."""
    op = backward.op
    op.prefix = f"{value.name}_grad/"
    grad = backward.total(value)
    if grad is None:
        grad = op.full_like(value, 0.0)
    name = free_name(f"{value.name}_grad", taken)
    if grad.name != name:
        # Another value's gradient is the same tensor, or it comes from outside.
        grad = op.copy(grad)
        for node in op.nodes:
            for other in node.outputs:
                if other.name == name:
                    other.name = f"{name}/total"
        grad.name = name
    grad.type, grad.shape = value.type, value.shape
    return grad
