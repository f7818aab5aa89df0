"""Gradients of If, Loop and Scan."""

from __future__ import annotations

from types import ModuleType

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient


def _subgraphs() -> ModuleType:
    from ortgrad.ops import _subgraphs  # imports onnx-ir, which takes a while

    return _subgraphs


@gradient("If")
def if_gradient(node: ForwardNode) -> Gradients:
    return _subgraphs().if_gradient(node)


@gradient("Loop")
def loop_gradient(node: ForwardNode) -> Gradients:
    return _subgraphs().loop_gradient(node)


@gradient("Scan")
def scan_gradient(node: ForwardNode) -> Gradients:
    return _subgraphs().scan_gradient(node)
