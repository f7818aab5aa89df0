"""Gradient rules of operators that move elements, and SliceGrad, against finite differences and PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import KERNELS, assert_close, run_node
from support.rules import check_against_torch, check_rule, gradients, one_node

import ortgrad


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


Case = tuple[str, list[np.ndarray | None], dict[str, Any]]
FAR = 2**62

# The inputs after the first are given as constants and at run time.
CASES: list[Case] = [
    ("Reshape", [normal(2, 6), ints(3, -1)], {}),
    ("Reshape", [normal(2, 6), ints(0, 2, 3)], {}),
    ("Flatten", [normal(2, 3, 4)], {"axis": -1}),
    ("Transpose", [normal(2, 3, 4)], {}),
    ("Transpose", [normal(2, 3, 4)], {"perm": [2, 0, 1]}),
    ("Squeeze", [normal(1, 3, 1)], {}),
    ("Squeeze", [normal(1, 3, 1), ints(-1)], {}),
    ("Unsqueeze", [normal(2, 3), ints(0, -1)], {}),
    ("Expand", [normal(3, 1), ints(2, 1, 4)], {}),
    ("Expand", [normal(3, 4), ints(1)], {}),
    ("Tile", [normal(2, 3), ints(2, 3)], {}),
    ("Tile", [normal(2, 3), ints(1, 2)], {}),
    ("Tile", [normal(2, 3), ints(1, 1)], {}),
    ("Concat", [normal(2, 3)], {"axis": 1}),
    ("Trilu", [normal(2, 3, 4)], {}),
    ("Trilu", [normal(3, 4), np.array(-1)], {"upper": 0}),
    ("ReverseSequence", [normal(4, 3, 2), ints(4, 1, 2)], {}),
    ("ReverseSequence", [normal(3, 4), ints(4, 1, 2)], {"batch_axis": 0, "time_axis": 1}),
    ("DepthToSpace", [normal(2, 8, 2, 3)], {"blocksize": 2}),
    ("DepthToSpace", [normal(2, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", [normal(2, 3, 4, 6)], {"blocksize": 2}),
    ("CenterCropPad", [normal(5, 4, 3), ints(2, 7, 3)], {}),
    ("CenterCropPad", [normal(4, 5, 6), ints(9, 1)], {"axes": [-1, 0]}),
    ("Pad", [normal(3, 4), ints(1, 0, 2, 3)], {}),
    ("Pad", [normal(3, 4), ints(-1, 2, 1, -3)], {}),
    ("Pad", [normal(3, 4), ints(1, 2), None, ints(-1)], {}),
    *[("Pad", [normal(4, 3), ints(2, 1, 3, 0)], {"mode": mode}) for mode in ("reflect", "edge")],
    *[("Pad", [normal(3, 4), ints(2, 1), None, ints(1)], {"mode": mode}) for mode in ("reflect", "edge")],
    ("Slice", [normal(5, 6), ints(1, -4), ints(4, -1)], {}),
    ("Slice", [normal(5, 6), ints(1), ints(FAR)], {}),
    ("Slice", [normal(5, 6), ints(2), ints(FAR), ints(-1)], {}),
    ("Slice", [normal(5, 6), ints(-9), ints(2), ints(1), ints(1)], {}),
    ("Slice", [normal(5, 6), ints(0, 5), ints(5, 0), ints(0, 1), ints(2, -2)], {}),
    ("Slice", [normal(5, 6), ints(-1), ints(-FAR), ints(1), ints(-1)], {}),
    ("Slice", [normal(5, 6), ints(0, 1), ints(5, 6), None, ints(3, 2)], {}),
    ("Slice", [normal(5, 6), *(a.astype(np.int32) for a in (ints(1), ints(3), ints(1)))], {}),
]


def names(cases: Sequence[Case]) -> list[str]:
    return [f"{i}-{case[0]}" for i, case in enumerate(cases)]


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "run-time"])
@pytest.mark.parametrize(("op_type", "inputs", "attributes"), CASES, ids=names(CASES))
def test_differences(
    op_type: str, inputs: list[np.ndarray | None], attributes: dict[str, Any], constant: bool
) -> None:
    later = [i for i, array in enumerate(inputs) if i and array is not None] if constant else []
    check_rule(op_type, inputs, attributes, constants=later, symbolic=not constant)
    if later:
        check_rule(op_type, inputs, attributes, constants=later)


def test_wrap() -> None:
    check_rule("Pad", [normal(3, 2), ints(2, 1, 4, 0)], {"mode": "wrap"}, opset=19)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("symbolic", [False, True])
def test_concat_and_split(axis: int, symbolic: bool) -> None:
    parts = [normal(2, 3), normal(2, 3, seed=1), normal(2, 3, seed=2)]
    check_rule("Concat", parts, {"axis": axis}, symbolic=symbolic)
    split = {"axis": axis, "num_outputs": 2}
    check_rule("Split", [normal(4, 4)], split, outputs=(None, None), symbolic=symbolic)
    # Nothing flows back through the second output.
    model, feeds = one_node("Split", [normal(4, 4), ints(1, 3)], {"axis": axis}, outputs=(None, None))
    seed = np.ones((1, 4) if axis == 0 else (4, 1), np.float32)
    grad = gradients(model, feeds, {"y": seed}, ["a"])["a"]
    assert grad.sum() == 4
    assert (grad.take(0, axis) == 1).all()


def test_pad_value() -> None:
    inputs = [normal(3, 4), ints(1, -1, 0, 2), np.float32(2)]
    for constants in ([1], []):
        check_rule("Pad", inputs, constants=constants, wrt=["a", "c"])
    check_rule("Pad", [normal(3, 4), ints(1, 2), np.ones(1, np.float32), ints(1)], wrt=["a", "c"])


@pytest.mark.parametrize(
    ("op_type", "function", "inputs", "attributes"),
    [
        ("Expand", lambda x, s: x.expand(2, 3, 4), [normal(3, 1), ints(2, 3, 4)], {}),
        ("Tile", lambda x, r: x.tile(2, 1, 3), [normal(2, 2, 3), ints(2, 1, 3)], {}),
        (
            "Pad",
            lambda x, p: torch.nn.functional.pad(x, (2, 1, 1, 0), mode="reflect"),
            [normal(1, 2, 3, 4), ints(0, 0, 1, 2, 0, 0, 0, 1)],
            {"mode": "reflect"},
        ),
        ("Slice", lambda x, *_: x[1:4:2], [normal(5, 3), ints(1), ints(4), ints(0), ints(2)], {}),
        (
            "DepthToSpace",
            lambda x: torch.nn.functional.pixel_shuffle(x, 2),
            [normal(2, 8, 3, 2)],
            {"blocksize": 2, "mode": "CRD"},
        ),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch(
    op_type: str,
    function: Callable[..., torch.Tensor],
    inputs: list[np.ndarray],
    attributes: dict[str, Any],
    dtype: type,
) -> None:
    check_against_torch(op_type, function, [inputs[0].astype(dtype), *inputs[1:]], attributes, opset=21)


@pytest.mark.parametrize("opset", [18, 19, 21, 23, 24, 25, 26])
def test_opsets(opset: int) -> None:
    check_rule("Pad", [normal(3, 4), ints(1, 0, 2, 3)], {"mode": "edge"}, opset=opset)
    check_rule("Unsqueeze", [normal(3, 4), ints(1)], opset=opset)


def test_empty() -> None:
    for op_type, inputs in (
        ("Slice", [normal(3, 4), ints(3), ints(2)]),
        ("Slice", [normal(3, 4), ints(2), ints(2), ints(1), ints(2)]),
        ("Tile", [normal(3, 4), ints(1, 0)]),
        ("Reshape", [normal(3, 0), ints(0, 3)]),
    ):
        attributes = {"allowzero": 1} if op_type == "Reshape" else {}
        model, feeds = one_node(op_type, inputs, attributes)
        shape = {"Slice": None, "Tile": (3, 0), "Reshape": (0, 3)}[op_type] or (
            (0, 4) if len(inputs) == 3 else (3, 0)
        )
        grad = gradients(model, feeds, {"y": np.zeros(shape, np.float32)}, ["a"])["a"]
        np.testing.assert_array_equal(grad, np.zeros_like(inputs[0]))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_slice_grad(kernels: str, dtype: type) -> None:
    x = normal(5, 6, 4)
    for starts, ends, axes, steps in (
        ([0, 5], [5, 0], [0, 1], [2, -2]),
        ([-3], [FAR], [-1], [1]),
        ([-1, 3], [-99, -99], [1, 0], [-1, -3]),
        ([1, 0], [4, 2], None, None),
        ([4], [1], [0], [1]),
    ):
        window = [slice(None)] * 3
        for start, end, axis, step in zip(starts, ends, axes or range(3), steps or [1] * 3, strict=False):
            window[axis] = slice(start, end if end > -99 else None, step)
        dy = x[tuple(window)].astype(dtype)
        expected = np.zeros(x.shape, dtype)
        expected[tuple(window)] = dy
        feeds = {"dY": dy, "shape": ints(*x.shape)}
        vectors = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
        feeds |= {k: ints(*v) for k, v in vectors.items() if v is not None}
        inputs = ["dY", "shape", *(k if v is not None else "" for k, v in vectors.items())]
        node = ortgrad.nodes.slice_grad(*inputs, ["dX"])
        assert_close(run_node(node, feeds, kernels)["dX"], expected, 0)


def test_slice_grad_refuses() -> None:
    node = ortgrad.nodes.slice_grad("dY", "shape", "starts", "ends", "axes", "steps", ["dX"])
    good = {"dY": normal(2, 3), "shape": ints(4, 3), "starts": ints(1), "ends": ints(3), "axes": ints(0)}
    good["steps"] = ints(1)
    for change, text in (
        ({"steps": ints(0)}, "step is 0"),
        ({"axes": ints(2)}, "axis 2 does not exist"),
        ({"ends": ints(4)}, r"has shape \[3, 3\], dY has \[2, 3\]"),
        ({"starts": ints(1, 2)}, r"ends \[1\] does not fit .*starts \[2\]"),
    ):
        with pytest.raises(ortgrad.KernelError, match=text):
            run_node(node, {**good, **change}, "python")
    run_node(node, good, "python")


def test_second_derivatives() -> None:
    """Through a square: the gradient graphs of these operators are differentiated again."""
    for op_type, inputs, attributes in (
        ("Slice", [normal(5, 6), ints(0), ints(5), ints(0), ints(2)], {}),
        ("Pad", [normal(4, 3), ints(2, 1, 3, 0)], {"mode": "reflect"}),
        ("Pad", [normal(4, 3), ints(2, 1, 3, 0)], {}),
        ("Tile", [normal(2, 3), ints(2, 3)], {}),
        ("CenterCropPad", [normal(4, 5), ints(9, 1)], {}),
    ):
        squared(op_type, inputs, attributes)


def squared(op_type: str, inputs: Sequence[np.ndarray], attributes: dict[str, Any]) -> None:
    from onnx import helper

    model, feeds = one_node(op_type, inputs, attributes)
    graph = model.graph
    graph.node[0].output[0] = "moved"
    graph.node.append(helper.make_node("ReduceSumSquare", ["moved"], ["y"], keepdims=0))
    del graph.output[0].type.tensor_type.shape.dim[:]
    graph.output[0].type.tensor_type.shape.SetInParent()
    built = ortgrad.build_gradient_model(model, wrt=["a"])
    ortgrad.check_gradients(built, feeds, wrt=["a"], of=["a_grad"]).raise_if_wrong()
