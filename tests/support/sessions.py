"""Sessions of built models in several ways and levels of optimization."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime

import ortgrad
from support.node_tests import ORT_ERRORS
from support.rules import Arrays

# All ways to run a built model: in sessions of ortgrad, and in onnxruntime's without and with the library.
WAYS = ("auto", "python", "onnx", "plain", "registered")
Level = onnxruntime.GraphOptimizationLevel


LEVELS = {
    "disabled": Level.ORT_DISABLE_ALL,
    "basic": Level.ORT_ENABLE_BASIC,
    "extended": Level.ORT_ENABLE_EXTENDED,
    "all": Level.ORT_ENABLE_ALL,
}


def make_session(built: onnx.ModelProto, way: str, level: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = LEVELS[level]
    if way in ("auto", "python", "onnx"):
        return ortgrad.InferenceSession(built, options, kernels=way)
    if way == "registered":
        ortgrad.register(options)
    return onnxruntime.InferenceSession(
        built.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(session: onnxruntime.InferenceSession, feeds: Arrays, seeds: Arrays, count: int) -> list[np.ndarray]:
    known = {value.name for value in session.get_inputs()}
    fed = {**feeds, **{f"{name}_grad": seed for name, seed in seeds.items()}}
    wanted = [value.name for value in session.get_outputs()[-count:]]
    return session.run(wanted, {name: array for name, array in fed.items() if name in known})


def without_ranks(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in (*copy.graph.input, *copy.graph.output):
        value.type.tensor_type.ClearField("shape")
    return copy


def forward(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    except ORT_ERRORS:
        return None


def session(model: onnx.ModelProto, way: str) -> Any:
    """A session that runs the model in one of the five ways."""
    if way not in ("plain", "registered"):
        return ortgrad.InferenceSession(model, kernels=way)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if way == "registered":
        ortgrad.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)
