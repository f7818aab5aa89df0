"""Random graphs give the right gradients in all ways; `tests/sweeps/random_graphs.py` runs thousands."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from support import amount
from support.graph_builder import OPERATORS, all_nodes, generate
from sweeps import random_graphs
from sweeps.random_graphs import FAILURES, REFUSED, RIGHT, UNUSABLE, WAYS, check, describe, minimise, shrink

import ortgrad
from ortgrad.lowering.fusion import fuse

CHUNKS, PER_CHUNK = amount(8, 125), 8
# The only refusals that are right: an operator whose rule needs the rank, on a value whose rank nobody
# declares, and operators that onnx's converter does not know in a model of an old opset.
ACCEPTED = ("number of dimensions", "onnx's converter cannot convert it")


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_gradients(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunk % 8 == 0:
        # Fuse what is otherwise too small to be worth it; every program has to be compiled.
        monkeypatch.setattr(fuse, "_LEAST_SAVED", 0)
    compared = 0
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        graph = generate(seed)
        outcome = check(graph, seed)
        if outcome.failed:
            small = describe(shrink(graph, seed, outcome))
            pytest.fail(f"seed {seed}: {outcome.kind} ({outcome.way}): {outcome.text}\n{small}")
        if outcome.kind == REFUSED:
            assert any(text in outcome.text for text in ACCEPTED), f"seed {seed}: {outcome.text}"
        compared += outcome.checked
    assert compared >= PER_CHUNK  # most graphs say something


def test_most_graphs_have_an_oracle() -> None:
    """Otherwise the comparison above compares little."""
    kinds = [check(generate(seed), seed, ["onnx"]).kind for seed in range(500, 520)]
    assert kinds.count(UNUSABLE) <= 2
    assert kinds.count(RIGHT) >= 15


def test_every_operator_is_in_some_graph() -> None:
    found = set().union(*(generate(seed).operators for seed in range(250)))
    missing = {name for name in OPERATORS if name not in found} - {"attention pattern"}
    assert not missing
    assert len(found) >= 150


def test_graphs_are_as_various_as_models() -> None:
    graphs = [generate(seed) for seed in range(60)]
    sizes = [sum(n.op_type != "Constant" for n in g.model.graph.node) for g in graphs]
    assert min(sizes) >= 8
    assert max(sizes) >= 30
    inputs = [v.type.tensor_type for g in graphs for v in g.model.graph.input]
    assert any(not kind.HasField("shape") for kind in inputs)
    assert any(d.dim_param for kind in inputs for d in kind.shape.dim)
    assert any(len(g.of) > 1 for g in graphs)
    assert any(not n.name for g in graphs for n in g.model.graph.node)
    names = {name for g in graphs for n in g.model.graph.node for name in n.output}
    assert any(name.endswith("_grad") for name in names)
    assert any("/" in name for name in names)
    produced = [{name for n in g.model.graph.node for name in n.output} for g in graphs]
    assert any(set(g.wrt) & p for g, p in zip(graphs, produced, strict=True))  # intermediate values
    inner = [n for g in graphs for n in all_nodes(g.model.graph) if n.op_type in ("If", "Loop", "Scan")]
    assert {n.op_type for n in inner} == {"If", "Loop", "Scan"}


def test_the_same_seed_makes_the_same_graph() -> None:
    first, second = generate(3), generate(3)
    assert first.model == second.model
    assert (first.wrt, first.of) == (second.wrt, second.of)
    for name, array in first.feeds.items():
        np.testing.assert_array_equal(array, second.feeds[name])


def test_a_wrong_gradient_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of one part in a hundred, in one way to run and one gradient, does not go unseen."""

    class Off(onnxruntime.InferenceSession):
        def run(self, names, feeds, options=None):  # type: ignore[no-untyped-def]
            *others, last = super().run(names, feeds, options)
            return [*others, last * np.asarray(1.01, last.dtype)]

    monkeypatch.setitem(WAYS, "plain", lambda model: Off(model.SerializeToString()))
    for seed in range(900, 906):
        graph = generate(seed)
        outcome = check(graph, seed, ["onnx"])
        if outcome.kind != RIGHT:
            continue
        outcome = check(graph, seed, ["onnx", "plain"])
        # A gradient of zeros stays what it is.
        if outcome.kind == RIGHT:
            continue
        assert outcome.kind in FAILURES
        small = minimise(graph, lambda g, seed=seed: check(g, seed, ["plain"]).kind == random_graphs.WRONG)
        assert len(small.model.graph.node) <= 2
        return
    pytest.fail("none of six graphs noticed")


def test_the_callers_model_is_not_changed() -> None:
    for seed in range(60):
        graph = generate(seed)
        before = graph.model.SerializeToString(deterministic=True)
        try:
            ortgrad.build_gradient_model(graph.model, wrt=graph.wrt, of=graph.of)
        except ortgrad.OrtgradError:
            continue
        assert graph.model.SerializeToString(deterministic=True) == before, f"seed {seed}"


def test_branches_with_weights_of_the_same_name() -> None:
    """Both get names of their own in what is built, and keep theirs in the caller's model."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (bool c, float[2] x) => (float[2] y) {
            y = If(c) <
                then_branch = a () => (float[2] t) <float[2] w = {1, 2}> { t = Mul(x, w) },
                else_branch = b () => (float[2] e) <float[2] w = {3, 4}> { e = Mul(x, w) }
            >
        }
    """)
    before = model.SerializeToString(deterministic=True)
    for _ in range(2):
        built = ortgrad.build_gradient_model(model, wrt="x", of="y")
        assert model.SerializeToString(deterministic=True) == before
    session = ortgrad.InferenceSession(built)
    feeds = {"x": np.ones(2, np.float32), "y_grad": np.ones(2, np.float32)}
    for condition, grad in ((True, [1, 2]), (False, [3, 4])):
        np.testing.assert_array_equal(session.run(["x_grad"], feeds | {"c": np.array(condition)})[0], grad)


# Found by the command, further on than the seeds above.
@pytest.mark.parametrize("seed", [20730])
def test_seeds_that_failed_once(seed: int) -> None:
    """20730: in a Scan, a 0 beside a condition took the condition's type."""
    outcome = check(generate(seed), seed)
    assert outcome.kind == RIGHT, outcome
