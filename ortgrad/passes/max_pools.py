"""Takes the indices from MaxPool nodes whose gradient can be computed from their input."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.max_pool import CLEAR_PADS, max_pool_input_grad
from ortgrad.passes.complete import complete_node

_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def use_inputs_of_max_pools(model: ir.Model) -> ir.Model:
    """Replace MaxPoolGrad nodes that read the indices of a MaxPool, if nobody else reads these."""
    names: Names | None = None
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        gradients = _gradients(node)
        for gradient in gradients:
            names = names or Names.of(model)
            _replace(model, gradient, node, names)
        if gradients:
            # onnxruntime computes the indices if the output has a name.
            node.resize_outputs(1)
            model.opset_imports.setdefault(INTERNAL_DOMAIN, 1)
    return model


def _gradients(node: ir.Node) -> list[ir.Node]:
    """Return the gradient nodes of a MaxPool to replace; none if another node reads the indices."""
    if (node.domain, node.op_type) != ("", "MaxPool") or len(node.outputs) < 2:
        return []
    x, indices = node.inputs[0], node.outputs[1]
    pads = node.attributes.get_string("auto_pad", "NOTSET")
    if x is None or x.dtype not in _TYPES or pads not in CLEAR_PADS or indices.is_graph_output():
        return []
    users = [use.node for use in indices.uses()]
    own = all((u.domain, u.op_type) == ("com.microsoft", "MaxPoolGrad") for u in users)
    # A gradient node in a subgraph runs in another scope than what is made here.
    return users if own and all(user.graph is node.graph for user in users) else []


def _replace(model: ir.Model, gradient: ir.Node, pool: ir.Node, names: Names) -> None:
    """Replace a gradient node by one that reads the input of the pool."""
    graph = gradient.graph
    assert graph is not None
    attributes = [a for a in pool.attributes.values() if a.name in max_pool_input_grad.attributes]
    made = ir.Node(
        INTERNAL_DOMAIN,
        max_pool_input_grad.name,
        [gradient.inputs[0], pool.inputs[0]],
        attributes,
        name=names.fresh(f"{gradient.name}/input"),
    )
    ir.convenience.replace_nodes_and_values(
        graph, gradient, [gradient], [made], gradient.outputs, made.outputs
    )
    complete_node(model, made, max_pool_input_grad, names)
