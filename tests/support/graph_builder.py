"""A graph that grows node by node, with every value known.

Each entry of OPERATORS picks values of the graph so far, brings them into a shape and a range that its
operator takes, and adds the operator. Every node is evaluated as it is added, so shapes and ranges are known.
Models are made in float64; `in_float32` makes the same model in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.random import Generator
from onnx import TensorProto, helper, numpy_helper

from support.reference_ops import evaluate_node

OPSETS = (17, 18, 20, 21, 23, 24)
MAX_SIZE = 160  # elements of a value; differences are taken in Python
MAX_DEPTH = 2  # control flow in control flow
Arrays = dict[str, np.ndarray]


@dataclass(eq=False)
class Value:
    """A tensor of the graph, and what it is for the inputs that the graph was grown on."""

    name: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def rank(self) -> int:
        return self.array.ndim

    @property
    def is_float(self) -> bool:
        return self.array.dtype == np.float64


@dataclass
class RandomGraph:
    """A float64 model, values for its inputs, and what to differentiate."""

    model: onnx.ModelProto
    feeds: Arrays
    wrt: list[str]
    of: list[str]

    @property
    def operators(self) -> set[str]:
        return {operator_name(node) for node in all_nodes(self.model.graph)}


def operator_name(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from all_nodes(attribute.g)


class Names:
    """Names as exporters and people give them: numbers, paths, and some that look like ours."""

    def __init__(self, rng: Generator, taken: set[str] | None = None) -> None:
        self._rng = rng
        self.style = str(rng.choice(["plain", "path", "dots", "number", "grad", "mixed"]))
        self.taken = taken if taken is not None else {""}

    def inner(self) -> Names:
        """For a subgraph: the branches of an If may use the same names."""
        names = Names(self._rng, set(self.taken))
        names.style = self.style
        return names

    def fresh(self, stem: str) -> str:
        style = self.style
        if style == "mixed":
            style = str(self._rng.choice(["plain", "path", "dots", "number", "grad"]))
        count = len(self.taken)
        candidates = {
            "plain": [stem.lower(), f"{stem.lower()}{count}"],
            "path": [f"/layer.{count % 5}/{stem}_output_0", f"/layer.{count % 5}/{stem}_{count}_output_0"],
            "dots": [f"module.{count % 4}.{stem}.weight", f"module.{count}.{stem}.weight"],
            "number": [str(count)],
            "grad": [f"{name}_grad" for name in sorted(self.taken, key=len)[1:4]]
            + [f"{stem}_grad/Mul_{count}", f"{stem}{count}_grad"],
        }[style]
        name = next((c for c in candidates if c not in self.taken), f"{stem}.{count}")
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


@dataclass
class Root:
    """What belongs to the whole model."""

    rng: Generator
    opset: int
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    defaults: set[str] = field(default_factory=set)  # initializers that are inputs too
    domains: set[str] = field(default_factory=set)
    node_names: set[str] = field(default_factory=set)


class Scope:
    """A graph, or the body of a node, while it grows."""

    def __init__(
        self,
        root: Root,
        names: Names,
        visible: Sequence[Value] = (),
        depth: int = 0,
        outer: Scope | None = None,
    ) -> None:
        self.root = root
        self.rng = root.rng
        self.opset = root.opset
        self.names = names
        self.values = list(visible)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers = root.initializers if depth == 0 else []
        self.made: list[Value] = []
        self.depth = depth
        self.outer = outer

    def size(self) -> int:
        return sum(node.op_type != "Constant" for node in self.nodes)

    # Random choices.

    def coin(self, probability: float = 0.5) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def choose(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def uniform(self, low: float, high: float) -> float:
        return float(np.float32(self.rng.uniform(low, high)))

    def normal(self, shape: Sequence[int], scale: float = 1.0) -> np.ndarray:
        """Numbers that float32 can hold, none of them near 0."""
        draw = self.rng.standard_normal(tuple(shape))
        draw = np.where(np.abs(draw) < 0.02, draw + 0.1, draw)
        return (draw * scale).astype(np.float32).astype(np.float64)

    # Values.

    def node(
        self,
        op_type: str,
        inputs: Sequence[Value | np.ndarray | float | None],
        count: int = 1,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Any:
        """Add a node; its output, or its outputs if `count` is not 1. Arrays become constants."""
        given = [None if x is None else x if isinstance(x, Value) else self.constant(x) for x in inputs]
        while given and given[-1] is None:
            given.pop()
        outputs = [self.names.fresh(op_type) for _ in range(count)]
        node = helper.make_node(
            op_type,
            ["" if v is None else v.name for v in given],
            outputs,
            name=self.node_name(op_type),
            domain=domain,
            **{k: v for k, v in attributes.items() if v is not None},
        )
        arrays = {v.name: v.array for v in given if v is not None}
        if any(isinstance(a, onnx.GraphProto) for a in attributes.values()):
            arrays = {v.name: v.array for v in self.values} | arrays
        results = evaluate_node(node, arrays, self.opset)
        self.root.domains.add(domain)
        self.nodes.append(node)
        produced = [Value(n, np.asarray(a)) for n, a in zip(outputs, results, strict=True)]
        self.made += produced
        self.values += produced
        return produced[0] if count == 1 else produced

    def node_name(self, op_type: str) -> str:
        names = self.root.node_names
        if self.coin(0.3):
            return ""
        choice = self.choose([op_type, f"{op_type}_grad", f"/model/{op_type}.{len(names)}", f"n{len(names)}"])
        name = choice if choice not in names else f"{choice}_{len(names)}"
        names.add(name)
        return name

    def constant(self, array: np.ndarray | float, stem: str = "const") -> Value:
        """A constant that is no weight: an initializer or a Constant node."""
        array = np.asarray(array)
        return self._initializer(array, stem) if self.coin() else self._constant_node(array, stem)

    def _initializer(self, array: np.ndarray, stem: str) -> Value:
        value = Value(self.names.fresh(stem), array)
        self.initializers.append(numpy_helper.from_array(array, value.name))
        return value

    def _constant_node(self, array: np.ndarray, stem: str) -> Value:
        value = Value(self.names.fresh(stem), array)
        self.nodes.append(
            helper.make_node(
                "Constant",
                [],
                [value.name],
                name=self.node_name("Constant"),
                value=numpy_helper.from_array(array),
            )
        )
        return value

    def weight(self, shape: Sequence[int], scale: float | None = None, *, positive: bool = False) -> Value:
        """Mostly a new weight, sometimes what the graph has computed."""
        size = math.prod(shape)
        if not positive and size and self.coin(0.15):
            return self.scaled(self.to_shape(self.pick(), shape), scale)
        array = self.normal(shape, 1.0 if scale is None else scale)
        if positive:
            array = (np.abs(array) + 0.25).astype(np.float32).astype(np.float64)
        if self.coin(0.25):
            value = self._constant_node(array, "w")
        else:
            value = self._initializer(array, "w")
            if self.depth == 0 and self.coin(0.15):
                self.root.defaults.add(value.name)
        self.made.append(value)
        self.values.append(value)
        return value

    def data(self, array: np.ndarray, stem: str) -> Value:
        """Whole numbers or truth values: a constant, or an input of the model."""
        if self.coin(0.6) or self.depth > 0:
            return self.constant(array, stem)
        value = Value(self.names.fresh(stem), array)
        self.root.inputs.append(value)
        return value

    def pick(
        self, min_rank: int = 0, max_rank: int = 6, fits: Callable[[Value], bool] | None = None
    ) -> Value:
        """A floating-point value, the newer the likelier."""
        found = [
            v
            for v in self.values
            if v.is_float and 0 < v.array.size <= MAX_SIZE and min_rank <= v.rank <= max_rank
        ]
        if fits is not None:
            found = [v for v in found if fits(v)]
        if not found:
            base = self.pick()
            return self.to_rank(base, self.integer(min_rank, min(max_rank, max(min_rank, 4))))
        weights = 1.0 + np.arange(len(found)) ** 1.5
        return found[int(self.rng.choice(len(found), p=weights / weights.sum()))]

    def shape_of(self, shape: Sequence[int], x: Value) -> Value:
        """The shape as an operand of Reshape or Expand: a constant, or computed at run time."""
        target = np.array(shape, np.int64)
        if x.rank and len(shape) and self.coin(0.3):
            full = self.node("Shape", [x])
            parts = []
            for size in shape:
                same = [i for i, d in enumerate(x.shape) if d == size]
                if same and self.coin(0.6):
                    parts.append(self.node("Gather", [full, np.array([self.choose(same)], np.int64)], axis=0))
                else:
                    parts.append(self.constant(np.array([size], np.int64)))
            return self.node("Concat", parts, axis=0)
        return self.constant(target)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        shape = list(shape)
        if x.shape == tuple(shape) and self.coin(0.8):
            return x
        target = list(shape)
        if self.coin(0.5) and 0 not in shape:
            for i in range(min(len(target), x.rank)):
                if target[i] == x.shape[i] and self.coin():
                    target[i] = 0
            if target and self.coin():
                target[self.integer(0, len(target) - 1)] = -1
            return self.node("Reshape", [x, np.array(target, np.int64)])
        return self.node("Reshape", [x, self.shape_of(shape, x)])

    def to_shape(self, x: Value, shape: Sequence[int]) -> Value:
        """Any value in any shape: repeated or cut where the sizes differ."""
        size = math.prod(shape)
        if x.array.size == size:
            return self.reshape(x, shape)
        flat = self.reshape(x, [x.array.size])
        if x.array.size < size:
            flat = self.node("Tile", [flat, np.array([-(-size // x.array.size)], np.int64)])
        if flat.array.size != size:
            start = self.integer(0, flat.array.size - size)
            flat = self.node("Slice", [flat, np.array([start]), np.array([start + size]), np.array([0])])
        return self.reshape(flat, shape)

    def to_rank(self, x: Value, rank: int) -> Value:
        if x.rank == rank:
            return x
        if rank == 0:
            return self.node("ReduceMean", [x], keepdims=0)
        if x.rank < rank and self.coin(0.3):
            axes = sorted(self.rng.choice(rank, rank - x.rank, replace=False).tolist())
            return self.node("Unsqueeze", [x, np.array(axes, np.int64)])
        return self.reshape(x, self.factors(x.array.size, rank))

    def factors(self, size: int, rank: int) -> list[int]:
        """A random shape of `rank` dimensions that holds `size` elements."""
        shape = [1] * rank
        rest, prime = size, 2
        while rest > 1:
            if rest % prime == 0:
                shape[self.integer(0, rank - 1)] *= prime
                rest //= prime
            else:
                prime += 1
        return shape

    def scaled(self, x: Value, scale: float | None) -> Value:
        if scale is None or scale == 1.0:
            return x
        return self.node("Mul", [x, np.array(np.float64(np.float32(scale)))])

    def bounded(self, x: Value, limit: float = 0.9) -> Value:
        """Between -limit and limit, smoothly."""
        return self.node("Mul", [self.node(self.choose(["Tanh", "Sin"]), [x]), np.float64(np.float32(limit))])

    def positive(self, x: Value, least: float = 0.3) -> Value:
        """At least `least`, smoothly."""
        how = self.integer(0, 2)
        y = self.node("Softplus" if how == 0 else "Sigmoid", [x]) if how < 2 else self.node("Mul", [x, x])
        return self.node("Add", [y, np.float64(np.float32(least))])

    def tame(self, x: Value) -> Value:
        """Keep what is computed from it finite: neither large nor tiny."""
        if not x.is_float or x.array.size == 0:
            return x
        largest = float(np.abs(x.array).max())
        if largest > 3.0:
            if self.coin():
                return self.node(self.choose(["Tanh", "Sin", "Softsign", "Atan"]), [x])
            return self.node("Div", [x, np.float64(np.float32(largest / 2))])
        if 1e-9 < largest < 0.02:
            return self.node("Mul", [x, np.float64(np.float32(1 / largest))])
        return x

    def partner(self, x: Value) -> Value:
        """Something that broadcasts with x."""
        fitting = [
            v
            for v in self.values
            if v is not x and v.is_float and v.array.size and _broadcast_size(v.shape, x.shape) <= MAX_SIZE
        ]
        if fitting and self.coin(0.6):
            return self.choose(fitting)
        shape = [1 if self.coin(0.3) else d for d in x.shape][
            self.integer(0, x.rank) if self.coin(0.4) else 0 :
        ]
        if self.coin(0.1) and x.array.size < MAX_SIZE // 3:
            shape = [2, *[1] * (x.rank - len(shape)), *shape]
        return self.weight(shape)

    def inner(self, visible: Sequence[Value] = ()) -> Scope:
        return Scope(self.root, self.names.inner(), [*self.values, *visible], self.depth + 1, self)

    def graph(self, name: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> onnx.GraphProto:
        """The body that has grown here; output shapes are declared or not, as exporters do."""
        outputs = [self.node("Identity", [v]) if not self._is_made(v) else v for v in outputs]
        shapes = [list(v.shape) if self.coin(0.5) else None for v in outputs]
        if self.outer is not None:
            # No value of the surrounding graph may come later under a name that is used in here.
            self.outer.names.taken |= self.names.taken
        return helper.make_graph(
            self.nodes,
            name,
            # onnxruntime wants to know that the counter and the condition of a Loop are scalars.
            [_info(v, list(v.shape) if not v.is_float or self.coin(0.5) else None) for v in inputs],
            [_info(v, s) for v, s in zip(outputs, shapes, strict=True)],
            self.initializers,
        )

    def _is_made(self, value: Value) -> bool:
        return any(value.name in node.output for node in self.nodes)


def _info(value: Value, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(
        value.name, helper.np_dtype_to_tensor_dtype(value.array.dtype), shape
    )


def _broadcast_size(*shapes: tuple[int, ...]) -> int:
    try:
        return math.prod(np.broadcast_shapes(*shapes))
    except ValueError:
        return MAX_SIZE + 1


Entry = Callable[[Scope, str], Any]
OPERATORS: dict[str, tuple[Entry, int]] = {}


def entry(*names: str, since: int = 0) -> Callable[[Entry], Entry]:
    """How to add these operators to a graph, from opset `since` on."""

    def declare(function: Entry) -> Entry:
        for name in names:
            assert name not in OPERATORS
            OPERATORS[name] = function, since
        return function

    return declare


def generate(seed: int) -> RandomGraph:
    """A graph of 10 to 30 nodes and what its outputs need."""
    rng = np.random.default_rng(seed)
    root = Root(rng, int(rng.choice(OPSETS)))
    names = Names(rng)
    scope = Scope(root, names)
    for _ in range(scope.integer(2, 4)):
        rank = int(rng.choice([0, 1, 2, 3, 4, 5], p=[0.03, 0.12, 0.3, 0.3, 0.2, 0.05]))
        shape = [scope.choose([1, 2, 2, 3, 3, 4, 5, 6]) for _ in range(rank)]
        while math.prod(shape) > 72:
            shape[int(np.argmax(shape))] = 2
        value = Value(names.fresh("x"), scope.normal(shape))
        root.inputs.append(value)
        scope.values.append(value)
    size = scope.integer(10, 30)
    while scope.size() < size:
        # Of some 160 operators three are control flow; models meet it more often than that.
        grow(scope, scope.choose(["If", "Loop", "Scan"] if scope.coin(0.05) else list(OPERATORS)))
    return _finish(scope)


def grow(scope: Scope, name: str) -> list[Value]:
    """Add an operator, and keep its results in range."""
    function, since = OPERATORS[name]
    if since > scope.opset:
        return []
    results = function(scope, name)
    return [scope.tame(v) for v in (results if isinstance(results, list) else [results])]


def _finish(scope: Scope) -> RandomGraph:
    rng, root = scope.rng, scope.root
    read = {name for node in scope.nodes for name in _reads(node)}
    weights = {t.name for t in root.initializers}
    produced = [v for v in scope.made if v.name not in weights and v.is_float and v.array.size]
    leaves = [v for v in produced if v.name not in read] or produced[-1:]
    if len(leaves) > 1 and scope.coin(0.6):
        # One loss of everything that was computed.
        terms = []
        for leaf in leaves:
            rank = leaf.rank
            square = scope.node("Mul", [leaf, scope.weight(leaf.shape if rank < 3 else leaf.shape[1:])])
            terms.append(scope.node(scope.choose(["ReduceSum", "ReduceMean"]), [square], keepdims=0))
        of = [scope.node("Sum", terms)] if scope.coin() else [terms[0], *terms[1:3]]
    else:
        of = leaves[: scope.integer(1, 3)]
    outputs = list(of)
    extra = [v for v in scope.made if v.name not in weights and scope._is_made(v) and v not in outputs]
    if extra and scope.coin():
        outputs += [extra[int(i)] for i in rng.choice(len(extra), min(2, len(extra)), replace=False)]
        order = rng.permutation(len(outputs))
        outputs = [outputs[i] for i in order]
    floats = {v.name: v for v in [*root.inputs, *scope.made] if v.is_float and v.array.size}
    candidates = [n for n in floats if n not in {v.name for v in of} or scope.coin(0.1)]
    wrt = [candidates[int(i)] for i in rng.permutation(len(candidates))[: scope.integer(2, 5)]]
    declared = [_info(v, _declared_shape(scope, v)) for v in root.inputs]
    defaults = [t for t in root.initializers if t.name in root.defaults]
    declared += [_info(Value(t.name, numpy_helper.to_array(t)), list(t.dims)) for t in defaults]
    graph = helper.make_graph(
        scope.nodes,
        "random",
        declared,
        [_info(v, list(v.shape) if scope.coin(0.3) else None) for v in outputs],
        root.initializers,
    )
    model = helper.make_model(
        graph,
        opset_imports=[
            helper.make_opsetid("", root.opset),
            *(helper.make_opsetid(d, 1) for d in sorted(root.domains) if d),
        ],
        ir_version=10,
    )
    return RandomGraph(model, {v.name: v.array for v in root.inputs}, wrt, [v.name for v in of])


def _declared_shape(scope: Scope, value: Value) -> list[int | str | None] | None:
    kind = scope.choose(["static", "named", "named", "unnamed", "mixed", "none"])
    if kind == "none":
        return None
    choices = {
        "static": lambda d: d,
        "named": lambda d: f"n{d}",
        "unnamed": lambda d: None,
        "mixed": lambda d: scope.choose([d, f"n{d}", None]),
    }
    return [choices[kind](d) for d in value.shape]


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                yield from _reads(inner)
            yield from (output.name for output in attribute.g.output)


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with float32 in place of float64."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    _graph_in_float32(result.graph)
    return result


def _graph_in_float32(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        tensor.CopyFrom(_tensor_in_float32(tensor))
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if kind.elem_type == TensorProto.DOUBLE:
            kind.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                attribute.t.CopyFrom(_tensor_in_float32(attribute.t))
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _graph_in_float32(attribute.g)
            elif attribute.name in ("to", "dtype", "stash_type") and attribute.i == TensorProto.DOUBLE:
                attribute.i = TensorProto.FLOAT


def _tensor_in_float32(tensor: onnx.TensorProto) -> onnx.TensorProto:
    if tensor.data_type != TensorProto.DOUBLE:
        return tensor
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
