"""Writes SoftmaxCrossEntropyLoss in fewer operators than onnxruntime, which has no kernel for it."""

from __future__ import annotations

import onnx_ir as ir

from ortgrad.graph.attributes import attributes_of
from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_node
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes, is_operator
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.likelihood import negative_log_likelihood

_LOSS = "SoftmaxCrossEntropyLoss"


def open_losses(model: ir.Model, *, compiled: bool) -> ir.Model:
    """Replace the nodes without weights and ignored labels; the others are left to onnxruntime.

    With `compiled`, an operator with a compiled kernel is used.
    """
    found = [n for n in all_nodes(model.graph) if is_operator(n, _LOSS) and _is_plain(n)]
    names = Names.later(model)
    for node in found:
        op = Recorder(model.opset_imports[""], names, node.name or f"{node.outputs[0].name}")
        scores = node.inputs[0]
        _open(node, op, compiled=compiled and scores is not None and scores.dtype in KERNEL_TYPES)
        for made in op.nodes:
            if made.domain == INTERNAL_DOMAIN:
                become(model, made, negative_log_likelihood, names)
    return model


def _is_plain(node: ir.Node) -> bool:
    given = [value is not None for value in node.inputs]
    return given[:2] == [True, True] and not any(given[2:]) and "ignore_index" not in node.attributes


def _open(node: ir.Node, op: Recorder, *, compiled: bool) -> None:
    scores, label = node.inputs[:2]
    graph, reduction = node.graph, attributes_of(node, op.opset)["reduction"]
    assert graph is not None
    log_prob = op.LogSoftmax(scores, axis=1)
    if reduction != "none" and compiled:
        (loss,) = op.add(
            negative_log_likelihood.name, [log_prob, label], {"reduction": reduction}, domain=INTERNAL_DOMAIN
        )
    else:
        picked = op.GatherElements(log_prob, op.Unsqueeze(label, [1]), axis=1)
        if reduction == "none":
            loss = op.Neg(op.Squeeze(picked, [1]))
        else:
            reduce = op.ReduceMean if reduction == "mean" else op.ReduceSum
            loss = op.Neg(reduce(picked, keepdims=0))
    # An output without a name is absent.
    pairs = [(old, new) for old, new in zip(node.outputs, (loss, log_prob), strict=False) if old.name]
    replace_node(node, list(op.nodes), pairs)
