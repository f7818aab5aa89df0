"""Models of scikit-learn, converted by skl2onnx: gradients are differences of its own functions."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from support.differences import differences
from support.sessions import WAYS, session

import ortgrad

pytest.importorskip("skl2onnx")
from support.zoo.tabular import SMOOTH, STEPS, converted, fitted

X = np.random.default_rng([2, 3, 4]).standard_normal((3, 4)) + 2


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name: str) -> None:
    """In float32 if that is enough: a Gaussian process has an inverse matrix that is too much for it."""
    estimator = fitted(name)
    x = X if "GaussianProcess" in name else X.astype(np.float32)
    exact = x.astype(np.float64)
    model = converted(estimator, x)
    of = model.graph.output[-1].name
    y = onnxruntime.InferenceSession(model.SerializeToString()).run([of], {"X": x})[0]

    def function(x: np.ndarray) -> np.ndarray:
        found = getattr(estimator, SMOOTH[name][1])(x)
        # The signs are skl2onnx's.
        return np.stack([found, -found], axis=1) if name == "SVC of two" else found.reshape(y.shape)

    np.testing.assert_allclose(y, function(exact), rtol=1e-4, atol=1e-5)
    seed = np.random.default_rng(4).standard_normal(y.shape)
    numeric = differences(lambda x: float(np.sum(seed * function(x))), exact, 1e-5)
    built = ortgrad.build_gradient_model(model, wrt="X", of=of)
    for way in WAYS:
        grad = session(built, way).run(["X_grad"], {"X": x, f"{of}_grad": seed.astype(x.dtype)})[0]
        np.testing.assert_allclose(grad, numeric, rtol=0, atol=1e-4 * np.abs(numeric).max())


@pytest.mark.parametrize("name", STEPS)
def test_steps_say_so(name: str) -> None:
    model = converted(fitted(name), X.astype(np.float32))
    with pytest.warns(ortgrad.StoppedGradientWarning, match=f"stopped by {STEPS[name][1]} node"):
        ortgrad.build_gradient_model(model, wrt="X")


def test_maps_name_the_probabilities() -> None:
    """By default skl2onnx ends in a ZipMap, whose maps have no gradient."""
    from skl2onnx import to_onnx

    model = to_onnx(fitted("StandardScaler, LogisticRegression"), np.zeros((1, 4), np.float32))
    with pytest.raises(ortgrad.ModelError, match="such as 'probabilities'"):
        ortgrad.build_gradient_model(model, wrt="X")
    assert ortgrad.build_gradient_model(model, wrt="X", of="probabilities").graph.output


@pytest.mark.parametrize("name", ["StandardScaler, LogisticRegression", "SVR"])
def test_check_judges_them(name: str) -> None:
    x = X.astype(np.float32)
    ortgrad.check_gradients(converted(fitted(name), x), {"X": x}, wrt=["X"]).raise_if_wrong()
