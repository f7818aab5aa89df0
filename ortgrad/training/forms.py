"""The forms of operators that behave differently in training and in evaluation."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.operators.declaration import DOMAIN
from ortgrad.passes.tidy import remove_unused


def in_training(model: ir.Model, untrained: Collection[str] = ()) -> ir.Model:
    """Put BatchNormalization and Dropout in training mode, in a model after the opening passes.

    The running statistics of each BatchNormalization of the main graph become outputs of the graph. Those
    with an output in `untrained` must be in evaluation mode already; those in subgraphs get into it.
    """
    graph, names = model.graph, Names.of(model)
    latest: dict[ir.Value, ir.Value] = {}
    for node in list(ir.traversal.RecursiveGraphIterator(graph)):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Dropout":
            _switch_on(node, names)
        elif node.op_type == "BatchNormalization" and node.outputs[0].name not in untrained:
            # Nothing returns the statistics of those in branches and loops.
            node.attributes.add(ir.AttrInt64("training_mode", int(node.graph is graph)))
            if node.graph is graph:
                _return_statistics(graph, node, names, latest)
            else:
                node.resize_outputs(1)
    return model


def _switch_on(node: ir.Node, names: Names) -> None:
    """Set the training mode of a Dropout, unless the graph computes it or it is an input."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is not None and (mode.is_graph_input() or ir.convenience.get_const_tensor(mode) is None):
        return
    true = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(True)))])
    true.name = true.outputs[0].name = names.fresh(f"{node.name or node.outputs[0].name}/training_mode")
    assert node.graph is not None
    node.graph.insert_before(node, true)
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, true.outputs[0])


def _return_statistics(
    graph: ir.Graph, node: ir.Node, names: Names, latest: dict[ir.Value, ir.Value]
) -> None:
    """Give a node its outputs for the running statistics; `latest` are the ones of nodes before it."""
    node.resize_outputs(3)
    for i, output in enumerate(node.outputs[1:], 1):
        old = node.inputs[i + 2]
        assert old is not None
        if old in latest:
            # A layer that is applied twice updates its statistics twice.
            node.replace_input_with(i + 2, latest[old])
        output.name = output.name or names.fresh(f"{old.name}.{node.outputs[0].name}")
        output.type, output.shape = old.type, old.shape
        latest[old] = output
        if output not in graph.outputs:
            graph.outputs.append(output)


def use_internal_batch_norm(model: ir.Model) -> ir.Model:
    """Replace BatchNormalization in training mode by BatchNormInternal.

    Its further outputs, the mean and inverse standard deviation of the batch, serve the gradients. Its
    running variance is the biased one, see `unbiased_excess`.
    """
    graph, names = model.graph, Names.of(model)
    gradients = [node for node in graph if node.op_type == "BatchNormalizationGrad"]
    for node in [node for node in graph if _is_training(node)]:
        node.domain, node.op_type, node.version = DOMAIN, "BatchNormInternal", None
        model.opset_imports.setdefault(DOMAIN, 1)
        node.resize_outputs(5)
        mean, inverse = node.outputs[3:]
        for output, what in ((mean, "saved_mean"), (inverse, "saved_inv_std")):
            output.name = names.fresh(f"{node.outputs[0].name}/{what}")
            output.type, output.shape = node.outputs[1].type, node.outputs[1].shape
        for gradient in gradients:
            if gradient.inputs[1] is node.inputs[0] and gradient.inputs[2] is node.inputs[1]:
                gradient.replace_input_with(3, mean)
                gradient.replace_input_with(4, inverse)
    return remove_unused(model)


def _is_training(node: ir.Node) -> bool:
    mode = node.attributes.get("training_mode")
    return (
        node.op_type == "BatchNormalization" and not node.domain and mode is not None and mode.as_int() == 1
    )


def unbiased_excess(op: Recorder, node: ir.Node) -> ir.Value:
    """Return what PyTorch's running variance has more than that of a BatchNormInternal.

    PyTorch's has n / (n - 1) times the variance of a batch of n values.
    """
    epsilon, momentum = (
        node.attributes[name].as_float() if name in node.attributes else default
        for name, default in (("epsilon", 1e-5), ("momentum", 0.9))
    )
    x, inverse = node.inputs[0], node.outputs[4]
    with op.arithmetic():
        count = op.Div(op.Size(x), op.Size(inverse))
        others = op.CastLike(op.Max(op.Sub(count, 1), 1), inverse)
        variance = op.Max(op.Reciprocal(inverse * inverse) - epsilon, 0.0)
        more: ir.Value = variance * ((1 - momentum) / others)
    return more
