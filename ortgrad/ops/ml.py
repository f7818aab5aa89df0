"""Gradient rules of ai.onnx.ml: scalers, linear models and support vector machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from onnx import TensorProto

from ortgrad.autodiff.rules import ForwardNode, Gradients, elementwise, gradient, no_gradient
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._types import cast_like

ML = "ai.onnx.ml"

# Piecewise constant.
no_gradient("Binarizer", "OneHotEncoder", "LabelEncoder", "CategoryMapper", domain=ML)
no_gradient("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", domain=ML)


@gradient("Scaler", domain=ML)
def scaler_gradient(node: ForwardNode) -> ir.Value:
    """dX = dY * scale, one factor or one per feature"""
    op, dy, x = node.op, node.grad(0), node.input(0)
    scale = np.array(node.attribute("scale") or [1.0], np.float32)
    if scale.size == 1:
        return dy * op.CastLike(op.constant(scale.reshape(())), dy)
    # onnxruntime repeats the factors over all elements, for any number of dimensions.
    rows = op.Reshape(dy, [-1, scale.size]) * op.CastLike(op.constant(scale), dy)
    return op.Reshape(rows, op.shape_of(x), allowzero=1)


@gradient("Normalizer", domain=ML)
def normalizer_gradient(node: ForwardNode) -> ir.Value:
    """dX = (dY - d norm / dX * sum(dY * Y)) / norm, and 0 in rows of zeros"""
    op, dy, y = node.op, node.grad(0), node.output(0)
    x = cast_like(op, node.input(0), dy)
    kind = node.attribute("norm")
    if kind == "L2":
        norm = op.ReduceL2(x, [-1])
        slope = y
    elif kind == "L1":
        norm = op.ReduceL1(x, [-1])
        slope = op.Sign(x)
    elif kind == "MAX":
        # The largest element, not the largest magnitude.
        norm = op.ReduceMax(x, [-1])
        largest = op.CastLike(op.Equal(x, norm), x)
        slope = largest / op.ReduceSum(largest, [-1])
    else:
        raise node.unsupported(f"its norm is {kind!r}; ONNX has MAX, L1 and L2")
    zero = op.Equal(norm, 0.0)
    # Where the norm is 0, onnxruntime returns X.
    dx = (dy - slope * op.ReduceSum(dy * y, [-1])) / op.Where(zero, 1.0, norm)
    return op.Where(zero, dy if kind == "MAX" else 0.0, dx)


def _imputer_gradient(
    op: Recorder, dy: ir.Value, y: ir.Value, x: ir.Value, *, replaced_value_float: float | None
) -> ir.Value:
    """dX = dY, and 0 where a value was missing"""
    replaced = replaced_value_float or 0.0
    missing = op.IsNaN(x) if math.isnan(replaced) else op.Equal(x, replaced)
    return op.Where(missing, 0.0, dy)


elementwise("Imputer", _imputer_gradient, domain=ML)


@gradient("FeatureVectorizer", domain=ML)
def feature_vectorizer_gradient(node: ForwardNode) -> Gradients:
    """dX = the columns of dY that come from X"""
    op, dy = node.op, node.grad(0)
    sizes = node.attribute("inputdimensions") or []
    if len(sizes) != len(node.inputs):
        raise node.unsupported(f"it has {len(node.inputs)} inputs and {len(sizes)} inputdimensions")
    grads, start = [], 0
    for i, size in enumerate(sizes):
        x = node.input(i)
        part = op.Slice(dy, [start], [start + size], [1])
        # Features beyond inputdimensions are cut off, missing ones are 0.
        batch = op.Shape(dy, end=1)
        own = op.Div(op.Size(x), op.Max(batch, op.constant(np.array([1], np.int64))))
        part = op.Pad(part, op.Concat([0, 0, 0], op.Sub(own, [size]), axis=0))
        grads.append(op.Reshape(part, op.shape_of(x), allowzero=1))
        start += size
    return grads


@gradient("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor_gradient(node: ForwardNode) -> ir.Value:
    """dX[.., indices] += dY, along the last axis"""
    op, dy, x = node.op, node.grad(0), node.input(0)
    indices = op.Reshape(node.input(1), [-1])
    rows = op.Reshape(dy, op.Concat([-1], op.Shape(indices), axis=0))
    shape = op.Concat(op.Shape(rows, end=1), op.Shape(x, start=-1), axis=0)
    return op.Reshape(op.GatherGrad(shape, indices, rows, axis=1), op.shape_of(x), allowzero=1)


@gradient("LinearRegressor", domain=ML)
def linear_regressor_gradient(node: ForwardNode) -> ir.Value:
    """dX = dS * coefficients, with dS the gradient before post_transform"""
    targets = int(node.attribute("targets") or 1)
    weights = _matrix(node, "coefficients", targets)
    return _rows_to_x(node, node.op.MatMul(_before_transform(node, 0), _constant(node, weights)))


@gradient("LinearClassifier", domain=ML)
def linear_classifier_gradient(node: ForwardNode) -> ir.Value:
    """dX = dS * coefficients, with dS the gradient of the scores before post_transform"""
    weights = _matrix(node, "coefficients", len(node.attribute("intercepts") or []))
    labels = node.attribute("classlabels_ints") or node.attribute("classlabels_strings") or []
    if len(weights) == 1 and len(labels) == 2:
        scores = _before_two_columns(node)
    else:
        scores = _before_transform(node, 1)
    return _rows_to_x(node, node.op.MatMul(scores, _constant(node, weights)))


@gradient("SVMRegressor", domain=ML)
def svm_regressor_gradient(node: ForwardNode) -> ir.Value | None:
    """dX = dY * coefficients * d kernel(X, support vectors) / dX; 0 with one_class, which is a sign"""
    if node.attribute("one_class"):
        return None
    op, count = node.op, int(node.attribute("n_supports") or 0)
    # onnxruntime does not apply post_transform.
    dy = op.Cast(node.grad(0), to=TensorProto.DOUBLE)
    if count == 0:
        return _rows_to_x(node, op.MatMul(dy, op.constant(_matrix(node, "coefficients", 1))))
    coefficients = op.constant(_matrix(node, "coefficients", 1))
    return _rows_to_x(node, _Kernel(node, count).grad(op.MatMul(dy, coefficients)))


@gradient("SVMClassifier", domain=ML)
def svm_classifier_gradient(node: ForwardNode) -> ir.Value:
    """dX = dS * coefficients * d kernel(X, support vectors) / dX, S the scores of pairs of classes"""
    op = node.op
    sizes = [int(n) for n in node.attribute("vectors_per_class") or []]
    if not sizes:
        labels = node.attribute("classlabels_ints") or node.attribute("classlabels_strings") or []
        if node.attribute("prob_a"):
            raise node.unsupported("it has probabilities (prob_a), but no support vectors")
        weights = op.constant(_matrix(node, "coefficients", len(labels)))
        return _rows_to_x(node, op.MatMul(_double(op, _before_transform(node, 1)), weights))
    kernel = _Kernel(node, sum(sizes))
    by_pair = op.constant(_pairs(node, sizes))
    if node.attribute("prob_a"):
        rho = op.constant(np.array(node.attribute("rho"), np.float64))
        scores = op.MatMul(kernel.values, op.Transpose(by_pair, perm=[1, 0])) + rho
        grads = _before_probabilities(node, scores, len(sizes))
    elif len(sizes) == 2:
        grads = _double(op, _before_two_columns(node))
    else:
        grads = _double(op, _before_transform(node, 1))
    return _rows_to_x(node, kernel.grad(op.MatMul(grads, by_pair)))


def _matrix(node: ForwardNode, name: str, rows: int) -> np.ndarray:
    """An attribute as a matrix; onnxruntime reads its elements row by row."""
    given = np.array(node.attribute(name) or [], np.float64)
    if rows < 1 or given.size == 0 or given.size % rows:
        raise node.unsupported(f"its {given.size} {name} cannot be divided into {rows} rows")
    return given.reshape(rows, -1)


def _constant(node: ForwardNode, array: np.ndarray) -> ir.Value:
    return node.op.constant(array.astype(np.float32))


def _double(op: Recorder, value: ir.Value) -> ir.Value:
    return op.Cast(value, to=TensorProto.DOUBLE)


def _rows_to_x(node: ForwardNode, rows: ir.Value) -> ir.Value:
    """Rows of features in the shape of X, where a vector counts as one row, and in its element type."""
    op, x = node.op, node.input(0)
    if x.shape is None or len(x.shape) != 2:
        rows = op.Reshape(rows, op.shape_of(x), allowzero=1)
    return cast_like(op, rows, x)


def _before_transform(node: ForwardNode, i: int) -> ir.Value:
    """The gradient of the scores, given that of the i-th output, which is the scores after post_transform."""
    op, dy, y, kind = node.op, node.grad(i), node.output(i), node.attribute("post_transform")
    if kind == "NONE":
        return dy
    if kind == "LOGISTIC":
        return op.SigmoidGrad(dy, y)
    if kind in ("SOFTMAX", "SOFTMAX_ZERO"):
        # A score of 0, which SOFTMAX_ZERO leaves out of the sum, has a Y of 0 and no gradient.
        return op.SoftmaxGrad_13(dy, y, axis=1)
    if kind == "PROBIT":
        return dy * op.Exp(y * y * 0.5) * math.sqrt(2 * math.pi)
    raise node.unsupported(f"its post_transform {kind!r} is not one of ONNX's")


def _before_two_columns(node: ForwardNode) -> ir.Value:
    """The gradient of the score s of two classes; the output has a column for each.

    They are -s or 1 - s and s, or with LOGISTIC 1 - p and p. onnxruntime does not apply a SOFTMAX.
    """
    op, dy, y, kind = node.op, node.grad(1), node.output(1), node.attribute("post_transform")
    if kind == "PROBIT":
        raise node.unsupported("onnxruntime's PROBIT of a single score differs from ONNX's")
    ds = op.Gather(dy, [1], axis=1) - op.Gather(dy, [0], axis=1)
    return ds * op.ReduceProd(y, [1]) if kind == "LOGISTIC" else ds


class _Kernel:
    """The kernel of X and the support vectors: (rows, vectors), in double.

    Squared distances are differences of large numbers where features are not centred.
    """

    def __init__(self, node: ForwardNode, count: int) -> None:
        op = node.op
        vectors = _matrix(node, "support_vectors", count)
        parameters = node.attribute("kernel_params") or [0.0, 0.0, 0.0]
        if len(parameters) != 3:
            raise node.unsupported(f"its {len(parameters)} kernel_params are not gamma, coef0 and degree")
        self.op, self.kind = op, node.attribute("kernel_type")
        self.gamma, self.coef0, self.degree = (float(p) for p in parameters)
        self.vectors = op.constant(vectors)
        self.x = op.Reshape(_double(op, node.input(0)), [-1, vectors.shape[1]])
        self.dot = op.MatMul(self.x, op.Transpose(self.vectors, perm=[1, 0]))
        if self.kind == "LINEAR":
            self.values = self.dot
        elif self.kind == "POLY":
            self.inner = self.dot * self.gamma + self.coef0
            self.values = op.Pow(self.inner, op.number(self.degree, self.inner))
        elif self.kind == "RBF":
            squares = op.ReduceSumSquare(self.x, [1]) + op.constant(np.square(vectors).sum(axis=1))
            self.values = op.Exp((squares - self.dot * 2.0) * -self.gamma)
        elif self.kind == "SIGMOID":
            self.values = op.Tanh(self.dot * self.gamma + self.coef0)
        else:
            raise node.unsupported(f"its kernel_type {self.kind!r} is not one of ONNX's")

    def grad(self, grads: ir.Value) -> ir.Value:
        """The gradient of X, given that of the values."""
        op = self.op
        if self.kind == "RBF":
            weights = grads * self.values * (-2 * self.gamma)
            return self.x * op.ReduceSum(weights, [1]) - op.MatMul(weights, self.vectors)
        if self.kind == "POLY":
            power = op.Pow(self.inner, op.number(self.degree - 1, self.inner))
            grads = grads * power * (self.degree * self.gamma)
        elif self.kind == "SIGMOID":
            grads = grads * (1.0 - self.values * self.values) * self.gamma
        return op.MatMul(grads, self.vectors)


def _pairs(node: ForwardNode, sizes: Sequence[int]) -> np.ndarray:
    """The coefficients by pair of classes and support vector, as libsvm stores them.

    Each vector of a class has one coefficient for every other class.
    """
    given = _matrix(node, "coefficients", len(sizes) - 1)
    if given.shape[1] != sum(sizes):
        raise node.unsupported(f"it has {given.shape[1]} coefficients per class for {sum(sizes)} vectors")
    ends = np.cumsum(sizes)
    own = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    rows = []
    for i, j in combinations(range(len(sizes)), 2):
        row = np.zeros(sum(sizes))
        row[own[i]], row[own[j]] = given[j - 1, own[i]], given[i, own[j]]
        rows.append(row)
    return np.array(rows)


def _before_probabilities(node: ForwardNode, scores: ir.Value, classes: int) -> ir.Value:
    """The gradient of the scores of pairs, given that of the probabilities of classes.

    The probabilities p minimize the sum of (r_ji p_i - r_ij p_j)^2, where r_ij = sigmoid(-(a s + b)) is
    the probability of class i in the pair (i, j). They are a part of M^-1, where M is a symmetric matrix of
    products of r.
    onnxruntime iterates towards them, to about 1e-3; here they are exact.
    """
    op, pairs = node.op, list(combinations(range(classes), 2))
    slopes, offsets = (np.array(node.attribute(name), np.float64) for name in ("prob_a", "prob_b"))
    if slopes.size != len(pairs) or offsets.size != len(pairs):
        raise node.unsupported(
            f"it has {slopes.size} prob_a and {offsets.size} prob_b for {len(pairs)} pairs"
        )
    dp = _double(op, _before_transform(node, 1))
    chance = op.Sigmoid(-(scores * op.constant(slopes) + op.constant(offsets)))
    slope = chance * (1.0 - chance) * op.constant(-slopes)
    if classes == 2:
        return (op.Gather(dp, [0], axis=1) - op.Gather(dp, [1], axis=1)) * slope
    # (rows, classes, classes), with zeros on the diagonal.
    places = np.full((classes, classes), 2 * len(pairs), np.int64)
    for e, (i, j) in enumerate(pairs):
        places[i, j], places[j, i] = e, len(pairs) + e
    columns = op.Pad(op.Concat(chance, 1.0 - chance, axis=1), [0, 0, 0, 1])
    r = op.Gather(columns, places, axis=1)
    turned = op.Transpose(r, perm=[0, 2, 1])
    diagonal = op.constant(np.eye(classes)) * op.ReduceSum(r * r, [1])
    system = op.Pad(diagonal - r * turned, [0, 0, 0, 0, 1, 1])
    border = np.zeros((classes + 1, classes + 1))
    border[-1, :-1] = border[:-1, -1] = 1
    inverse = op.Slice(op.Inverse(system + op.constant(border), _domain="com.microsoft"), [0], [classes], [1])
    p = op.Slice(inverse, [classes], [classes + 1], [2])
    u = op.MatMul(op.Slice(inverse, [0], [classes], [2]), op.Unsqueeze(dp, [2]))
    # The gradient of the matrix, then of each r in its two off-diagonal products and in the diagonal.
    dm = -op.MatMul(u, op.Transpose(p, perm=[0, 2, 1]))
    own = op.ReduceSum(dm * op.constant(np.eye(classes)), [1])
    dr = r * own * 2.0 - (dm + op.Transpose(dm, perm=[0, 2, 1])) * turned
    flat = op.Reshape(dr, [0, classes * classes])
    flipped = [(j, i) for i, j in pairs]
    first, second = (np.array([i * classes + j for i, j in order], np.int64) for order in (pairs, flipped))
    return (op.Gather(flat, first, axis=1) - op.Gather(flat, second, axis=1)) * slope
