"""The gradients of a training model in the form of onnxruntime-training 1.19.2: portable nodes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from ortgrad.dialects.training import ACCUMULATOR
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.serialization import write
from ortgrad.operators.declaration import DOMAIN
from ortgrad.passes.portable import make_portable
from ortgrad.training.differentiation import differentiate
from ortgrad.training.forms import unbiased_excess, use_internal_batch_norm


def with_gradients(forward: onnx.ModelProto, wrt: Sequence[str], loss: str) -> onnx.ModelProto:
    """Return a forward model in training mode, with the gradients of the loss as its last outputs."""
    finish = (use_internal_batch_norm, _accumulate_variances, make_portable)
    return write(differentiate(forward, wrt, loss, finish=finish), forward)


def _accumulate_variances(model: ir.Model) -> ir.Model:
    """Correct in place the running variances of BatchNormInternal, which are biased; PyTorch's are not."""
    names = Names.of(model)
    for node in list(model.graph):
        if node.op_type != "BatchNormInternal" or not _is_fed(node.inputs[4]):
            continue
        op = Recorder(model.opset_imports[""], names, f"{node.name or node.outputs[0].name}")
        running, later = node.outputs[2], list(node.outputs[2].uses())
        more = unbiased_excess(op, node)
        results = op.add(ACCUMULATOR, [running, more], outputs=2 if later else 1, domain=DOMAIN)
        model.graph.insert_after(node, op.nodes)
        for use in later:
            # The node of the same layer, applied again, reads the sum.
            use.node.replace_input_with(use.idx, results[1])
    return model


def _is_fed(value: ir.Value | None) -> bool:
    """Return whether a running statistic comes from an input of the graph, perhaps through other nodes."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in ("BatchNormInternal", ACCUMULATOR):
            return False
        value = node.inputs[4 if node.op_type == "BatchNormInternal" else 0]
    return value is not None and value.is_graph_input() and not value.is_initializer()
