"""onnxruntime.training.onnxblock.model_accessor"""

from ortgrad.compat.onnxblock.model_accessor import *  # noqa: F403
from ortgrad.compat.onnxblock.model_accessor import __all__ as __all__
