"""onnxruntime.training.onnxblock"""

from ortgrad.compat.onnxblock import *  # noqa: F403
from ortgrad.compat.onnxblock import __all__ as __all__
