"""Gradient rules of ai.onnx.ml.

The oracle is each operator in NumPy, in float64: it must compute what onnxruntime computes, and its
differences must be the gradients. tests/sweeps/test_zoo_tabular.py has scikit-learn's models of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from support.differences import differences
from support.rules import one_node
from support.sessions import WAYS, session

import ortgrad

ML = "ai.onnx.ml"
Function = Callable[..., np.ndarray]


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def check(
    op_type: str,
    inputs: list[np.ndarray],
    attributes: dict[str, Any],
    function: Function,
    *,
    types: tuple[type, ...] = (np.float32,),
    classifier: bool = False,
    ways: tuple[str, ...] = ("auto",),
    forward: float = 1e-5,
) -> None:
    """Compare with the function of the floating-point inputs, and its differences, in float64."""
    of = "z" if classifier else "y"
    floating = [i for i, array in enumerate(inputs) if array.dtype.kind == "f"]
    for dtype in types:
        given = [array.astype(dtype) if i in floating else array for i, array in enumerate(inputs)]
        exact = [array.astype(np.float64) if i in floating else array for i, array in enumerate(given)]
        for symbolic in (True, False):
            model, feeds = one_node(
                op_type,
                given,
                attributes,
                domain=ML,
                symbolic=symbolic,
                outputs=(np.int64, np.float32) if classifier else (np.float32,),
            )
            plain = onnxruntime.InferenceSession(model.SerializeToString())
            result = dict(zip([o.name for o in plain.get_outputs()], plain.run(None, feeds), strict=True))[of]
            expected = function(*exact)
            np.testing.assert_allclose(result, expected, rtol=forward, atol=forward)
            seed = rows(*expected.shape, seed=5).astype(np.float32)
            wrt = ["abc"[i] for i in floating]
            built = ortgrad.build_gradient_model(model, wrt=wrt, of=of)
            for way in ways:
                found = session(built, way).run(
                    [f"{name}_grad" for name in wrt], {**feeds, f"{of}_grad": seed}
                )
                for i, grad in zip(floating, found, strict=True):
                    numeric = differences(_loss(function, exact, i, seed), exact[i])
                    assert grad.dtype == dtype
                    np.testing.assert_allclose(
                        grad, numeric, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(numeric).max()))
                    )


def _loss(function: Function, inputs: list[np.ndarray], i: int, seed: np.ndarray) -> Callable[..., float]:
    return lambda x: float(np.sum(seed * function(*inputs[:i], x, *inputs[i + 1 :])))


WIDE = (np.float32, np.float64)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("scale", [[2.0], [0.5, 2.0, -1.0]], ids=str)
def test_scaler(shape: tuple[int, ...], scale: list[float]) -> None:
    offset = [0.25] * len(scale)

    def scaled(x: np.ndarray) -> np.ndarray:
        # onnxruntime repeats the factors over all elements.
        return ((x.reshape(-1, 3) - offset) * scale).reshape(x.shape)

    check("Scaler", [rows(*shape)], {"offset": offset, "scale": scale}, scaled, types=WIDE)


NORMS: dict[str, Function] = {
    "MAX": lambda x: np.max(x, axis=-1, keepdims=True),
    "L1": lambda x: np.sum(np.abs(x), axis=-1, keepdims=True),
    "L2": lambda x: np.sqrt(np.sum(x * x, axis=-1, keepdims=True)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=str)
def test_normalizer(norm: str, shape: tuple[int, ...]) -> None:
    check("Normalizer", [rows(*shape)], {"norm": norm}, lambda x: x / NORMS[norm](x), types=WIDE)


@pytest.mark.parametrize("norm", NORMS)
def test_normalizer_of_zeros(norm: str) -> None:
    model, feeds = one_node("Normalizer", [np.zeros((1, 3), np.float32)], {"norm": norm}, domain=ML)
    built = ortgrad.build_gradient_model(model, wrt="a")
    found = session(built, "auto").run(["a_grad"], {**feeds, "y_grad": np.ones((1, 3), np.float32)})
    assert np.isfinite(found[0]).all()


@pytest.mark.parametrize("replaced", [float("nan"), 3.0])
def test_imputer(replaced: float) -> None:
    x = np.array([[1.0, 3.0, -1.0], [3.0, 0.5, 2.0]], np.float32)
    x[x == 3] = replaced
    attributes = {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": replaced}
    model, feeds = one_node("Imputer", [x], attributes, domain=ML)
    built = ortgrad.build_gradient_model(model, wrt="a")
    seed = rows(2, 3).astype(np.float32)
    y, grad = session(built, "auto").run(["y", "a_grad"], {**feeds, "y_grad": seed})
    missing = np.array([[False, True, False], [True, False, False]])
    np.testing.assert_array_equal(y, np.where(missing, [7, 8, 9], x))
    np.testing.assert_array_equal(grad, np.where(missing, 0, seed))


@pytest.mark.parametrize("sizes", [[3, 2], [2, 3], [3, 1]], ids=str)
def test_feature_vectorizer(sizes: list[int]) -> None:
    def columns(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = [np.pad(x, [(0, 0), (0, 3)])[:, :size] for x, size in zip((a, b), sizes, strict=True)]
        return np.concatenate(wide, axis=1)

    check("FeatureVectorizer", [rows(4, 3), rows(4, 2)], {"inputdimensions": sizes}, columns, types=WIDE)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 2, 3)], ids=str)
def test_array_feature_extractor(shape: tuple[int, ...]) -> None:
    def extracted(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return np.atleast_2d(x[..., indices.reshape(-1)])

    check("ArrayFeatureExtractor", [rows(*shape), np.array([[2, 0, 2]])], {}, extracted)


TRANSFORMS: dict[str, Function] = {
    "NONE": lambda s: s,
    "LOGISTIC": lambda s: 1 / (1 + np.exp(-s)),
    "SOFTMAX": lambda s: np.exp(s) / np.exp(s).sum(axis=1, keepdims=True),
    "SOFTMAX_ZERO": lambda s: np.exp(s) / np.exp(s).sum(axis=1, keepdims=True),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=str)
def test_linear_models(transform: str, shape: tuple[int, ...]) -> None:
    weights, intercepts = rows(2, 3), [0.5, -0.25]
    common = {
        "coefficients": weights.reshape(-1).tolist(),
        "intercepts": intercepts,
        "post_transform": transform,
    }

    def scores(x: np.ndarray) -> np.ndarray:
        return TRANSFORMS[transform](np.atleast_2d(x) @ weights.T + intercepts)

    check("LinearRegressor", [rows(*shape)], {**common, "targets": 2}, scores)
    labels = {"classlabels_ints": [3, 5]}
    check("LinearClassifier", [rows(*shape)], {**common, **labels}, scores, types=WIDE, classifier=True)


def test_probit() -> None:
    from statistics import NormalDist

    # onnxruntime approximates the function to 1e-3.
    x, weights = np.abs(rows(4, 3)) * 0.1, np.full((2, 3), 0.5)
    attributes = {
        "coefficients": [0.5] * 6,
        "intercepts": [0.3, 0.6],
        "targets": 2,
        "post_transform": "PROBIT",
    }
    probit = np.vectorize(NormalDist().inv_cdf)
    model, feeds = one_node("LinearRegressor", [x.astype(np.float32)], attributes, domain=ML)
    built = ortgrad.build_gradient_model(model, wrt="a")
    y, grad = session(built, "auto").run(["y", "a_grad"], {**feeds, "y_grad": np.ones((4, 2), np.float32)})
    np.testing.assert_allclose(y, probit(x @ weights.T + [0.3, 0.6]), atol=5e-3)
    numeric = differences(lambda x: float(np.sum(probit(x @ weights.T + [0.3, 0.6]))), x)
    np.testing.assert_allclose(grad, numeric, rtol=5e-3)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_classifier_of_one_score(transform: str) -> None:
    """Two classes and one row of coefficients: onnxruntime writes 1 - s and s, without a SOFTMAX."""
    weights = rows(1, 3)

    def columns(x: np.ndarray) -> np.ndarray:
        score = x @ weights.T + 0.5
        score = TRANSFORMS["LOGISTIC"](score) if transform == "LOGISTIC" else score
        return np.concatenate([1 - score, score], axis=1)

    attributes = {
        "coefficients": weights.reshape(-1).tolist(),
        "intercepts": [0.5],
        "classlabels_ints": [0, 1],
        "post_transform": transform,
    }
    check("LinearClassifier", [rows(4, 3)], attributes, columns, types=WIDE, classifier=True)


KERNELS = ["LINEAR", "POLY", "RBF", "SIGMOID"]
PARAMETERS = [0.3, 0.2, 3.0]
VECTORS = rows(6, 3, seed=3)


def kernel(x: np.ndarray, kind: str) -> np.ndarray:
    gamma, coef0, degree = PARAMETERS
    dot = x @ VECTORS.T
    return {
        "LINEAR": dot,
        "POLY": (gamma * dot + coef0) ** degree,
        "RBF": np.exp(-gamma * np.sum((x[:, None] - VECTORS) ** 2, axis=-1)),
        "SIGMOID": np.tanh(gamma * dot + coef0),
    }[kind]


def svm(kind: str, **attributes: Any) -> dict[str, Any]:
    vectors = VECTORS.reshape(-1).tolist()
    return {"kernel_type": kind, "kernel_params": PARAMETERS, "support_vectors": vectors, **attributes}


@pytest.mark.parametrize("kind", KERNELS)
def test_svm_regressor(kind: str) -> None:
    weights = rows(6)
    attributes = svm(kind, coefficients=weights.tolist(), n_supports=6, rho=[0.4])
    check("SVMRegressor", [rows(4, 3)], attributes, lambda x: (kernel(x, kind) @ weights + 0.4)[:, None])
    # Without support vectors, onnxruntime uses the linear kernel, regardless of kernel_type.
    attributes = {
        "kernel_type": kind,
        "kernel_params": PARAMETERS,
        "coefficients": [1.0, 2.0, -3.0],
        "rho": [1.0],
    }
    check("SVMRegressor", [rows(4, 3)], attributes, lambda x: (x @ [1.0, 2.0, -3.0] + 1)[:, None])


def pair_scores(
    x: np.ndarray, sizes: list[int], weights: np.ndarray, rho: list[float], kind: str
) -> np.ndarray:
    values, ends = kernel(x, kind), np.cumsum(sizes)
    own = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    columns = [
        values[:, own[i]] @ weights[j - 1, own[i]] + values[:, own[j]] @ weights[i, own[j]] + rho[e]
        for e, (i, j) in enumerate(combinations(range(len(sizes)), 2))
    ]
    return np.stack(columns, axis=1)


def machine(sizes: list[int], kind: str, **more: Any) -> tuple[dict[str, Any], Function]:
    """The attributes of an SVMClassifier, and the scores of its pairs of classes."""
    classes = len(sizes)
    weights, rho = rows(classes - 1, 6, seed=7), rows(classes * (classes - 1) // 2).tolist()
    attributes = svm(
        kind,
        coefficients=weights.reshape(-1).tolist(),
        vectors_per_class=sizes,
        rho=rho,
        classlabels_ints=list(range(classes)),
        **more,
    )
    return attributes, lambda x: pair_scores(x, sizes, weights, rho, kind)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("sizes", [[3, 3], [2, 1, 3], [1, 2, 1, 2]], ids=str)
def test_svm_classifier(kind: str, sizes: list[int]) -> None:
    attributes, scores = machine(sizes, kind)

    def columns(x: np.ndarray) -> np.ndarray:
        found = scores(x)
        return np.concatenate([-found, found], axis=1) if len(sizes) == 2 else found

    types = WIDE if kind == "RBF" else (np.float32,)
    check("SVMClassifier", [rows(4, 3)], attributes, columns, types=types, classifier=True)


@pytest.mark.parametrize("transform", ["LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("sizes", [[3, 3], [2, 1, 3]], ids=str)
def test_svm_classifier_with_a_transform(transform: str, sizes: list[int]) -> None:
    attributes, scores = machine(sizes, "RBF", post_transform=transform)

    def columns(x: np.ndarray) -> np.ndarray:
        found = scores(x)
        if len(sizes) > 2:
            return TRANSFORMS[transform](found)
        first = -found if transform == "LOGISTIC" else 1 - found
        found = np.concatenate([first, found], axis=1)
        return TRANSFORMS["LOGISTIC"](found) if transform == "LOGISTIC" else found

    check("SVMClassifier", [rows(4, 3)], attributes, columns, classifier=True)


def test_svm_classifier_without_support_vectors() -> None:
    weights = rows(3, 3)
    attributes = {
        "coefficients": weights.reshape(-1).tolist(),
        "kernel_type": "LINEAR",
        "kernel_params": PARAMETERS,
        "rho": [0.3],
        "classlabels_ints": [0, 1, 2],
    }
    check("SVMClassifier", [rows(4, 3)], attributes, lambda x: x @ weights.T + 0.3, classifier=True)


@pytest.mark.parametrize("sizes", [[3, 3], [2, 1, 3], [1, 2, 1, 2]], ids=str)
def test_svm_probabilities(sizes: list[int]) -> None:
    """The minimum of Wu, Lin and Weng's second method; onnxruntime iterates until 0.005 is left."""
    classes = len(sizes)
    pairs = list(combinations(range(classes), 2))
    a, b = -np.abs(rows(len(pairs), seed=8)), rows(len(pairs), seed=9)
    attributes, scores = machine(sizes, "RBF", prob_a=a.tolist(), prob_b=b.tolist())

    def probabilities(x: np.ndarray) -> np.ndarray:
        found = []
        for row in 1 / (1 + np.exp(scores(x) * a + b)):
            r = np.zeros((classes, classes))
            for e, (i, j) in enumerate(pairs):
                r[i, j], r[j, i] = row[e], 1 - row[e]
            system = np.ones((classes + 1, classes + 1))
            system[-1, -1] = 0
            system[:-1, :-1] = np.diag((r * r).sum(axis=0)) - r * r.T
            found.append(np.linalg.solve(system, np.eye(classes + 1)[-1])[:-1])
        return np.array(found)

    check("SVMClassifier", [rows(4, 3)], attributes, probabilities, classifier=True, forward=5e-3)


