"""onnxruntime.training.api"""

from ortgrad.compat.api import *  # noqa: F403
from ortgrad.compat.api import __all__ as __all__
