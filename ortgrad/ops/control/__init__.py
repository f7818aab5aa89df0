"""Gradients of If, Loop and Scan."""

from __future__ import annotations

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient


@gradient("If", "Loop", "Scan")
def control_gradient(node: ForwardNode) -> Gradients:
    from ortgrad.ops.control._gradients import GRADIENTS  # imports onnx-ir, which takes a while

    return GRADIENTS[node.op_type](node)
