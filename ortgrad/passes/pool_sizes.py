"""The sizes of pools with ceil_mode.

Up to opset 21, onnx's shape inference counts a last window that begins behind the input and its head padding,
where it would see nothing but padding. onnxruntime leaves it out when it runs the pool, but infers the same
when it loads a model.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from ortgrad.bodies import Ops
from ortgrad.names import Names
from ortgrad.validate import subgraphs

_POOLS = ("MaxPool", "AveragePool", "LpPool")
_FIRST_RIGHT_OPSET = 22


def round_sizes_down(graph: onnx.GraphProto) -> None:
    """Rewrite the pools of a graph and its subgraphs for the inference of their sizes, in place."""
    for node in graph.node:
        if node.op_type in _POOLS and node.domain in ("", "ai.onnx"):
            _round_down(node)
        for inner in subgraphs(node):
            round_sizes_down(inner)


def _round_down(node: onnx.NodeProto) -> None:
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
    if not given.get("ceil_mode"):
        return
    auto_pad = given.get("auto_pad", b"NOTSET")
    if auto_pad in (b"SAME_UPPER", b"SAME_LOWER"):
        # It says the sizes, with ceil_mode too.
        _replace(node, ceil_mode=0)
        return
    kernel = given.get("kernel_shape", [])
    rank = len(kernel)
    strides, dilations = (given.get(name) or [1] * rank for name in ("strides", "dilations"))
    pads = (given.get("pads") if auto_pad == b"NOTSET" else None) or [0] * 2 * rank
    if not rank or len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank:
        return  # for onnx to refuse
    # Windows begin in the input or its head padding, and up to a stride behind the last one that fits: the
    # tail padding is what the last of them needs.
    needed = [(k - 1) * dilation for k, dilation in zip(kernel, dilations, strict=True)]
    tails = [tail + stride - 1 for tail, stride in zip(pads[rank:], strides, strict=True)]
    if all(tail <= need for tail, need in zip(tails, needed, strict=True)):
        return  # onnx infers it right, for an input that is too small as well
    tails = [min(*pair) for pair in zip(tails, needed, strict=True)]
    _replace(node, ceil_mode=0, auto_pad="NOTSET", pads=[*pads[:rank], *tails])


def _replace(node: onnx.NodeProto, **attributes: Any) -> None:
    kept = [a for a in node.attribute if a.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(onnx.helper.make_attribute(*item) for item in attributes.items())


def state_sizes(model: ir.Model) -> None:
    """Have onnxruntime infer the right sizes where it would not, by a Reshape that changes nothing, in place.

    It refuses to load a model in which what it infers meets the gradient of another size.
    """
    if model.opset_imports[""] >= _FIRST_RIGHT_OPSET:
        return
    names: Names | None = None
    for node in list(model.graph.all_nodes()):
        if node.op_type not in _POOLS or node.domain or not _is_inferred_wrong(node):
            continue
        names = names or Names.of(model)
        op = Ops(model.opset_imports[""], names, f"{node.outputs[0].name}/size")
        for value in node.outputs:
            if not value.uses() and not value.is_graph_output():
                continue
            assert value.shape is not None
            # A zero stands for the length as it is.
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


def _is_inferred_wrong(node: ir.Node) -> bool:
    """Whether onnx may infer other sizes than those that the values have."""
    x, y = node.inputs[0], node.outputs[0]
    ceil_mode = node.attributes.get("ceil_mode")
    if ceil_mode is None or not ceil_mode.as_int() or x is None or x.shape is None or y.shape is None:
        return False
    sizes, counts = list(x.shape)[2:], list(y.shape)[2:]
    if not all(isinstance(size, int) for size in (*sizes, *counts)):
        return False
    auto_pad = node.attributes["auto_pad"].as_string() if "auto_pad" in node.attributes else "NOTSET"
    if auto_pad.startswith("SAME"):
        return True
    rank = len(sizes)
    kernel, strides, dilations, pads = (
        list(node.attributes[name].as_ints()) if name in node.attributes else [default] * length
        for name, default, length in (
            ("kernel_shape", 1, rank),
            ("strides", 1, rank),
            ("dilations", 1, rank),
            ("pads", 0, 2 * rank),
        )
    )
    if auto_pad == "VALID":
        pads = [0] * 2 * rank
    inferred = [
        -(-(n + head + tail - (k - 1) * d - 1) // s) + 1
        for n, head, tail, k, d, s in zip(
            sizes, pads[:rank], pads[rank:], kernel, dilations, strides, strict=True
        )
    ]
    return inferred != counts
