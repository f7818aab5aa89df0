"""onnxruntime.training.artifacts"""

from ortgrad.compat.artifacts import *  # noqa: F403
from ortgrad.compat.artifacts import __all__ as __all__
