"""Gradient rules of arithmetic: operators that broadcast."""

from __future__ import annotations

from ortgrad.gradient import Node, Slots, gradient


@gradient("Add", broadcasts=True)
def _(node: Node) -> Slots:
    return node.grad(0), node.grad(0)


@gradient("Sub", broadcasts=True)
def _(node: Node) -> Slots:
    return node.grad(0), node.op.Neg(node.grad(0))


@gradient("Mul", broadcasts=True)
def _(node: Node) -> Slots:
    op, dy = node.op, node.grad(0)
    return op.Mul(dy, node.input(1)), op.Mul(dy, node.input(0))


@gradient("Identity")
def _(node: Node) -> Slots:
    return (node.grad(0),)
