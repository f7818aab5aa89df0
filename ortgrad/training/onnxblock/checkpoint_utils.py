"""onnxruntime.training.onnxblock.checkpoint_utils"""

from ortgrad.compat.onnxblock.checkpoint_utils import *  # noqa: F403
from ortgrad.compat.onnxblock.checkpoint_utils import __all__ as __all__
