"""Replaces ONNX's Gradient operator by the nodes that compute the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from ortgrad.autodiff.backward import BackwardPass, list_failures
from ortgrad.dialects.optimizers import PREVIEW_TRAINING
from ortgrad.errors import NodeError, UnsupportedGradientError
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes, nodes_before
from ortgrad.passes.complete import complete
from ortgrad.passes.expand_unsupported import expand_unsupported
from ortgrad.shapes.inference import infer_types
from ortgrad.shapes.proven_shapes import infer_proven_shapes


def expand_gradient_operator(model: ir.Model) -> ir.Model:
    """Replace every Gradient node of the main graph.

    A Gradient node returns the gradients of the tensor `y` with respect to the tensors `xs`. The part of the
    graph between `xs`, `zs` and `y` is evaluated on the node's inputs. If `y` is not a scalar, its sum is
    differentiated.
    """
    if not any(_is_gradient(node) for node in model.graph):
        return model
    model.graph.sort()
    declared = infer_proven_shapes(model)
    # One at a time, because `y` may be a result of another Gradient node.
    while (node := next((n for n in model.graph if _is_gradient(n)), None)) is not None:
        infer_types(model)
        try:
            _expand(model, node)
        except NodeError as error:
            raise NodeError(f"Gradient node {node.name!r}: {error}") from error
    declared.restore_borders()
    RemoveUnusedOpsetsPass()(model)
    return complete(model, built=True)


def _is_gradient(node: ir.Node) -> bool:
    return node.op_type == "Gradient" and node.domain == PREVIEW_TRAINING


def _expand(model: ir.Model, node: ir.Node) -> None:
    if "xs" not in node.attributes or "y" not in node.attributes:
        raise NodeError("attributes xs and y are required")
    xs = list(node.attributes["xs"].as_strings())
    zs = list(node.attributes["zs"].as_strings()) if "zs" in node.attributes else []
    y = node.attributes["y"].as_string()
    if len(node.inputs) != len(xs) + len(zs) or len(node.outputs) > len(xs):
        raise NodeError(
            f"it has {len(node.inputs)} inputs and {len(node.outputs)} outputs, "
            f"but xs and zs name {len(xs)} and {len(zs)} tensors"
        )
    _named(model.graph, [*xs, *zs, y])
    expand_unsupported(model, xs, [y])
    graph = model.graph
    values = _named(graph, [*xs, *zs, y])
    fed = {values[n]: v for n, v in zip([*xs, *zs], node.inputs, strict=True) if v is not None}
    if len(fed) != len(xs) + len(zs):
        raise NodeError("an input is missing")
    nodes = _between(graph, fed, values[y])
    if any(_is_gradient(inner) for inner in nodes):
        raise NodeError(f"y={y!r} depends on a Gradient node that comes later")
    names = Names.of(model)
    copies: list[ir.Node] = []
    mapping = {name: value for name, value in fed.items() if name is not value}
    if mapping:
        copies = [_copy(inner, mapping, names) for inner in nodes]
    op = Recorder(model.opset_imports[""], names)
    targets = [fed[values[name]] for name in xs]
    backward = BackwardPass(op, copies or nodes, targets)
    target = mapping.get(values[y], values[y])
    backward.seed(target, op.full_like(target, 1.0))
    backward.run()
    if backward.failures:
        raise UnsupportedGradientError(list_failures(backward.failures, model.opset_imports))
    results: list[ir.Value] = []
    for value in targets:
        grad = backward.total(value) or op.full_like(value, 0.0)
        results.append(op.copy(grad) if grad in results else grad)
    made = [*copies, *op.nodes]
    wanted = [(old, new) for old, new in zip(node.outputs, results, strict=False) if old.name]
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], made, [old for old, _ in wanted], [new for _, new in wanted]
    )


def _named(graph: ir.Graph, names: Iterable[str]) -> dict[str, ir.Value]:
    values = [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]
    known = {value.name: value for value in values}
    for name in names:
        if name not in known:
            raise NodeError(f"there is no tensor {name!r} in the graph")
    return {name: known[name] for name in names}


def _between(graph: ir.Graph, sources: Iterable[ir.Value], y: ir.Value) -> list[ir.Node]:
    """Return the nodes that compute `y` from the sources, in topological order."""
    return nodes_before(graph, [y], set(sources))[::-1]


def _copy(node: ir.Node, mapping: dict[ir.Value, ir.Value], names: Names) -> ir.Node:
    """Return a copy of the node with its inputs replaced by `mapping`, and add its outputs to `mapping`."""
    attributes: list[ir.Attr] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner = attribute.as_graph().clone(allow_outer_scope_values=True)
            names.rename(inner)
            for reader in all_nodes(inner):
                _replace(reader, mapping)
            attribute = ir.AttrGraph(attribute.name, inner)
        attributes.append(attribute)
    copy = ir.Node(
        node.domain,
        node.op_type,
        node.inputs,
        attributes,
        overload=node.overload,
        num_outputs=len(node.outputs),
        name=names.fresh(node.name or f"{node.outputs[0].name}"),
    )
    _replace(copy, mapping)
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.name, new.type, new.shape = names.fresh(old.name) if old.name else "", old.type, old.shape
        mapping[old] = new
    return copy


def _replace(node: ir.Node, mapping: Mapping[ir.Value, ir.Value]) -> None:
    for i, value in enumerate(node.inputs):
        if value is not None and value in mapping:
            node.replace_input_with(i, mapping[value])
