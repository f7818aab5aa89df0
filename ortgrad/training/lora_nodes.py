"""The nodes of an adapter: how they are written, and how they are found again.

An adapter of a weight W is a pair of tensors A and B and a scale s. Beside a product with W,

    y = x W    becomes    y = x W + (s (x A)) B

The shapes of A and B follow the weight: a weight [in, out] has A [in, rank] and B [rank, out], a weight
[out, in] has A [rank, in] and B [out, rank]. A convolution with the weight [out, in / group, ...] has
A [group * rank, in / group, ...] and B [out, rank, 1, ...].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ortgrad.errors import ModelError
from ortgrad.training.lora_sites import Site, attribute, swap_last, uses

# From this opset on the third input of Gemm is optional.
_OPTIONAL_C = 11
_DEEPEST = 5


@dataclass(frozen=True)
class Adapter:
    """The tensors of an adapter, by the weight to which they belong."""

    weight: str
    dims: tuple[int, ...]
    rank: int
    type: int
    # Whether the weight is [..., in, out], not [..., out, in].
    input_first: bool
    # Of a convolution; 0 for a matrix.
    group: int = 0

    @property
    def a(self) -> str:
        return f"{self.weight}.lora_A"

    @property
    def b(self) -> str:
        return f"{self.weight}.lora_B"

    @property
    def scale(self) -> str:
        return f"{self.weight}.lora_scale"

    @property
    def left(self) -> str:
        """The factor with the second to last axis of the weight."""
        return self.a if self.input_first else self.b

    @property
    def right(self) -> str:
        """The factor with the last axis of the weight."""
        return self.b if self.input_first else self.a

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B."""
        if self.group:
            out, _, *kernel = self.dims
            return (self.group * self.rank, *self.dims[1:]), (out, self.rank, *(1 for _ in kernel))
        *batch, rows, columns = self.dims
        left, right = (*batch, rows, self.rank), (*batch, self.rank, columns)
        return (left, right) if self.input_first else (right, left)

    @property
    def fan_in(self) -> int:
        """The number of products that are summed for an element of A's output."""
        return int(np.prod(self.dims[1:])) if self.group else self.dims[-2 if self.input_first else -1]

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the product of the factors, of the shape of the weight."""
        if not self.group:
            return np.matmul(a, b) if self.input_first else np.matmul(b, a)
        out = self.dims[0]
        first = a.reshape(self.group, self.rank, -1)
        second = b.reshape(self.group, out // self.group, self.rank)
        return np.matmul(second, first).reshape(self.dims)


def adapter_for(site: Site, rank: int) -> Adapter:
    """Return the adapter that a node needs."""
    group = attribute(site.node, "group", 1) if site.is_conv else 0
    if site.is_conv and (group < 1 or site.dims[0] % group):
        raise ModelError(f"{site.described} has {site.dims[0]} output channels in {group} groups")
    first = not site.is_conv and site.input_first
    return Adapter(site.weight, site.dims, rank, site.operand.type, first, group)


def adapter_nodes(
    adapter: Adapter, site: Site, base: str, name: Callable[[str], str], opset: int
) -> list[onnx.NodeProto]:
    """Return the nodes that add the adapter's result to `base`; the last one has no output yet."""
    build = {"Gemm": _gemm, "Conv": _conv}.get(site.node.op_type, _mat_mul)
    return list(build(adapter, site, base, name, opset))


def _node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [output], name=output, **attributes)


def _mat_mul(
    adapter: Adapter, site: Site, base: str, name: Callable[[str], str], opset: int
) -> Iterator[onnx.NodeProto]:
    x, left, right = site.node.input[1 - site.place], adapter.left, adapter.right
    if site.flipped:
        # (L R)' = R' L'
        perm = swap_last(len(adapter.dims))
        turned = [
            _node("Transpose", [factor], name(suffix), perm=perm)
            for factor, suffix in ((right, "lora_left"), (left, "lora_right"))
        ]
        yield from turned
        left, right = (node.output[0] for node in turned)
    if site.place == 0:
        small = _node("MatMul", [right, x], name("lora_A"))
        scaled = _node("Mul", [small.output[0], adapter.scale], name("lora_scaled"))
        large = _node("MatMul", [left, scaled.output[0]], name("lora_B"))
    else:
        small = _node("MatMul", [x, left], name("lora_A"))
        scaled = _node("Mul", [small.output[0], adapter.scale], name("lora_scaled"))
        large = _node("MatMul", [scaled.output[0], right], name("lora_B"))
    yield from (small, scaled, large)
    yield _node("Add", [base, large.output[0]], "")


def _gemm(
    adapter: Adapter, site: Site, base: str, name: Callable[[str], str], opset: int
) -> Iterator[onnx.NodeProto]:
    x, flip = site.node.input[1 - site.place], int(site.flipped)
    left, right = (adapter.right, adapter.left) if flip else (adapter.left, adapter.right)
    transposed = int(attribute(site.node, ("transB", "transA")[site.place], 0))
    alpha = attribute(site.node, "alpha", 1.0)
    # Where the third input is required, any tensor that broadcasts will do: it counts 0 times.
    unused, beta = ([], 1.0) if opset >= _OPTIONAL_C else ([adapter.scale], 0.0)
    if site.place == 0:
        inputs, flags = [right, x, *unused], {"transA": flip, "transB": transposed}
    else:
        inputs, flags = [x, left, *unused], {"transA": transposed, "transB": flip}
    small = _node("Gemm", inputs, name("lora_A"), beta=beta, **flags)
    scaled = _node("Mul", [small.output[0], adapter.scale], name("lora_scaled"))
    yield from (small, scaled)
    if site.place == 0:
        inputs, flags = [left, scaled.output[0], base], {"transA": flip}
    else:
        inputs, flags = [scaled.output[0], right, base], {"transB": flip}
    yield _node("Gemm", inputs, "", alpha=alpha, **flags)