@pytest.mark.parametrize("way", WAYS)
def test_ways(way: str) -> None:
    weights = rows(6)
    attributes = svm("RBF", coefficients=weights.tolist(), n_supports=6, rho=[0.4])
    ways = (way,)
    check(
        "SVMRegressor",
        [rows(4, 3)],
        attributes,
        lambda x: (kernel(x, "RBF") @ weights + 0.4)[:, None],
        ways=ways,
    )
    check("Normalizer", [rows(4, 3)], {"norm": "L2"}, lambda x: x / NORMS["L2"](x), ways=ways)
    linear = {
        "coefficients": rows(2, 3).reshape(-1).tolist(),
        "intercepts": [0.0, 1.0],
        "post_transform": "SOFTMAX",
    }
    check(
        "LinearClassifier",
        [rows(4, 3)],
        {**linear, "classlabels_ints": [0, 1]},
        lambda x: TRANSFORMS["SOFTMAX"](x @ rows(2, 3).T + [0, 1]),
        classifier=True,
        ways=ways,
    )
    check("ArrayFeatureExtractor", [rows(4, 3), np.array([[2, 0]])], {}, lambda x, i: x[:, i[0]], ways=ways)


EMPTY: list[tuple[str, dict[str, Any], bool]] = [
    ("Scaler", {"offset": [0.0] * 3, "scale": [1.0, 2.0, 3.0]}, False),
    ("Normalizer", {"norm": "L2"}, False),
    ("LinearRegressor", {"coefficients": [1.0, 2.0, 3.0]}, False),
    ("SVMRegressor", svm("RBF", coefficients=[1.0] * 6, n_supports=6, rho=[0.4]), False),
    ("SVMClassifier", machine([2, 1, 3], "RBF")[0], True),
    ("FeatureVectorizer", {"inputdimensions": [3]}, False),
]


