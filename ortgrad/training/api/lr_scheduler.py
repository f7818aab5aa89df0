"""onnxruntime.training.api.lr_scheduler"""

from ortgrad.compat.api.lr_scheduler import *  # noqa: F403
from ortgrad.compat.api.lr_scheduler import __all__ as __all__
