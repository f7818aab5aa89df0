"""onnxruntime.training.api.checkpoint_state"""

from ortgrad.compat.api.checkpoint_state import *  # noqa: F403
from ortgrad.compat.api.checkpoint_state import __all__ as __all__
