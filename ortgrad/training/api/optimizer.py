"""onnxruntime.training.api.optimizer"""

from ortgrad.compat.api.optimizer import *  # noqa: F403
from ortgrad.compat.api.optimizer import __all__ as __all__
