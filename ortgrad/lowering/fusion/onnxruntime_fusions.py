"""Element-wise nodes that onnxruntime itself computes together with their neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortgrad.graph.patterns import Operators, Pattern, Term
from ortgrad.lowering.fusion.fusable import read_constant

# Activations that onnxruntime computes as part of a convolution or a product of matrices. It does the same
# with Sigmoid, but the gradient needs it more precisely (see ortgrad.lowering.fusion.expressions).
_ACTIVATIONS = ("Relu", "Tanh", "LeakyRelu", "Clip", "HardSigmoid")


def _activated(op: Operators, y: Term, low: Term, high: Term) -> Term:
    return op.one_of(*_ACTIVATIONS)(y, op.either(low, None), op.either(high, None))


def _convolution(op: Operators, x: Term, w: Term, b: Term, z: Term, low: Term, high: Term) -> Term:
    y = op.Conv(x, w, op.either(b, None))
    total = op.Add(y, z)
    return op.either(_activated(op, op.either(total, y), low, high), total)


def _product(op: Operators, a: Term, b: Term, c: Term, low: Term, high: Term) -> Term:
    return _activated(op, op.Gemm(a, b, op.either(c, None)), low, high)


def _scaled_product(op: Operators, a: Term, b: Term, factor: Term) -> Term:
    scaled = op.one_of("Mul", "Div")
    return op.either(
        scaled(op.MatMul(a, b), factor), op.MatMul(scaled(a, factor), b), op.MatMul(a, scaled(b, factor))
    )


def _normalization(
    op: Operators, x: Term, two: Term, epsilon: Term, scale: Term, bias: Term, axes: Term, again: Term
) -> Term:
    """(X - mean) / sqrt(variance + epsilon) * scale + bias"""
    difference = op.Sub(x, op.ReduceMean(x, op.either(axes, None)))
    known = op.either(difference, op.Cast(difference))
    variance = op.ReduceMean(op.either(op.Pow(known, two), op.Mul(known, known)), op.either(again, None))
    quotient = op.Div(known, op.Sqrt(op.Add(variance, epsilon)))
    y = op.either(quotient, op.Cast(quotient))
    scaled = op.Mul(y, scale)
    return op.either(y, scaled, op.Add(scaled, bias))


_FUSIONS = [Pattern(each) for each in (_convolution, _product, _scaled_product, _normalization)]
_BIASED_PRODUCT = Pattern(lambda op, a, b, bias: op.Add(op.MatMul(a, b), bias))


def left_to_onnxruntime(nodes: Sequence[ir.Node]) -> set[ir.Node]:
    """Return the nodes that onnxruntime merges into others, and those into which it merges them."""
    kept: set[ir.Node] = set()
    for pattern in _FUSIONS:
        for match in pattern.find(nodes):
            factor = match.values.get("factor")
            if match.is_private and (factor is None or read_constant(factor) is not None):
                kept.update(match.nodes)
    for match in _BIASED_PRODUCT.find(nodes):
        bias = match.values["bias"]
        if match.is_private and bias.shape is not None and len(bias.shape) == 1:
            kept.update(match.nodes)
    return kept
