"""onnxruntime.training.onnxblock.optim"""

from ortgrad.compat.onnxblock.optim import *  # noqa: F403
from ortgrad.compat.onnxblock.optim import __all__ as __all__
