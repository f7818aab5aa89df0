"""Gradients for the onnxruntime you already have."""

from ortgrad import nodes
from ortgrad import ops as _ops  # noqa: F401  (importing it declares the operators)
from ortgrad.autodiff.rules import gradient
from ortgrad.check import GradientCheck, check_gradients
from ortgrad.errors import (
    KernelError,
    ModelError,
    NodeError,
    OrtgradError,
    ParameterWarning,
    RegistrationError,
    StoppedGradientWarning,
    UnsupportedGradientError,
    WrongGradientError,
)
from ortgrad.operators.declaration import operator
from ortgrad.pipelines.build import build_gradient_model
from ortgrad.pipelines.prepare import prepare
from ortgrad.runtime.session import InferenceSession, get_library_path, register

__version__ = "0.1.0"

__all__ = [
    "GradientCheck",
    "InferenceSession",
    "KernelError",
    "ModelError",
    "NodeError",
    "OrtgradError",
    "ParameterWarning",
    "RegistrationError",
    "StoppedGradientWarning",
    "UnsupportedGradientError",
    "WrongGradientError",
    "build_gradient_model",
    "check_gradients",
    "get_library_path",
    "gradient",
    "nodes",
    "operator",
    "prepare",
    "register",
]
