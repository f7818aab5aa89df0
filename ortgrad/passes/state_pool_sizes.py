"""Corrects wrong sizes of pools that onnxruntime infers when it loads a model (see shapes/pool_sizes)."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes
from ortgrad.shapes.pool_sizes import POOLS


def state_pool_sizes(model: ir.Model) -> ir.Model:
    """Add a Reshape to the actual size after pools whose size onnxruntime infers wrongly.

    onnxruntime refuses to load a model in which the wrong size meets a gradient of the right one.
    """
    if model.opset_imports[""] >= _FIRST_RIGHT_OPSET:
        return model
    names = Names.later(model)
    for node in list(all_nodes(model.graph)):
        if node.op_type not in POOLS or node.domain or not _is_inferred_wrong(node):
            continue
        op = Recorder(model.opset_imports[""], names, f"{node.outputs[0].name}/size")
        for value in node.outputs:
            if not value.uses() and not value.is_graph_output():
                continue
            assert value.shape is not None
            # A 0 keeps the length of the axis.
            stated = op.Reshape(value, [0, 0, *value.shape[2:]])
            stated.type, stated.shape = value.type, value.shape
            reshape = stated.producer()
            for use in list(value.uses()):
                if use.node is not reshape:
                    use.node.replace_input_with(use.idx, stated)
            graph = value.graph
            assert isinstance(graph, ir.Graph)
            if value.is_graph_output():
                graph.outputs[:] = [stated if output is value else output for output in graph.outputs]
                value.name, stated.name = stated.name, value.name
        assert node.graph is not None
        node.graph.insert_after(node, op.nodes)
    return model


def _is_inferred_wrong(node: ir.Node) -> bool:
    """Return whether onnx may infer other sizes than those of the node's output."""
    x, y = node.inputs[0], node.outputs[0]
    if not node.attributes.get_int("ceil_mode", 0) or x is None or x.shape is None or y.shape is None:
        return False
    sizes, counts = list(x.shape)[2:], list(y.shape)[2:]
    if not all(isinstance(size, int) for size in (*sizes, *counts)):
        return False
    auto_pad = node.attributes.get_string("auto_pad", "NOTSET")
    if auto_pad.startswith("SAME"):
        return True
    rank, given = len(sizes), node.attributes.get_ints
    kernel, strides, dilations = (
        given(name, [1] * rank) for name in ("kernel_shape", "strides", "dilations")
    )
    pads = [0] * 2 * rank if auto_pad == "VALID" else given("pads", [0] * 2 * rank)
    inferred = [
        -(-(n + head + tail - (k - 1) * d - 1) // s) + 1
        for n, head, tail, k, d, s in zip(
            sizes, pads[:rank], pads[rank:], kernel, dilations, strides, strict=True
        )
    ]
    return inferred != counts


_FIRST_RIGHT_OPSET = 22
