"""Checks of single nodes, each as a model of its own, on the values that it receives in the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.check.comparison import Clock
from ortgrad.check.reachable import PathNode
from ortgrad.check.result import GradientCheck, Row, unjudged
from ortgrad.check.running import values_of
from ortgrad.check.verdicts import TIME_OUT
from ortgrad.errors import OrtgradError
from ortgrad.graph.feeds import Arrays, typed
from ortgrad.graph.loading import one_line
from ortgrad.graph.protos import dependencies
from ortgrad.pipelines.stops import quiet_stops


def intermediate_values(proto: onnx.ModelProto, marked: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Return all values in the main graph of `marked`, computed by `proto`, whose random nodes are fixed."""
    produced = [name for node in marked.graph.node for name in node.output if name]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    return {**weights, **typed(proto, feeds), **values_of(proto, feeds, produced)}


def check_nodes(
    items: Sequence[PathNode],
    proto: onnx.ModelProto,
    values: Arrays,
    check: Callable[..., GradientCheck],
    clock: Clock,
    report: Callable[[str], None],
) -> list[Row]:
    """Return a row for every node, from `check`, which is check_gradients with its options.

    Nodes that differ only in the values that they receive are of one kind. One node of each kind is checked
    first, because time may run out. `report` is called with the name of every node when it is checked.
    """
    kinds: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        kinds.setdefault(_kind(item, values), []).append(i)
    rows: dict[int, Row] = {}
    # The first of every kind, then the second, and so on.
    for _, i in sorted((place, i) for kind in kinds.values() for place, i in enumerate(kind)):
        if clock.left > 0:
            rows[i] = _check_node(items[i], proto, values, check, clock.left)
        else:
            rows[i] = unjudged(_name(items[i]), TIME_OUT)
        report(rows[i].name)
    return [rows[i] for i in range(len(items))]


def _kind(item: PathNode, values: Arrays) -> Hashable:
    """Return a key that is equal for nodes that differ only in the elements of their operands."""
    node = item.node
    shapes = tuple((np.shape(values[k]), str(getattr(values[k], "dtype", ""))) for k in dependencies(node))
    attributes = tuple(sorted(attribute.SerializeToString() for attribute in node.attribute))
    return node.domain, node.op_type, attributes, shapes, len(item.wrt)


def _name(item: PathNode) -> str:
    return f"{item.node.op_type} {item.node.name or item.node.output[0]}"


def _check_node(
    item: PathNode,
    proto: onnx.ModelProto,
    values: Arrays,
    check: Callable[..., GradientCheck],
    seconds: float,
) -> Row:
    """Return the worst row of one node."""
    node, name = item.node, _name(item)
    if not all(isinstance(values[k], np.ndarray) for k in (*dependencies(node), *item.of)):
        return unjudged(name, "it does not work on tensors alone")
    model = _model_of(item, proto, values)
    feeds = {value.name: values[value.name] for value in model.graph.input}
    try:
        with quiet_stops():
            result = check(model, feeds, wrt=item.wrt, of=item.of, seconds=seconds)
    except OrtgradError as error:
        return unjudged(name, one_line(error))
    wrong = [row for row in result.rows if row.wrong]
    judged = [row for row in result.rows if row.judged]
    worst = max(wrong or judged or result.rows, key=lambda row: row.error / row.tolerance)
    note = f"towards {worst.name!r}" if wrong else worst.note
    return Row(name, worst.error, worst.tolerance, note, worst.judged)


def _model_of(item: PathNode, proto: onnx.ModelProto, values: Arrays) -> onnx.ModelProto:
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = numpy_helper.from_array(values[node.output[0]], node.output[0])
    declared = {value.name for value in proto.graph.input}
    reads = dependencies(item.node)
    fixed = [k for k in reads if k in constants and k not in item.wrt and k not in declared]
    graph = helper.make_graph(
        [item.node],
        "node",
        [_info(k, values[k]) for k in reads if k not in fixed],
        [_info(k, values[k]) for k in item.node.output if k],
        [constants[k] for k in fixed],
    )
    return helper.make_model(
        graph, opset_imports=proto.opset_import, ir_version=proto.ir_version, functions=proto.functions
    )


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
