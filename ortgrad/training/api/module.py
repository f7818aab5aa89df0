"""onnxruntime.training.api.module"""

from ortgrad.compat.api.module import *  # noqa: F403
from ortgrad.compat.api.module import __all__ as __all__
