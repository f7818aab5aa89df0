"""Detection of random operators, and their replacement by operators with fixed results.

Random models are recognized by their nodes: whether two runs agree depends on seeds, on optimizations and
on chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from ortgrad.autodiff.defined_nodes import replace_by
from ortgrad.autodiff.node_view import NodeView
from ortgrad.errors import ModelError
from ortgrad.graph.names import Names
from ortgrad.graph.protos import BOOL, DOUBLE, all_nodes, subgraphs
from ortgrad.graph.recorder import Recorder
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
    fixed = read(model)
    names, opset = Names.of(fixed), fixed.opset_imports[""]
    for node in list(fixed.graph.all_nodes()):
        seed = node.attributes.get("seed")
        if node.op_type in GENERATORS | {"Dropout"} and seed is not None and seed.value >= FIRST_MARK:
            replace_by(node, _dropout if node.op_type == "Dropout" else _generated, opset, names)
    return write(fixed, model)


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


def _generated(op: Recorder, node: NodeView) -> ir.Value:
    """Return the results of a random generator in its element type."""
    seed = int(node.attribute("seed"))
    if node.op_type == "Bernoulli":
        chance = op.Cast(node.input(0), to=DOUBLE)
        drawn = op.Less(_uniform(op, op.Shape(node.input(0)), seed), chance)
    elif node.op_type == "Multinomial":
        # All classes are equally probable: no gradient depends on the distribution.
        batch = op.Shape(node.input(0), start=0, end=1)
        uniform = _uniform(op, op.Concat(batch, [node.attribute("sample_size")], axis=0), seed)
        drawn = op.Floor(uniform * op.Cast(op.Shape(node.input(0), start=1, end=2), to=DOUBLE))
    else:
        given = node.attribute("shape")
        shape = op.Shape(node.input(0)) if given is None else op.constant(np.array(given, np.int64))
        if node.op_type.startswith("RandomNormal"):
            drawn = _normal(op, shape, seed) * node.attribute("scale") + node.attribute("mean")
        else:
            low, high = node.attribute("low"), node.attribute("high")
            drawn = _uniform(op, shape, seed) * (high - low) + low
    element = node.attribute("dtype")
    result: ir.Value = op.CastLike(drawn, node.input(0)) if element is None else op.Cast(drawn, to=element)
    return result


def _dropout(op: Recorder, node: NodeView) -> Sequence[ir.Value]:
    """Return the results of a Dropout: its input with some elements dropped, and the mask of the others."""
    x, ratio, seed = node.input(0), node.optional(1), node.attribute("seed")
    training = op.Reshape(node.input(2), np.zeros(0, np.int64))
    scalar = op.constant(np.array(0.5)) if ratio is None else op.Reshape(ratio, np.zeros(0, np.int64))
    wide = op.Cast(scalar, to=DOUBLE)
    keep = op.Or(op.GreaterOrEqual(_uniform(op, op.Shape(x), seed), wide), op.Not(training))
    scale = op.Where(training, 1.0 / (1.0 - wide), op.constant(np.array(1.0)))
    return op.Where(keep, x, 0.0) * op.CastLike(scale, x), keep


def _normal(op: Recorder, shape: ir.Value, seed: int) -> ir.Value:
    """Return doubles from a normal distribution, by the Box-Muller transform."""
    radius = op.Sqrt(op.Log(_uniform(op, shape, seed)) * -2.0)
    turn: ir.Value = op.Cos(_uniform(op, shape, seed, stream=1) * (2 * np.pi))
    return radius * turn


def _uniform(op: Recorder, shape: ir.Value, seed: int, stream: int = 0) -> ir.Value:
    """Return doubles in (0, 1): a polynomial of the position modulo a prime, squared in three rounds."""
    number = op.Range(0, op.Size(op.ConstantOfShape(shape)), 1)
    state = op.Mod(number + (seed * 7919 + stream * 104729), PRIME)
    for factor in (48271, 69621, 16807):
        state = op.Mod(state * factor, PRIME)
        state = op.Mod(state * state, PRIME)
        state = op.Mod(state + number, PRIME)
    drawn = op.Cast(state, to=DOUBLE) * (1 / PRIME) + 0.5 / PRIME
    uniform: ir.Value = op.Reshape(drawn, shape, allowzero=1)
    return uniform
