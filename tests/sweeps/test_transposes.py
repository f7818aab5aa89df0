"""Gradients between transposes, at all levels of onnxruntime's optimisation.

onnxruntime moves a Transpose past the nodes behind it and rewrites their axes. Each rule's node stands here
between transposes (and squeezes, reshapes), so that there are some on both sides of the gradient's nodes.
--sweep runs every node in all layouts, ways and levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from support import LONG
from support.node_tests import Case as Slopes
from support.node_tests import Measured, measure
from support.rule_cases import CASES
from support.rules import Arrays
from support.sessions import LEVELS, make_session, run

import ortgrad
from ortgrad.autodiff.rules import all_rules

LAYOUTS = ("turned", "channels last", "squeezed", "reshaped")
RUNS = [(way, "all") for way in ("auto", "python", "plain")]
if LONG:
    RUNS = [(w, level) for w in ("auto", "python", "onnx", "plain", "registered") for level in LEVELS]
# Its rules need subgraphs, or inputs that only a gradient has.
WITHOUT_CASES = {
    "NGramRepeatBlock",
    "TransposeMatMul",
    "If",
    "Loop",
    "Scan",
    "GatherGrad",
    "GatherElementsGrad",
    "GatherNDGrad",
}


def permutation(rank: int, layout: str) -> list[int]:
    """From the node's layout to the one outside."""
    if layout == "channels last" and rank > 2:
        return [0, *range(2, rank), 1]
    return [rank - 1, *range(rank - 1)]


def outside(array: np.ndarray, layout: str) -> np.ndarray:
    """What is fed for a tensor of the node; a scalar has no other layout."""
    if array.ndim == 0:
        return array
    if layout in ("squeezed", "reshaped"):
        array = array[np.newaxis]
    return np.ascontiguousarray(array.transpose(permutation(array.ndim, layout)))


def between(model: onnx.ModelProto, measured: Measured, layout: str, *, symbolic: bool) -> onnx.ModelProto:
    """The model with its inputs from, and its outputs to, another layout."""
    framed = onnx.ModelProto()
    framed.CopyFrom(model)
    graph = framed.graph
    before, after = [], []
    extra = layout in ("squeezed", "reshaped")
    graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))

    def reshape(name: str, source: str, target: str, put_in: bool) -> onnx.NodeProto:
        if layout == "squeezed":
            return helper.make_node("Unsqueeze" if put_in else "Squeeze", [source, "first"], [target])
        shape = (measured.weights | measured.feeds)[name].shape
        graph.initializer.append(
            numpy_helper.from_array(np.array([1, *shape] if put_in else shape, np.int64), f"{name}_shape")
        )
        return helper.make_node("Reshape", [source, f"{name}_shape"], [target])

    for value in graph.input:
        if value.name not in measured.case.wrt:
            continue
        name, array = value.name, outside(measured.feeds[value.name], layout)
        # Some rules need the shape of the weights.
        dims = [f"{name}_{i}" for i in range(array.ndim)] if symbolic and name == "a" else array.shape
        value.CopyFrom(helper.make_tensor_value_info(f"{name}_outside", onnx.TensorProto.FLOAT, dims))
        if not array.ndim:
            before.append(helper.make_node("Identity", [value.name], [name]))
            continue
        back = [int(i) for i in np.argsort(permutation(array.ndim, layout))]
        turned = f"{name}_turned" if extra else name
        before.append(helper.make_node("Transpose", [value.name], [turned], perm=back))
        if extra:
            before.append(reshape(name, turned, name, put_in=False))
    for value in graph.output:
        name = value.name
        if name not in measured.weights:
            continue
        rank = measured.weights[name].ndim
        value.name = f"{name}_outside"
        if not rank:
            after.append(helper.make_node("Identity", [name], [value.name]))
            continue
        straight = f"{name}_straight" if extra else name
        if extra:
            after.append(reshape(name, name, straight, put_in=True))
        perm = permutation(rank + extra, layout)
        after.append(helper.make_node("Transpose", [straight], [value.name], perm=perm))
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return framed


