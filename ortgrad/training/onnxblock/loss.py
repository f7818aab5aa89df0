"""onnxruntime.training.onnxblock.loss"""

from ortgrad.compat.onnxblock.loss import *  # noqa: F403
from ortgrad.compat.onnxblock.loss import __all__ as __all__
