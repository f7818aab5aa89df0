"""Which nodes of a model are random.

Whether two runs of a random model agree depends on seeds, on optimisations and on chance, so this is told
from the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.check.fixed_draws import FIRST_MARK, GENERATORS
from ortgrad.errors import ModelError
from ortgrad.graph.protos import BOOL, all_nodes, subgraphs

# They draw numbers too, but their results are packed or fused with something else.
OTHERS = frozenset(["BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"])


def with_marked_draws(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with a seed of its own at every random node, and which nodes those are.

    A model without random nodes is returned as it is. The marks survive differentiation, so the draws can be
    fixed in the forward model and in its gradient model in the same way.
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


def training_switches(model: onnx.ModelProto) -> set[str]:
    """The values that switch a Dropout of the main graph on."""
    return {node.input[2] for node in model.graph.node if node.op_type == "Dropout" and len(node.input) > 2}


def _plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without functions, of an opset that has the operators used here."""
    from ortgrad.graph.serialization import read, write
    from ortgrad.passes.inline import inline
    from ortgrad.passes.opset import at_minimum_opset

    plain = read(model)
    if any(_possible(function.node) for function in model.functions):
        plain = inline(plain, lambda _: True)
    return write(at_minimum_opset(plain), model)


def _possible(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether one of the nodes of a function may be random."""
    return any(
        node.op_type in GENERATORS | OTHERS or (node.op_type == "Dropout" and len(node.input) > 2)
        for node in all_nodes(nodes)
    )


def _draws(
    graph: onnx.GraphProto, outer: Mapping[str, bool], feeds: Mapping[str, np.ndarray]
) -> Iterator[onnx.NodeProto]:
    """The nodes that draw numbers; a Dropout only if it is not known to be switched off."""
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
