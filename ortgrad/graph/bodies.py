"""Recording of gradient operators' bodies, in place of a node or as a model-local function."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.errors import NodeError
from ortgrad.graph.contract_checks import record_comparisons
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes
from ortgrad.operators.call import Call
from ortgrad.operators.declaration import find_operator


def record_body(
    op: Recorder, call: Call, inputs: Sequence[ir.Value | None], label: str = ""
) -> list[ir.Value | None]:
    """Record the operator's body on `op`; returns one value per output, None for an unwanted one.

    For a node that build_gradient_model did not make, comparisons of the inputs' shapes are recorded as well;
    `label` identifies the node in the error of a failed comparison.
    """
    operator = call.operator
    if operator.body is None:
        raise NodeError(f"{operator.name} has no body in standard ONNX operators")
    operands = [v if real else None for v, real in zip(inputs, call.present, strict=True)]
    try:
        if call.built:
            return _wanted(call, _body(op, call, operands))
        with op.checking(label or operator.name):
            what, failures = call.contract.text, record_comparisons(op, call.contract, operands)
            # Every part of the body that depends on this input runs after the comparisons.
            main, value = next(
                (i, v) for i, v in enumerate(operands) if v is not None and operator.takes_floats(i)
            )
            checked = operands[main] = op.require(value, failures, what)
            outputs = _wanted(call, _body(op, call, operands))
            return [
                v if v is None or not failures or _depends(v, checked) else op.require(v, failures, what)
                for v in outputs
            ]
    except ValueError as error:
        raise NodeError(f"{operator.name} node {call.node!r}: {error}") from error


def _body(op: Recorder, call: Call, operands: Sequence[ir.Value | None]) -> Any:
    assert call.operator.body is not None
    extra = {"wanted": call.wanted} if call.operator.has_optional_outputs else {}
    with op.arithmetic():
        return call.operator.body(op, *operands, **call.attributes, **extra)


def _wanted(call: Call, result: Any) -> list[ir.Value | None]:
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    return [value if want else None for value, want in zip(results, call.wanted, strict=True)]


def _depends(value: ir.Value, on: ir.Value) -> bool:
    """Return whether a recorded value is computed from another."""
    seen: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if value is on:
            return True
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        graphs = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
        inner = (used for graph in graphs for used in all_nodes(graph))
        waiting += [v for user in (node, *inner) for v in user.inputs if v is not None]
    return False


def make_function(call: Call, inputs: Sequence[ir.Value | None], opset: int) -> ir.Function:
    """Return the body as a model-local function whose overload is a digest of its contents."""
    operator = call.operator
    op = Recorder(opset, Names(parameter.name for parameter in (*operator.inputs, *operator.outputs)))
    arguments = [
        ir.Value(
            name=parameter.name,
            type=value.type if value is not None else None,
            shape=value.shape if value is not None else None,
        )
        for parameter, value in zip(operator.inputs, inputs, strict=True)
    ]
    outputs = []
    for parameter, value in zip(operator.outputs, record_body(op, call, arguments), strict=True):
        # Each output of a function must be the output of a different node in it.
        output = op.copy(value if value is not None else _nothing(op, parameter.type, arguments, call))
        output.name = parameter.name
        outputs.append(output)
    graph = ir.Graph(arguments, outputs, nodes=op.nodes, opset_imports={"": opset})
    for argument in arguments:
        # Nodes with equal bodies share one function, so it must not hold the types of one node's inputs.
        argument.type = argument.shape = None
    function = ir.Function(operator.domain, operator.name, graph=graph, attributes=())
    for node in function:
        for output in node.outputs:
            output.type = output.shape = None
    for inner in function.graph.subgraphs():
        for value in (*inner.inputs, *(value for node in inner for value in node.outputs)):
            if value.type is None:
                value.shape = None  # onnx-ir warns if it has to write a shape without a type
    digest = hashlib.sha256(ir.to_proto(function).SerializeToString(deterministic=True)).hexdigest()
    function.overload = digest[:12]
    return function


def is_body(function: ir.Function) -> bool:
    """Return whether the function has the name and overload of one that `make_function` made."""
    return bool(find_operator(function.name, function.domain) and function.overload)


def _nothing(op: Recorder, type_: str, arguments: Sequence[ir.Value], call: Call) -> ir.Value:
    """Return an empty tensor for an output that is not used."""
    for parameter, argument in zip(call.operator.inputs, arguments, strict=True):
        if parameter.type == type_:
            return op.CastLike(np.zeros(0, np.float32), argument)
    return op.constant(np.zeros(0, np.dtype(type_)))
