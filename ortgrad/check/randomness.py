"""Detection of random operators, and their replacement by operators with fixed results.

Random models are recognized by their nodes: whether two runs agree depends on seeds, on optimizations and
on chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgrad.errors import ModelError
from ortgrad.graph.protos import BOOL, DOUBLE, FLOAT, all_nodes, copy_of, subgraphs
from ortgrad.graph.serialization import read, write
from ortgrad.passes.inline import inline
from ortgrad.passes.opset import at_minimum_opset

GENERATORS = frozenset(
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
# Random operators that cannot be fixed, because their results are packed or fused with something else.
OTHERS = frozenset(["BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"])
# Larger seeds are marks: `with_fixed_draws` fixes the results of nodes with such a seed.
FIRST_MARK = 1 << 20
PRIME = (1 << 31) - 1
# The default element types; other operators use that of their input.
DEFAULT_TYPES = {"RandomNormal": FLOAT, "RandomUniform": FLOAT, "Multinomial": TensorProto.INT32}


def with_marked_draws(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return the model with a unique seed at every random node, and the names of these nodes.

    A model without random nodes is returned unchanged. The seeds are preserved by differentiation, so the
    draws can be fixed in the same way in the forward model and in the gradient model.
    """
    if not (any(_draws(model.graph, {}, feeds)) or any(_possible(f.node) for f in model.functions)):
        return model, ()
    marked = _plain(model)
    found: list[str] = []
    for node in _draws(marked.graph, {}, feeds):
        if node.op_type in OTHERS:
            raise ModelError(
                f"the forward pass is random, and the results of the {node.op_type} node {_name(node)!r} "
                "cannot be fixed: put an Add and a Dropout in its place"
            )
        kept = [attribute for attribute in node.attribute if attribute.name != "seed"]
        del node.attribute[:]
        mark = FIRST_MARK + len(found)
        seed = helper.make_attribute("seed", mark if node.op_type == "Dropout" else float(mark))
        node.attribute.extend([*kept, seed])
        found.append(f"{node.op_type} {_name(node)}")
    return (marked, tuple(found)) if found else (model, ())


