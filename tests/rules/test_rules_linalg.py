"""Gradient rules of products, determinants and Fourier transforms, against finite differences and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support.rules import check_against_torch, check_rule, gradients, one_node

import ortgrad


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2, 3), (3, 4)),
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((5, 2, 3), (3,)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((6, 5, 2, 3), (1, 3, 4)),
    ((1, 5, 2, 3), (6, 1, 3, 4)),
]


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_matmul(a: tuple[int, ...], b: tuple[int, ...], symbolic: bool) -> None:
    inputs = [normal(*a), normal(*b, seed=1)]
    check_against_torch("MatMul", torch.matmul, inputs, symbolic=symbolic)
    check_against_torch("MatMul", torch.matmul, [x.astype(np.float64) for x in inputs], symbolic=symbolic)
    check_rule("MatMul", inputs, symbolic=symbolic, second=a not in [(3,)] and not symbolic)


def test_matmul_towards_one_operand() -> None:
    inputs = [normal(5, 2, 3), normal(3, 4, seed=1)]
    for wrt in ("a", "b"):
        check_rule("MatMul", inputs, wrt=[wrt], symbolic=False)


def test_the_gradient_of_weights_is_one_product() -> None:
    model, _ = one_node("MatMul", [normal(5, 2, 3), normal(3, 4)], symbolic=False)
    built = ortgrad.build_gradient_model(model, wrt=["b"])
    operators = [node.op_type for node in built.graph.node if node.op_type != "Constant"]
    assert sorted(operators) == ["Gemm", "MatMul", "Reshape", "Reshape"]


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("c", [None, (), (4,), (1, 4), (2, 1), (2, 4)], ids=str)
def test_gemm(turned: tuple[int, int], c: tuple[int, ...] | None) -> None:
    a = normal(3, 2) if turned[0] else normal(2, 3)
    b = normal(4, 3, seed=1) if turned[1] else normal(3, 4, seed=1)
    inputs = [a, b] if c is None else [a, b, normal(*c, seed=2)]
    attributes = {"transA": turned[0], "transB": turned[1], "alpha": 0.5, "beta": 2.0}

    def gemm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        product = 0.5 * (a.T if turned[0] else a) @ (b.T if turned[1] else b)
        return product if c is None else product + 2 * c

    check_against_torch("Gemm", gemm, inputs, attributes, symbolic=c is None)
    check_rule("Gemm", inputs, attributes, second=True, symbolic=c != (4,))


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("batch", [((), ()), ((5,), ()), ((), (5,)), ((5,), (5,)), ((5, 1), (6,))], ids=str)
def test_fused_matmul(turned: tuple[int, int], batch: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a = normal(*batch[0], 3, 2) if turned[0] else normal(*batch[0], 2, 3)
    b = normal(*batch[1], 4, 3, seed=1) if turned[1] else normal(*batch[1], 3, 4, seed=1)
    attributes = {"transA": turned[0], "transB": turned[1], "alpha": 0.5}
    for symbolic in (False, True):
        check_against_torch(
            "FusedMatMul",
            lambda a, b: 0.5 * (a.mT if turned[0] else a) @ (b.mT if turned[1] else b),
            [a, b],
            attributes,
            domain="com.microsoft",
            symbolic=symbolic,
        )


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_fused_matmul_with_the_batch_inside(turned: tuple[int, int]) -> None:
    a = normal(3, 5, 6, 2) if turned[0] else normal(2, 5, 6, 3)
    b = normal(4, 5, 6, 3, seed=1) if turned[1] else normal(3, 5, 6, 4, seed=1)
    attributes = {"transA": turned[0], "transB": turned[1], "transBatchA": 1, "transBatchB": 1}
    check_rule("FusedMatMul", [a, b], attributes, domain="com.microsoft")
    attributes["transBatchB"] = 0
    check_rule("FusedMatMul", [a, np.moveaxis(b, 0, 2)], attributes, domain="com.microsoft")


EQUATIONS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij->ji", [(2, 3)]),
    ("ij->j", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("ii->i", [(3, 3)]),
    ("ii->", [(3, 3)]),
    ("ijii->j", [(3, 2, 3, 3)]),
    ("ij,jk->ik", [(2, 3), (3, 4)]),
    ("ij,jk", [(2, 3), (3, 4)]),
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 2)]),
    ("bhid, bhjd -> bhij", [(2, 2, 3, 4), (2, 2, 3, 4)]),
    ("i,j->ij", [(2,), (3,)]),
    ("i,i->", [(3,), (3,)]),
    ("ij,k->j", [(2, 3), (4,)]),
    ("ii,ij->j", [(3, 3), (3, 2)]),
    (",i->i", [(), (3,)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]),
    ("...ij,...jk->...ik", [(5, 2, 3), (5, 3, 4)]),
    ("...ij,jk", [(5, 2, 3), (3, 4)]),
    ("...,...->...", [(2, 3), (2, 3)]),
    ("i...->...", [(2, 3, 4)]),
    ("ij,ij->i", [(4, 3), (1, 3)]),
    ("ij,ij->j", [(1, 3), (4, 3)]),
    ("ij,ij->", [(4, 1), (1, 3)]),
]


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS, ids=[e for e, _ in EQUATIONS])
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    for symbolic in (False, True):
        check_rule("Einsum", inputs, {"equation": equation}, symbolic=symbolic)
        check_against_torch(
            "Einsum",
            lambda *x: torch.einsum(equation, *x),
            [x.astype(np.float64) for x in inputs],
            {"equation": equation},
            symbolic=symbolic,
        )


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "ii,ij->j"])
def test_einsum_twice(equation: str) -> None:
    shapes = dict(EQUATIONS)[equation]
    inputs = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    for symbolic in (False, True):
        check_rule("Einsum", inputs, {"equation": equation}, symbolic=symbolic, second=True)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("opset", [18, 22])
def test_det(size: int, batch: tuple[int, ...], opset: int) -> None:
    for symbolic in (False, True):
        x = normal(*batch, size, size)
        check_against_torch("Det", torch.linalg.det, [x], opset=opset, symbolic=symbolic, tolerance=1e-4)


def test_det_twice() -> None:
    for symbolic in (False, True):
        check_rule("Det", [normal(3, 3)], symbolic=symbolic, second=False)
    model, feeds = one_node("Det", [normal(3, 3)], symbolic=False)
    built = ortgrad.build_gradient_model(model, wrt=["a"])
    ortgrad.check_gradients(built, feeds, wrt=["a"], of=["a_grad"]).raise_if_wrong()


def test_det_of_a_singular_matrix() -> None:
    x = np.array([[1, 2, 3], [2, 4, 6], [0, 1, 0]], np.float32)
    model, feeds = one_node("Det", [x], symbolic=False)
    grad = gradients(model, feeds, {"y": np.ones((), np.float32)}, ["a"])["a"]
    np.testing.assert_allclose(grad, [[-6, 0, 2], [3, 0, -1], [0, 0, 0]], atol=1e-5)


FOURIER: list[tuple[tuple[int, ...], int | None, dict[str, int]]] = [
    ((2, 6, 1), None, {}),
    ((2, 6, 2), None, {}),
    ((2, 5, 1), None, {"onesided": 1}),
    ((2, 6, 1), None, {"onesided": 1}),
    ((2, 6, 2), None, {"inverse": 1}),
    ((2, 6, 1), None, {"inverse": 1}),
    ((2, 4, 2), None, {"inverse": 1, "onesided": 1}),
    ((2, 6, 1), 4, {}),
    ((2, 6, 2), 9, {"inverse": 1}),
    ((2, 6, 1), 4, {"onesided": 1}),
    ((2, 6, 1), 9, {"onesided": 1}),
    ((2, 4, 2), 7, {"inverse": 1, "onesided": 1}),
    ((2, 5, 2), 8, {"inverse": 1, "onesided": 1}),
]


@pytest.mark.parametrize(("shape", "length", "attributes"), FOURIER, ids=str)
def test_dft(shape: tuple[int, ...], length: int | None, attributes: dict[str, int]) -> None:
    x = normal(*shape)
    count = None if length is None else np.array(length)
    known = [] if length is None else [1]
    check_rule("DFT", [x, count], attributes, opset=20, constants=known, symbolic=False)
    check_rule("DFT", [x, count], attributes, opset=18)
    check_rule("DFT", [x[0], count, np.array(0)], attributes, opset=20)
    check_rule("DFT", [x, count, np.array(-2)], attributes, opset=20, constants=[*known, 2])


def test_dft_refuses() -> None:
    inputs, attributes = [normal(2, 3, 2), np.array(8)], {"inverse": 1, "onesided": 1}
    model, _ = one_node("DFT", inputs, attributes, opset=20, constants=[1], symbolic=False)
    with pytest.raises(ortgrad.UnsupportedGradientError, match="3 frequencies"):
        ortgrad.build_gradient_model(model, wrt=["a"])


def test_dft_like_torch() -> None:
    def rfft(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.view_as_real(torch.fft.rfft(x[..., 0], n=8, dim=0))

    inputs = [normal(6, 3, 1), np.array(8), np.array(0)]
    check_against_torch("DFT", rfft, inputs, {"onesided": 1}, opset=20, tolerance=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3), (2, 4, 3), (2, 1, 4, 3)])
def test_matmul_of_an_unknown_number_of_dimensions(shape: tuple[int, ...]) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (double[N] x, int64[R] s, double[3,2] w) => (double y) {
            t = Reshape <allowzero = 1> (x, s)
            y = MatMul(t, w)
        }"""
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    generator = np.random.default_rng(0)
    x, w = generator.standard_normal(int(np.prod(shape))), generator.standard_normal((3, 2))
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    seed = generator.standard_normal((*shape[:-1], 2))
    feeds = {"x": x, "s": np.array(shape, np.int64), "w": w, "y_grad": seed}
    _, dx, dw = ortgrad.InferenceSession(built).run(None, feeds)
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    (tx.reshape(shape) @ tw).backward(torch.tensor(seed))
    np.testing.assert_allclose(dx, tx.grad.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dw, tw.grad.numpy(), rtol=1e-9, atol=1e-12)
