"""onnx-ir for modules that are imported with the package; it takes most of a second to import.

Rules and bodies mention its types in annotations, and some use it when they record nodes. `ir` imports it
then. `Recorder` is for annotations only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder
else:

    class _OnnxIr:
        def __getattr__(self, name: str) -> Any:
            import onnx_ir

            found = vars(self)[name] = getattr(onnx_ir, name)
            return found

    ir = _OnnxIr()
    Recorder = Any

__all__ = ["Recorder", "ir"]
