"""What all exports by PyTorch share."""

from __future__ import annotations

import functools


@functools.cache
def keep_tables() -> None:
    """Let the newer exporter keep tables that it would make for every export, which takes a second or two."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