@pytest.mark.parametrize(("op_type", "attributes", "classifier"), EMPTY, ids=[case[0] for case in EMPTY])
def test_no_rows(op_type: str, attributes: dict[str, Any], classifier: bool) -> None:
    outputs = (np.int64, np.float32) if classifier else (np.float32,)
    model, feeds = one_node(op_type, [np.zeros((0, 3), np.float32)], attributes, domain=ML, outputs=outputs)
    of = "z" if classifier else "y"
    plain = onnxruntime.InferenceSession(model.SerializeToString())
    seed = plain.run([of], feeds)[0]
    built = ortgrad.build_gradient_model(model, wrt="a", of=of)
    assert session(built, "auto").run(["a_grad"], {**feeds, f"{of}_grad": seed})[0].shape == (0, 3)


STOPS: dict[str, tuple[dict[str, Any], int]] = {
    "Binarizer": ({"threshold": 0.5}, 1),
    "OneHotEncoder": ({"cats_int64s": [0, 1], "zeros": 1}, 1),
    "LabelEncoder": ({"keys_floats": [0.0], "values_floats": [1.0]}, 1),
    "TreeEnsembleRegressor": ({}, 1),
    "TreeEnsembleClassifier": ({}, 2),
}


@pytest.mark.parametrize("op_type", STOPS)
def test_what_is_piecewise_constant_says_so(op_type: str) -> None:
    attributes, count = STOPS[op_type]
    outputs = (np.int64, np.float32) if count == 2 else (np.float32,)
    model, _ = one_node(op_type, [rows(4, 3).astype(np.float32)], attributes, domain=ML, outputs=outputs)
    with pytest.warns(ortgrad.StoppedGradientWarning, match=f"stopped by {op_type} node 'node'"):
        ortgrad.build_gradient_model(model, wrt="a", of="z" if count == 2 else "y")