def with_fixed_draws(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which every marked node always gives the same results, with the same distribution.

    The results are computed from the seed and the position with integers. This works for any shape and inside
    subgraphs, and gives the same results in every precision.
    """
    fixed = copy_of(model)
    _fix_graph(fixed.graph)
    return fixed


def training_switches(model: onnx.ModelProto) -> set[str]:
    """Return the names of the training_mode inputs of Dropout nodes in the main graph."""
    return {node.input[2] for node in model.graph.node if node.op_type == "Dropout" and len(node.input) > 2}


def _plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in a supported opset, in which functions with random nodes are inlined."""
    plain = read(model)
    if any(_possible(function.node) for function in model.functions):
        plain = inline(plain, lambda _: True)
    return write(at_minimum_opset(plain), model)


def _possible(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Return whether one of the nodes of a function may be random."""
    return any(
        node.op_type in GENERATORS | OTHERS or (node.op_type == "Dropout" and len(node.input) > 2)
        for node in all_nodes(nodes)
    )


def _draws(
    graph: onnx.GraphProto, outer: Mapping[str, bool], feeds: Mapping[str, np.ndarray]
) -> Iterator[onnx.NodeProto]:
    """Yield the random nodes; a Dropout only if its training_mode is not known to be false."""
    known = dict(outer)
    known.update((t.name, bool(numpy_helper.to_array(t).any())) for t in graph.initializer if _is_switch(t))
    known.update((k, bool(np.any(v))) for k, v in feeds.items() if np.asarray(v).size == 1)
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and _is_switch(node.attribute[0].t):
            known[node.output[0]] = bool(numpy_helper.to_array(node.attribute[0].t).any())
        switched = len(node.input) > 2 and node.input[2] and known.get(node.input[2], True)
        if node.op_type in GENERATORS | OTHERS or (node.op_type == "Dropout" and switched):
            yield node
        for inner in subgraphs(node):
            yield from _draws(inner, known, {})


def _is_switch(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == BOOL and int(np.prod(tensor.dims)) == 1


def _name(node: onnx.NodeProto) -> str:
    return node.name or str(node.output[0])


def _fix_graph(graph: onnx.GraphProto) -> None:
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        for inner in subgraphs(node):
            _fix_graph(inner)
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
        mark = attributes.get("seed", 0.0)
        if node.op_type in GENERATORS | {"Dropout"} and mark >= FIRST_MARK:
            graph.node.extend(_Draw(node, attributes, int(mark)).nodes)
        else:
            graph.node.append(node)


class _Draw:
    """The nodes that replace a random node."""

    def __init__(self, node: onnx.NodeProto, attributes: Mapping[str, Any], seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._node = node
        self._attributes = attributes
        self._seed = seed
        self._prefix = f"{node.output[0] or node.output[1]}.drawn"
        if node.op_type == "Dropout":
            self._dropout()
            return
        draw = {"Bernoulli": self._bernoulli, "Multinomial": self._multinomial}
        normal = node.op_type.startswith("RandomNormal")
        value = draw.get(node.op_type, self._random_normal if normal else self._random_uniform)()
        element = attributes.get("dtype", DEFAULT_TYPES.get(node.op_type))
        if element is None:
            self._add("CastLike", value, node.input[0], output=node.output[0])
        else:
            self._add("Cast", value, output=node.output[0], to=element)

    def _dropout(self) -> None:
        data, ratio, training = [*self._node.input, ""][:3]
        scalar = self._constant(np.zeros(0, np.int64))
        training = self._add("Reshape", training, scalar)
        ratio = self._add("Reshape", ratio, scalar) if ratio else self._constant(np.array(0.5))
        wide = self._add("Cast", ratio, to=DOUBLE)
        drawn = self._add("GreaterOrEqual", self._uniform(self._add("Shape", data)), wide)
        keep = self._add("Or", drawn, self._add("Not", training))
        one, zero = self._constant(np.array(1.0)), self._constant(np.array(0.0))
        scale = self._add("Where", training, self._add("Div", one, self._add("Sub", one, wide)), one)
        kept = self._add("Where", keep, data, self._add("CastLike", zero, data))
        scaled = self._add("Mul", kept, self._add("CastLike", scale, data))
        for source, output in zip((scaled, keep), self._node.output, strict=False):
            if output:
                self._add("Identity", source, output=output)

    def _bernoulli(self) -> str:
        chance = self._add("Cast", self._node.input[0], to=DOUBLE)
        return self._add("Less", self._uniform(self._shape()), chance)

    def _multinomial(self) -> str:
        """Draw all classes with equal probability: no gradient depends on the distribution."""
        batch = self._add("Shape", self._node.input[0], start=0, end=1)
        samples = self._constant(np.array([self._attributes.get("sample_size", 1)]))
        drawn = self._uniform(self._add("Concat", batch, samples, axis=0))
        classes = self._add("Shape", self._node.input[0], start=1, end=2)
        return self._add("Floor", self._add("Mul", drawn, self._add("Cast", classes, to=DOUBLE)))

    def _random_uniform(self) -> str:
        low, high = self._attributes.get("low", 0.0), self._attributes.get("high", 1.0)
        return self._scaled(self._uniform(self._shape()), high - low, low)

    def _random_normal(self) -> str:
        """Draw from a normal distribution with the Box-Muller transform."""
        shape = self._shape()
        radius = self._add("Sqrt", self._scaled(self._add("Log", self._uniform(shape)), -2.0, 0.0))
        turn = self._add("Cos", self._scaled(self._uniform(shape), 2 * np.pi, 0.0))
        normal = self._add("Mul", radius, turn)
        return self._scaled(normal, self._attributes.get("scale", 1.0), self._attributes.get("mean", 0.0))

    def _shape(self) -> str:
        if "shape" in self._attributes:
            return self._constant(np.array(self._attributes["shape"], np.int64))
        return self._add("Shape", self._node.input[0])

    def _scaled(self, value: str, factor: float, shift: float) -> str:
        scaled = self._add("Mul", value, self._constant(np.array(factor)))
        return self._add("Add", scaled, self._constant(np.array(shift)))

    def _uniform(self, shape: str) -> str:
        """Return doubles in (0, 1): a polynomial of the position modulo a prime, squared in three rounds."""
        count = self._add("Size", self._add("ConstantOfShape", shape))
        number = self._add("Range", self._whole(0), count, self._whole(1))
        state = self._modulo(self._add("Add", number, self._whole(self._seed * 7919 + len(self.nodes) * 31)))
        for factor in (48271, 69621, 16807):
            state = self._modulo(self._add("Mul", state, self._whole(factor)))
            state = self._modulo(self._add("Mul", state, state))
            state = self._modulo(self._add("Add", state, number))
        drawn = self._scaled(self._add("Cast", state, to=DOUBLE), 1 / PRIME, 0.5 / PRIME)
        return self._add("Reshape", drawn, shape, allowzero=1)

    def _modulo(self, value: str) -> str:
        return self._add("Mod", value, self._whole(PRIME))

    def _whole(self, number: int) -> str:
        return self._constant(np.array(number, np.int64))

    def _constant(self, array: np.ndarray) -> str:
        return self._add("Constant", value=numpy_helper.from_array(array))

    def _add(self, op_type: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = f"{self._prefix}/{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output or name], name, **attributes))
        return output or name