@cache
def expected(index: int) -> tuple[onnx.ModelProto, Measured, Arrays]:
    """The node alone, a point with its differences, and gradients that agree with these."""
    case = CASES[index]
    model, feeds = case.make()
    of = [v.name for v in model.graph.output if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    measured = measure(Slopes(case.name, model, feeds, case.wrt, of))
    assert measured is not None, "onnxruntime does not run it, or nothing moves"
    if len(of) == 1 and measured.weights[of[0]].ndim == 0:
        # A single scalar is seeded with 1 inside.
        weight = float(measured.weights[of[0]])
        for slope in measured.slopes:
            slope.estimates[:] = [estimate / weight for estimate in slope.estimates]
    built = ortgrad.build_gradient_model(model, wrt=case.wrt, of=of)
    results = run(make_session(built, "onnx", "disabled"), measured.feeds, measured.weights, len(case.wrt))
    grads = dict(zip(case.wrt, results, strict=True))
    for slope in measured.slopes:
        grad = grads[slope.name].astype(np.float64)
        found = float(np.sum(grad * slope.direction))
        scale = max(1e-3, float(np.linalg.norm(grad)), *np.abs(slope.estimates))
        error = min(abs(found - estimate) for estimate in slope.estimates) / scale
        assert error <= measured.tolerance, f"{slope.name}: {found} where differences give {slope.estimates}"
    return model, measured, grads


def problems(index: int, layout: str, *, symbolic: bool) -> Iterator[str]:
    """What is wrong with the gradients of a node in a layout."""
    case = CASES[index]
    model, measured, grads = expected(index)
    framed = between(model, measured, layout, symbolic=symbolic)
    wrt = [f"{name}_outside" for name in case.wrt]
    built = ortgrad.build_gradient_model(framed, wrt=wrt, of=[f"{name}_outside" for name in measured.weights])
    feeds = {
        f"{name}_outside" if name in case.wrt else name: outside(a, layout) if name in case.wrt else a
        for name, a in measured.feeds.items()
    }
    seeds = {f"{name}_outside": outside(seed, layout) for name, seed in measured.weights.items()}
    for way, level in RUNS:
        where = f"{case.name}, {layout}{', symbolic' * symbolic}, {way}, {level}"
        try:
            results = run(make_session(built, way, level), feeds, seeds, len(wrt))
        except Exception as error:
            yield f"{where}: {error}"
            continue
        for name, result in zip(case.wrt, results, strict=True):
            target = outside(grads[name], layout)
            scale = max(1e-6, float(np.abs(target).max(initial=0)))
            if result.shape != target.shape:
                yield f"{where}: {name} has shape {result.shape}, not {target.shape}"
            elif not np.allclose(result, target, rtol=1e-4, atol=1e-4 * scale):
                yield f"{where}: {name} is off by {np.abs(result - target).max():.2g}"


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_between_transposes(index: int) -> None:
    found = []
    for number, layout in enumerate(LAYOUTS):
        for symbolic in (False, True):
            if LONG or (number == index % 4 and symbolic == bool(index % 3 == 0)):
                found += problems(index, layout, symbolic=symbolic)
    assert not found, "\n".join(found)


def test_every_rule_has_a_case() -> None:
    # Those of ai.onnx.ml work on rows of features, those with scales on integers, others on sequences.
    rules = {
        op
        for (domain, op), rule in all_rules().items()
        if rule.function is not None
        and domain != "ai.onnx.ml"
        and rule.scales is None
        and rule.function.__module__ != "ortgrad.ops.sequences"
    }
    assert rules - {case.op_type for case in CASES} == WITHOUT_CASES


SHAPES = {"known": [2, 3, 4], "lengths unknown": ["A", "B", "C"], "rank unknown": None}


def select(t: torch.Tensor, axis: int, indices: list[int]) -> torch.Tensor:
    """The elements along an axis, zeros for an index of -1."""
    chosen = t.index_select(axis, torch.tensor([max(i, 0) for i in indices]))
    kept = torch.tensor([float(i >= 0) for i in indices])
    return chosen * kept.reshape([-1 if i == axis % t.ndim else 1 for i in range(t.ndim)])


@dataclass(frozen=True)
class Padded:
    """Nodes from t to y whose gradient (or which) pads, and which elements of t they take along an axis."""

    nodes: str
    inputs: dict[str, int]  # the number for each axis
    elements: Callable[[int], list[int]]
    tanh: bool = False


PADS = {"before": 1, "after": 0}
PADDED = {
    "Slice": Padded("y = Slice(t, from, to, axes)", {"from": 1, "to": 2}, lambda n: [1]),
    "Slice, negative": Padded(
        "y = Slice(t, from, to, axes)", {"from": -2, "to": 9}, lambda n: [n - 2, n - 1]
    ),
    "Pad": Padded("y = Pad(t, pads, , axes)", PADS, lambda n: [-1, *range(n)]),
    "Pad, mirrored": Padded('y = Pad <mode = "reflect"> (t, pads, , axes)', PADS, lambda n: [1, *range(n)]),
    "CenterCropPad": Padded(
        "y = CenterCropPad <axes = AXES> (t, size)", {"size": 3}, lambda n: [0, 1, 2 if n > 2 else -1]
    ),
    # Only the gradient puts a Transpose behind these.
    "Pad, Tanh": Padded("u = Pad(t, pads, , axes) y = Tanh(u)", PADS, lambda n: [-1, *range(n)], tanh=True),
    "CenterCropPad, Tanh": Padded(
        "u = CenterCropPad <axes = AXES> (t, size) y = Tanh(u)",
        {"size": 3},
        lambda n: [0, 1, 2 if n > 2 else -1],
        tanh=True,
    ),
}


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "run-time"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("axes", [[0], [-1], [2, 0, 1]], ids=str)
@pytest.mark.parametrize("name", PADDED)
def test_pads(name: str, axes: list[int], shape: str, constant: bool) -> None:
    """PyTorch's gradients, with `axes` one or all of them in another order."""
    padded = PADDED[name]
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = x.permute(2, 0, 1)
    for axis in axes:
        y = select(y, axis, padded.elements(y.shape[axis]))
    y = (y.tanh() if padded.tanh else y).permute(2, 1, 0)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(seed)
    assert x.grad is not None
    given = {n: np.full(len(axes), number) for n, number in padded.inputs.items()}
    if padded.inputs is PADS:
        given = {"pads": np.concatenate([given["before"], given["after"]])}
    if "AXES" not in padded.nodes:
        given["axes"] = np.array(axes)
    declared = ", ".join(f"int64[{len(a)}] {n}" for n, a in given.items())
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[1] x, {declared}) => (float[1] z)'
        f"{{ t = Transpose <perm = [2, 0, 1]> (x) {padded.nodes.replace('AXES', str(axes))} "
        "z = Transpose <perm = [2, 1, 0]> (y) }"
    )
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, SHAPES[shape]))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    if constant:
        del model.graph.input[1:]
        model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in given.items())
    built = ortgrad.build_gradient_model(model, wrt="x", of="z")
    feeds = {"x": x.detach().numpy(), **({} if constant else given)}
    for way, level in [("onnx", "disabled"), *((way, "all") for way in ("auto", "plain"))]:
        found = run(make_session(built, way, level), feeds, {"z": seed.numpy()}, 1)[0]
        np.testing.assert_allclose(found, x.grad.numpy(), rtol=1e-5, atol=1e-6, err_msg=f"{way}, {level}")
