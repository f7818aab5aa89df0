"""Training of scikit-learn's estimators, converted by skl2onnx, against the same networks in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional

from ortgrad.errors import TrainingError, TrainingModelError
from ortgrad.training import SGD, Trainer, add_loss, export, fit, parameters

pytest.importorskip("skl2onnx")
import skl2onnx
from sklearn import decomposition, ensemble, linear_model, neural_network, svm
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

RNG = np.random.default_rng(0)
X = RNG.normal(1, 2, (60, 4)).astype(np.float32)
NOISY = X + RNG.normal(0, 2, X.shape)
THREE, TWO = NOISY[:, :3].argmax(1), (NOISY[:, 0] > 1).astype(np.int64)
LABELS = NOISY[:, :3] > 1
WORDS = np.array(["pear", "apple", "fig"])
MLP: dict[str, Any] = {"hidden_layer_sizes": (5,), "max_iter": 3, "random_state": 0}
LINEAR: dict[str, Any] = {"max_iter": 2}


def _converted(
    estimator: Any, y: np.ndarray, zipmap: Any = None, *, scaled: bool = True
) -> tuple[Any, onnx.ModelProto]:
    """Return a fitted pipeline with a scaler, and the model that skl2onnx makes of it."""
    pipeline = make_pipeline(StandardScaler(with_mean=scaled, with_std=scaled), estimator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence: there is something left to train
        pipeline.fit(X, y)
        options = None if zipmap is None else {id(pipeline): {"zipmap": zipmap}}
        made = skl2onnx.to_onnx(pipeline if scaled else pipeline[-1], X[:1], options=options)
    return pipeline, onnx.ModelProto.FromString(made.SerializeToString())


def _layers(estimator: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the matrices (inputs, outputs) and biases of a neural network or a linear model."""
    if hasattr(estimator, "coefs_"):
        return list(zip(estimator.coefs_, estimator.intercepts_, strict=True))
    return [(np.atleast_2d(estimator.coef_).T, np.atleast_1d(estimator.intercept_))]


