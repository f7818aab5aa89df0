"""onnxruntime.training.onnxblock.blocks"""

from ortgrad.compat.onnxblock.blocks import *  # noqa: F403
from ortgrad.compat.onnxblock.blocks import __all__ as __all__