def test_probit_of_one_score_is_refused() -> None:
    attributes = {
        "coefficients": [1.0, 2.0, 3.0],
        "intercepts": [0.0],
        "classlabels_ints": [0, 1],
        "post_transform": "PROBIT",
    }
    model, _ = one_node(
        "LinearClassifier",
        [rows(4, 3).astype(np.float32)],
        attributes,
        domain=ML,
        outputs=(np.int64, np.float32),
    )
    with pytest.raises(ortgrad.UnsupportedGradientError, match="PROBIT of a single score"):
        ortgrad.build_gradient_model(model, wrt="a", of="z")


def test_shapes_behind_them_are_known() -> None:
    """A product of the output of a Scaler needs its number of dimensions, which onnx does not infer."""
    scaler = helper.make_node("Scaler", ["x"], ["s"], domain=ML, offset=[0.0], scale=[2.0])
    normal = helper.make_node("Normalizer", ["s"], ["n"], domain=ML, norm="L2")
    product = helper.make_node("MatMul", ["n", "w"], ["y"])
    graph = helper.make_graph(
        [scaler, normal, product],
        "graph",
        [helper.make_tensor_value_info("x", 1, ["N", 3])],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(rows(3, 2).astype(np.float32), "w")],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(ML, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    dims = next(v for v in built.graph.input if v.name == "y_grad").type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == ["N", 2]