def _trained_by_torch(pipeline: Any, y: np.ndarray, loss: Callable[..., torch.Tensor]) -> np.ndarray:
    """Train the network in PyTorch, in double, and return its scores."""
    x = torch.tensor(pipeline[0].transform(X.astype(np.float64)))
    layers = [
        (torch.tensor(w, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        for w, b in _layers(pipeline[-1])
    ]
    tensors = [tensor.requires_grad_() for layer in layers for tensor in layer]
    optimizer = torch.optim.SGD(tensors, lr=0.3, momentum=0.5)

    def scores() -> torch.Tensor:
        value = x
        for i, (w, b) in enumerate(layers):
            value = value @ w + b
            value = functional.relu(value) if i + 1 < len(layers) else value
        return value

    for _ in range(8):
        optimizer.zero_grad()
        loss(scores(), torch.tensor(y)).backward()
        optimizer.step()
    return scores().detach().numpy()


def _fitted(model: onnx.ModelProto, y: np.ndarray, loss: str, **options: Any) -> Any:
    optimizer = SGD(learning_rate=0.3, momentum=0.5)
    return fit(model, (X, y), loss=loss, optimizer=optimizer, epochs=8, batch_size=60, **options)


def _predicted(model: onnx.ModelProto) -> list[Any]:
    """Return labels and probabilities in plain onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # skl2onnx declares the labels of several classes with a wrong shape
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    found = session.run(None, {"X": X})
    if len(found) > 2:
        found = [found[0], np.stack(found[1:], axis=1)]
    if len(found) == 2 and isinstance(found[1], list):
        found[1] = np.array([list(row.values()) for row in found[1]])
    return list(found)


def _binary(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(scores[:, 0], y.double())


def _softmax(scores: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.tensor(scores), 1).numpy()


def _sigmoid(scores: np.ndarray) -> np.ndarray:
    return torch.sigmoid(torch.tensor(scores)).numpy()


CLASSIFIERS = {
    "network": lambda: neural_network.MLPClassifier(**MLP),
    "logistic": lambda: linear_model.LogisticRegression(**LINEAR),
}


@pytest.mark.parametrize(
    ("kind", "classes", "labels", "zipmap"),
    [
        ("network", 2, "numbers", None),
        ("network", 2, "words", False),
        ("network", 3, "words", None),
        ("network", 3, "others", False),
        ("network", 3, "numbers", "columns"),
        ("logistic", 2, "others", None),
        ("logistic", 2, "words", "columns"),
        ("logistic", 3, "numbers", None),
        ("logistic", 3, "words", False),
    ],
)
def test_classifiers(kind: str, classes: int, labels: str, zipmap: Any) -> None:
    """The data has labels as the estimator knows them."""
    numbers = TWO if classes == 2 else THREE
    # In the order of scikit-learn, which sorts them.
    names = {"numbers": np.arange(3), "others": np.array([3, 7, 11]), "words": np.sort(WORDS)}[labels]
    y = names[numbers]
    pipeline, model = _converted(CLASSIFIERS[kind](), y, zipmap)
    loss = _binary if classes == 2 else functional.cross_entropy
    scores = _trained_by_torch(pipeline, numbers, loss)
    wanted = _softmax(scores) if classes == 3 else np.hstack([1 - _sigmoid(scores), _sigmoid(scores)])
    result = _fitted(model, y, "cross-entropy", evaluate=(X, y), metric="accuracy")
    label, probabilities = _predicted(result.model)
    np.testing.assert_allclose(probabilities, wanted, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(label, names[wanted.argmax(1)])
    assert result.metric == np.mean(label == y)
    # The model is the one that was given, with other numbers.
    assert [node.op_type for node in result.model.graph.node] == [node.op_type for node in model.graph.node]
    if classes == 2:
        other = _fitted(model, y, "bce", evaluate=(X, y), metric="accuracy")
        np.testing.assert_allclose(_predicted(other.model)[1], wanted, rtol=0, atol=2e-5)
        assert other.metric == result.metric


@pytest.mark.parametrize("kind", ["network", "linear", "linear of two"])
def test_regressors(kind: str) -> None:
    """A vector is a target for a single column."""
    estimator = neural_network.MLPRegressor(**MLP) if kind == "network" else linear_model.Ridge(1e4)
    y = (NOISY[:, :2] if kind == "linear of two" else NOISY[:, 0]).astype(np.float32)
    pipeline, model = _converted(estimator, y)
    columns = y.reshape(60, -1).astype(np.float64)
    scores = _trained_by_torch(pipeline, columns, functional.mse_loss)
    (found,) = _predicted(_fitted(model, y, "mse").model)
    np.testing.assert_allclose(found, scores, rtol=0, atol=2e-4)


def test_several_labels() -> None:
    pipeline, model = _converted(neural_network.MLPClassifier(**MLP), LABELS.astype(np.int64))
    loss = functional.binary_cross_entropy_with_logits
    scores = _trained_by_torch(pipeline, LABELS.astype(np.float64), loss)
    found = _predicted(_fitted(model, LABELS, "bce").model)
    np.testing.assert_allclose(found[1], _sigmoid(scores), rtol=0, atol=2e-5)
    with pytest.raises(TrainingModelError, match="'bce'"):
        _fitted(model, THREE, "cross-entropy")


@pytest.mark.parametrize("classes", [2, 3])
def test_one_versus_rest(classes: int) -> None:
    """The probabilities of SGDClassifier are sigmoids that are divided by their sum."""
    numbers = TWO if classes == 2 else THREE
    estimator = linear_model.SGDClassifier(loss="log_loss", eta0=0.01, learning_rate="constant", max_iter=2)
    pipeline, model = _converted(estimator, numbers)

    def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(torch.log(functional.normalize(torch.sigmoid(scores), p=1)), y)

    scores = _trained_by_torch(pipeline, numbers, _binary if classes == 2 else loss)
    single = _sigmoid(scores)
    wanted = np.hstack([1 - single, single]) if classes == 2 else single / single.sum(1, keepdims=True)
    result = _fitted(model, numbers, "cross-entropy")
    np.testing.assert_allclose(_predicted(result.model)[1], wanted, rtol=0, atol=2e-5)
    assert set(result.state.trainable.arrays) == {"coef", "intercept"}


@pytest.mark.parametrize("estimator", [svm.LinearSVC(), linear_model.Perceptron()], ids=["svc", "perceptron"])
@pytest.mark.parametrize("classes", [2, 3])
def test_classifiers_without_probabilities(estimator: Any, classes: int) -> None:
    numbers = TWO if classes == 2 else THREE
    # skl2onnx does not convert a LinearSVC in a pipeline.
    pipeline, model = _converted(estimator, numbers, scaled=False)
    scores = _trained_by_torch(pipeline, numbers, _binary if classes == 2 else functional.cross_entropy)
    label, *_ = _predicted(_fitted(model, numbers, "cross-entropy").model)
    wanted = scores.argmax(1) if classes == 3 else (scores[:, 0] > 0).astype(np.int64)
    assert np.mean(label == wanted) > 0.98  # one sample may be at the boundary


def test_converges_to_scikit_learn() -> None:
    """From zeros, without regularization, to the coefficients that scikit-learn finds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = linear_model.LogisticRegression(C=np.inf, tol=1e-8).fit(X, TWO)
        model = skl2onnx.to_onnx(exact, X[:1])
    names = parameters(model)
    assert names == ["LinearClassifier.coefficients", "LinearClassifier.intercepts"]
    start = export(model, {names[0]: np.zeros((1, 4), np.float32), names[1]: np.zeros(1, np.float32)})
    result = fit(
        start, (X, TWO), loss="cross-entropy", optimizer="sgd", learning_rate=0.3, epochs=2000, batch_size=60
    )
    np.testing.assert_allclose(result.state.parameter(names[0]), exact.coef_, rtol=0, atol=2e-3)
    np.testing.assert_allclose(result.state.parameter(names[1]), exact.intercept_, rtol=0, atol=2e-3)


def test_labels_that_are_refused() -> None:
    _, model = _converted(CLASSIFIERS["network"](), WORDS[THREE])
    with pytest.raises(
        TrainingError, match=r"has the label 'plum', but the classes .* are 'apple', 'fig', 'pear'"
    ):
        _fitted(model, np.array(["plum"] * 60), "cross-entropy")
    with pytest.raises(TrainingError, match="has the label 2, but the classes of the model are 'apple'"):
        _fitted(model, THREE, "cross-entropy")
    _, model = _converted(CLASSIFIERS["logistic"](), THREE + 1)
    with pytest.raises(TrainingError, match="has the label 0, but the classes of the model are 1, 2, 3"):
        _fitted(model, THREE, "cross-entropy")


def test_ignored_labels() -> None:
    """The label that is ignored may be any number, also that of a class among 0, 1, 2."""
    _, model = _converted(CLASSIFIERS["logistic"](), THREE + 1)
    y = np.where(np.arange(60) < 30, THREE + 1, 0)
    found = Trainer(model, loss="cross-entropy", ignore_index=0)
    wanted = Trainer(model, loss="cross-entropy")
    assert found.evaluate((X, y), "accuracy", batch_size=60) == pytest.approx(
        wanted.evaluate((X[:30], y[:30]), "accuracy", batch_size=60)
    )


def test_a_function_gets_probabilities() -> None:
    """A metric or a loss of one's own is of what the model returns, not of the scores behind it."""
    _, model = _converted(CLASSIFIERS["network"](), THREE)
    sums = []
    trainer = Trainer(model, loss="cross-entropy")
    trainer.evaluate((X, THREE), lambda output, target: sums.append(output.sum(1)) or 0.0)
    np.testing.assert_allclose(sums[0], 1, rtol=1e-5)


def test_weights_of_linear_models_are_chosen_like_others() -> None:
    _, model = _converted(CLASSIFIERS["logistic"](), THREE)
    before = parameters(model)
    result = fit(model, (X, THREE), loss="cross-entropy", exclude="*.intercepts")
    assert list(result.state.trainable.arrays) == before[:1]
    with_loss = add_loss(model, "cross-entropy")
    assert parameters(with_loss) == before
    with pytest.raises(TrainingModelError, match="is float32\\[3, 5\\]"):
        export(model, {before[0]: np.zeros((3, 5), np.float32)})


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (ensemble.RandomForestClassifier(2, max_depth=2), "decision trees.*fit them again"),
        (svm.SVC(), "support vectors.*LinearSVC"),
        (make_pipeline(decomposition.PCA(2), ensemble.RandomForestClassifier(2)), "decision trees"),
    ],
    ids=["forest", "svc", "forest behind a matrix"],
)
def test_what_cannot_be_trained(estimator: Any, words: str) -> None:
    _, model = _converted(estimator, THREE)
    with pytest.raises(TrainingModelError, match=words):
        _fitted(model, THREE, "cross-entropy")
