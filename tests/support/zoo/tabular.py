"""Estimators of scikit-learn, fitted on a few rows."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
from sklearn import (
    cross_decomposition,
    decomposition,
    discriminant_analysis,
    ensemble,
    gaussian_process,
    linear_model,
    mixture,
    naive_bayes,
    neighbors,
    neural_network,
    preprocessing,
    svm,
)
from sklearn.gaussian_process import kernels
from sklearn.pipeline import make_pipeline

MLP: dict[str, Any] = {"activation": "tanh", "max_iter": 20, "random_state": 0}
MATERN = kernels.ConstantKernel(2.0) * kernels.Matern(nu=1.5) + kernels.DotProduct()

# By name: the estimator, and the method that its model computes.
SMOOTH: dict[str, tuple[Any, str]] = {
    "StandardScaler": (preprocessing.StandardScaler(), "transform"),
    "MinMaxScaler": (preprocessing.MinMaxScaler(), "transform"),
    "RobustScaler": (preprocessing.RobustScaler(), "transform"),
    "Normalizer l1": (preprocessing.Normalizer("l1"), "transform"),
    "Normalizer l2": (preprocessing.Normalizer("l2"), "transform"),
    "Normalizer max": (preprocessing.Normalizer("max"), "transform"),
    "TruncatedSVD": (decomposition.TruncatedSVD(2, random_state=0), "transform"),
    "KernelPCA": (decomposition.KernelPCA(2, kernel="rbf", gamma=0.2), "transform"),
    "KernelPCA poly": (decomposition.KernelPCA(2, kernel="poly", degree=2), "transform"),
    "LinearRegression": (linear_model.LinearRegression(), "predict"),
    "Ridge": (linear_model.Ridge(), "predict"),
    "PolynomialFeatures, Ridge": (
        make_pipeline(preprocessing.PolynomialFeatures(2), linear_model.Ridge()),
        "predict",
    ),
    "PLSRegression": (cross_decomposition.PLSRegression(2), "predict"),
    "LogisticRegression": (linear_model.LogisticRegression(), "predict_proba"),
    "StandardScaler, LogisticRegression": (
        make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()),
        "predict_proba",
    ),
    "StandardScaler, MLPRegressor": (
        make_pipeline(
            preprocessing.StandardScaler(), neural_network.MLPRegressor(hidden_layer_sizes=(5,), **MLP)
        ),
        "predict",
    ),
    "MLPClassifier": (neural_network.MLPClassifier(hidden_layer_sizes=(5,), **MLP), "predict_proba"),
    "SVR": (svm.SVR(), "predict"),
    "SVR poly": (svm.SVR(kernel="poly"), "predict"),
    "NuSVR sigmoid": (svm.NuSVR(kernel="sigmoid", gamma=0.05), "predict"),
    "PCA, SVR": (make_pipeline(decomposition.PCA(3), svm.SVR()), "predict"),
    "SVC of two": (svm.SVC(), "decision_function"),
    "SVC of three": (svm.SVC(decision_function_shape="ovr"), "decision_function"),
    "PCA, SVC": (make_pipeline(decomposition.PCA(3), svm.SVC()), "decision_function"),
    "GaussianNB": (naive_bayes.GaussianNB(), "predict_proba"),
    "LinearDiscriminantAnalysis": (discriminant_analysis.LinearDiscriminantAnalysis(), "predict_proba"),
    "QuadraticDiscriminantAnalysis": (discriminant_analysis.QuadraticDiscriminantAnalysis(), "predict_proba"),
    "GaussianMixture": (mixture.GaussianMixture(2, random_state=0), "predict_proba"),
    "GaussianProcessRegressor": (gaussian_process.GaussianProcessRegressor(alpha=0.1), "predict"),
    "GaussianProcessRegressor Matern": (
        gaussian_process.GaussianProcessRegressor(MATERN, alpha=0.1, optimizer=None),
        "predict",
    ),
    "VotingRegressor": (
        ensemble.VotingRegressor([("ridge", linear_model.Ridge()), ("svr", svm.SVR())]),
        "predict",
    ),
    "StackingRegressor": (
        ensemble.StackingRegressor([("ridge", linear_model.Ridge()), ("svr", svm.SVR())]),
        "predict",
    ),
}
# By name: the estimator, and the operator that stops the gradient.
STEPS: dict[str, tuple[Any, str]] = {
    "RandomForestRegressor": (ensemble.RandomForestRegressor(3, random_state=0), "TreeEnsembleRegressor"),
    "KNeighborsRegressor": (neighbors.KNeighborsRegressor(), "TopK"),
}


def fitted(name: str) -> Any:
    x = np.random.default_rng([0, 50, 4]).standard_normal((50, 4)) + 2
    classes = (x[:, 0] > 2).astype(int) + (x[:, 2] > 2.5)
    estimator, method = SMOOTH[name] if name in SMOOTH else (STEPS[name][0], "predict")
    y = x[:, 0] * x[:, 1] if method == "predict" else classes
    with warnings.catch_warnings():
        # Few iterations.
        warnings.simplefilter("ignore")
        return estimator.fit(x, np.minimum(y, 1) if name == "SVC of two" else y)


def converted(estimator: Any, x: np.ndarray) -> onnx.ModelProto:
    from skl2onnx import to_onnx

    options = {id(estimator): {"zipmap": False}} if hasattr(estimator, "classes_") else None
    with warnings.catch_warnings():
        # skl2onnx asks an SVC for attributes that scikit-learn is about to remove.
        warnings.simplefilter("ignore", FutureWarning)
        return to_onnx(estimator, x[:1], options=options)
