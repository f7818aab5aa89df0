"""Replaces nodes without a gradient rule by what computes them in other operators.

That is the body of a gradient operator, a definition, or the function of ONNX's schema.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ortgrad.autodiff.backward import REFUSED
from ortgrad.autodiff.defined_nodes import put_definition
from ortgrad.autodiff.paths import nodes_between
from ortgrad.autodiff.rules import find_rule
from ortgrad.errors import NodeError
from ortgrad.graph.gradient_nodes import gradient_nodes
from ortgrad.graph.names import Names
from ortgrad.graph.schema_functions import open_schema_function
from ortgrad.graph.traversal import all_nodes
from ortgrad.passes.complete import complete
from ortgrad.passes.expand import expand
from ortgrad.shapes.defined_types import infer_defined_types


def expand_unsupported(model: ir.Model, targets: Iterable[str], outputs: Iterable[str]) -> ir.Model:
    """Replace nodes between the values of these names that have a body but no gradient rule.

    The new values keep the names of those that they replace.
    """
    names = set(targets), set(outputs)
    refused: set[ir.Node] = set()
    # A body may contain nodes that have to be replaced in turn.
    while _expand_once(model, *names, refused):
        infer_defined_types(model)
    return model


def _expand_once(model: ir.Model, targets: set[str], outputs: set[str], refused: set[ir.Node]) -> bool:
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs)]
    wrt = [value for value in values if value.name in targets]
    of = {value for value in values if value.name in outputs}
    chosen = {n for n in nodes_between(graph, wrt, of) if find_rule(n.op_type, n.domain) is None} - refused
    gradients = {node for node, _ in gradient_nodes(model) if node in chosen}
    if gradients:
        model = expand(complete(model), lambda node, _: node in gradients)
    opened = bool(gradients)
    names = Names.of(model)
    # In the order of the graph, so that the same names are given in every run.
    for node in [node for node in all_nodes(model.graph) if node in chosen - gradients]:
        try:
            done = put_definition(node, model.opset_imports[""], names) or open_schema_function(
                node, model.opset_imports, names
            )
        except NodeError as error:
            done, node.meta[REFUSED] = False, str(error)
        if done:
            opened = True
        else:
            # The backward pass reports it.
            refused.add(node)
    return opened