def _conv(
    adapter: Adapter, site: Site, base: str, name: Callable[[str], str], opset: int
) -> Iterator[onnx.NodeProto]:
    small = _node("Conv", [site.node.input[0], adapter.a], name("lora_A"))
    small.attribute.extend(site.node.attribute)
    scaled = _node("Mul", [small.output[0], adapter.scale], name("lora_scaled"))
    large = _node("Conv", [scaled.output[0], adapter.b], name("lora_B"), group=adapter.group)
    yield from (small, scaled, large)
    yield _node("Add", [base, large.output[0]], "")


@dataclass(frozen=True)
class Adapted:
    """A node that has an adapter beside it."""

    site: Site
    adapter: Adapter
    # The nodes of the adapter; the first adds its result to that of the site's node.
    nodes: list[onnx.NodeProto]


def find_adapted(sites: list[Site], model: onnx.ModelProto, opset: int) -> list[Adapted]:
    """Return the nodes that have an adapter; raises ModelError if something else reads its tensors."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    reading = uses(model)
    producers: dict[int, dict[str, onnx.NodeProto]] = {}
    found: list[Adapted] = []
    taken: set[int] = set()
    for site in sites:
        if not {site.weight + suffix for suffix in (".lora_A", ".lora_B", ".lora_scale")} <= shapes.keys():
            continue
        made = producers.setdefault(id(site.graph), {n: v for v in site.graph.node for n in v.output})
        match = _match(site, shapes, reading, made, opset)
        if match is not None:
            found.append(match)
            taken.update(id(node) for node in match.nodes)
    adapters = {adapted.adapter.weight: adapted.adapter for adapted in found}
    for each in found:
        if each.adapter != adapters[each.adapter.weight]:
            raise ModelError(
                f"the nodes of the weight {each.site.weight!r} use its adapter in different ways"
            )
    for adapter in adapters.values():
        if shapes[adapter.scale] not in ((), (1,)):
            raise ModelError(
                f"{adapter.scale!r} has the shape {list(shapes[adapter.scale])}, but is one number"
            )
        for name in (adapter.a, adapter.b, adapter.scale):
            others = [node for node, _ in reading[name] if node is None or id(node) not in taken]
            if others:
                what = "an output of a graph" if others[0] is None else f"read by a {others[0].op_type} node"
                raise ModelError(f"{name!r} is {what} that is not part of an adapter as add_lora writes it")
    return found


def _match(
    site: Site,
    shapes: dict[str, tuple[int, ...]],
    reading: dict[str, list[tuple[onnx.NodeProto | None, int]]],
    producers: dict[str, onnx.NodeProto],
    opset: int,
) -> Adapted | None:
    base = site.node.output[0]
    readers = reading.get(base, [])
    last = readers[0][0] if len(readers) == 1 else None
    if last is None or last is not producers.get(last.output[0]):
        return None
    for adapter in _possible(site, shapes):
        leaves = {name: name for name in (adapter.a, adapter.b, adapter.scale, base, *site.node.input)}
        nodes: list[onnx.NodeProto] = []
        if _expression(last, leaves, producers, nodes) not in _written(adapter, site, leaves, opset):
            continue
        inner = [node.output[0] for node in nodes[1:]]
        seen = next((name for name in inner if len(reading[name]) > 1), None)
        if seen is not None:
            raise ModelError(
                f"{seen!r}, a value within the adapter of {site.weight!r}, is read elsewhere, too"
            )
        return Adapted(site, adapter, nodes)
    return None


def _written(adapter: Adapter, site: Site, leaves: dict[str, str], opset: int) -> Iterator[str]:
    """Yield what `adapter_nodes` computes, as texts: for this opset, and before a conversion to it."""
    for version in (opset, _OPTIONAL_C - 1):
        count = itertools.count()
        nodes = adapter_nodes(adapter, site, site.node.output[0], lambda _, n=count: f"/{next(n)}", version)  # type: ignore[misc]
        yield _expression(nodes[-1], leaves, {node.output[0]: node for node in nodes[:-1]}, [])


def _possible(site: Site, shapes: dict[str, tuple[int, ...]]) -> Iterator[Adapter]:
    """Yield the adapters for the weight of a node that A and B can be by their shapes."""
    a, b = shapes[f"{site.weight}.lora_A"], shapes[f"{site.weight}.lora_B"]
    group = attribute(site.node, "group", 1) if site.is_conv else 0
    for first in (False,) if site.is_conv else (True, False):
        rank = (b[1:2] if site.is_conv else a[-1:] if first else a[-2:-1]) or (0,)
        adapter = Adapter(site.weight, site.dims, rank[0], site.operand.type, first, group)
        if adapter.shapes == (a, b):
            yield adapter


def _expression(
    node: onnx.NodeProto,
    leaves: dict[str, str],
    producers: dict[str, onnx.NodeProto],
    nodes: list[onnx.NodeProto],
    depth: int = 0,
) -> str:
    """Return what a node computes as a text, and collect the nodes that take part."""
    nodes.append(node)
    inputs = []
    for name in node.input:
        inner = producers.get(name)
        if name in leaves or inner is None or depth == _DEEPEST:
            inputs.append(leaves.get(name, "?"))
        else:
            inputs.append(_expression(inner, leaves, producers, nodes, depth + 1))
    attributes = sorted((a.name, str(helper.get_attribute_value(a))) for a in node.attribute)
    return f"{node.domain}.{node.op_type}({', '.join(inputs)}; {attributes})"
