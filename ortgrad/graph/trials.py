"""Sessions of onnxruntime that only find out whether it takes a model."""

from __future__ import annotations

import functools

import onnx


def refusal(model: onnx.ModelProto) -> Exception | None:
    """Return the exception with which onnxruntime refuses to load a model; None if it loads the model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except onnxruntime_errors() as error:
        return error
    return None


@functools.cache
def onnxruntime_errors() -> tuple[type[Exception], ...]:
    """Return the exception classes of onnxruntime, which have no common base class of their own."""
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    return tuple(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception))
