"""Moves weights out of subgraphs, functions and Constant nodes, so that they can be fed."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper

from ortgrad.errors import TrainingModelError
from ortgrad.graph.protos import all_graphs, copy_of, keep, replace


def with_weights_outside(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """Return the model, or a copy of it, in which these weights are initializers of the main graph.

    They may be Constant nodes, or in subgraphs or functions; functions are inlined.
    """
    if model.functions:
        from ortgrad.graph.bodies import is_body
        from ortgrad.graph.serialization import read, write  # onnx-ir is slow to import
        from ortgrad.passes.inline import inline

        model = write(inline(read(model), lambda function: not is_body(function)), model)
    wanted = set(names) - {tensor.name for tensor in model.graph.initializer}
    if not wanted:
        return model
    made = copy_of(model)
    # Inner graphs first: nodes that are kept are copied together with the graphs in them.
    for graph in reversed(list(all_graphs(made.graph))):
        moved = _take(graph, wanted, main=graph is made.graph)
        made.graph.initializer.extend(moved)
    main = {tensor.name for tensor in made.graph.initializer}
    missing = [name for name in names if name not in main]
    if missing:
        raise TrainingModelError(
            f"the parameter {missing[0]!r} is neither an initializer nor a constant of the model"
        )
    return made


def _take(graph: onnx.GraphProto, names: Collection[str], *, main: bool) -> list[onnx.TensorProto]:
    """Remove weights from a graph and return them."""
    moved = [] if main else [_copy(t, t.name) for t in graph.initializer if t.name in names]
    if moved:
        keep(graph.initializer, lambda tensor: tensor.name not in names)
    kept = []
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and value is not None and node.output[0] in names:
            moved.append(_copy(value, node.output[0]))
        else:
            kept.append(node)
    taken = {tensor.name for tensor in moved}
    for output in graph.output:
        if output.name in taken:
            # An output must be computed in its graph.
            copy = f"{output.name}/copy"
            kept.append(helper.make_node("Identity", [output.name], [copy], name=copy))
            output.name = copy
    if moved:
        replace(graph.node, kept)
    return moved


def _copy(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    copy = copy_of(tensor)
    copy.name = name
    return copy
