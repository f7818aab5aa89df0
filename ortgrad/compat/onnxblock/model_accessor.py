"""The model that the blocks change: one at a time, between the entry and the exit of a context.

Each thread has its own, so that several models can be built at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import onnx

from ortgrad.compat.versions import NEWEST_IR_VERSION, NEWEST_OPSET
from ortgrad.errors import TrainingError
from ortgrad.graph.protos import copy_of
from ortgrad.keywords import checked
from ortgrad.operators.declaration import DOMAIN
from ortgrad.training.protos import check

__all__ = ["ModelAccessor", "base", "custom_op_library", "empty_base"]


class ModelAccessor:
    """Holds the model that the blocks change, and the path that it was loaded from, if there is one."""

    def __init__(self, model: onnx.ModelProto, model_path: str | os.PathLike[str] | None = None) -> None:
        self._model = model
        self._path = model_path
        # How many calls of blocks are under way, and whether one has added nodes that are not checked yet.
        self.depth = 0
        self.unchecked = False

    @property
    def model(self) -> onnx.ModelProto:
        return self._model

    @property
    def path(self) -> str:
        if self._path is None:
            raise TrainingError("the model was not loaded from a path")
        return os.fspath(self._path)

    @property
    def has_path(self) -> bool:
        return self._path is not None


_accessor: ContextVar[ModelAccessor | None] = ContextVar("accessor", default=None)
_library: ContextVar[os.PathLike[str] | str | None] = ContextVar("library", default=None)


def current() -> ModelAccessor:
    """Return the accessor of the surrounding `base` or `empty_base`."""
    accessor = _accessor.get()
    if accessor is None:
        raise TrainingError("there is no model to build on; call blocks within onnxblock.base(model)")
    return accessor


@contextmanager
def building(*, checks: bool = True) -> Iterator[ModelAccessor]:
    """Within this context, a block adds nodes.

    The model is checked at the end of the outermost one, unless no block in it `checks` its nodes.
    """
    accessor = current()
    accessor.depth += 1
    try:
        yield accessor
    finally:
        accessor.depth -= 1
    accessor.unchecked |= checks
    if accessor.unchecked and not accessor.depth:
        accessor.unchecked = False
        check(accessor.model)


@checked
@contextmanager
def base(model: onnx.ModelProto, model_path: str | None = None) -> Iterator[ModelAccessor]:
    """Within this context, blocks build on a copy of the model, which the accessor holds.

    >>> import onnx
    >>> from ortgrad.training import onnxblock
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N] x, float[N] y) => (float[N] z) { z = Mul(x, y) }''')
    >>> with onnxblock.base(model) as accessor:
    ...     name = onnxblock.blocks.Add()("z", "x")
    >>> [node.op_type for node in accessor.model.graph.node]
    ['Mul', 'Add']
    """
    if model is None:
        raise TrainingError("the model is None; onnxblock.empty_base builds a model from scratch")
    with _installed(ModelAccessor(copy_of(model), model_path)) as accessor:
        yield accessor


@checked
@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Within this context, blocks build on an empty model; the default opset is 21.

    >>> from ortgrad.training import onnxblock
    >>> with onnxblock.empty_base(opset_version=17) as accessor:
    ...     name = onnxblock.blocks.Constant(0.5)()
    >>> [opset.version for opset in accessor.model.opset_import]
    [1, 17]
    """
    model = onnx.ModelProto(
        ir_version=min(onnx.IR_VERSION, NEWEST_IR_VERSION),
        producer_name="ortgrad",
        opset_import=[
            onnx.helper.make_opsetid(DOMAIN, 1),
            onnx.helper.make_opsetid("", opset_version or min(onnx.defs.onnx_opset_version(), NEWEST_OPSET)),
        ],
    )
    model.graph.name = "graph"
    with _installed(ModelAccessor(model)) as accessor:
        yield accessor


@contextmanager
def _installed(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    if _accessor.get() is not None:
        raise TrainingError("blocks build on one model at a time; this call is within another base")
    _accessor.set(accessor)
    try:
        yield accessor
    finally:
        _accessor.set(None)


@checked
@contextmanager
def custom_op_library(custom_op_library_path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    """Within this context, the model may hold operators of the library at this path, which must exist.

    `ortgrad.gradient` declares their gradients. The library itself is loaded by the session that trains.

    >>> import tempfile
    >>> from ortgrad.training import onnxblock
    >>> with tempfile.NamedTemporaryFile() as file, onnxblock.custom_op_library(file.name) as path:
    ...     assert path == file.name
    """
    if _library.get() is not None:
        raise TrainingError("one library of custom operators at a time; this call is within another one")
    if not os.path.exists(custom_op_library_path):
        raise TrainingError(f"there is no library of custom operators at {str(custom_op_library_path)!r}")
    _library.set(custom_op_library_path)
    try:
        yield custom_op_library_path
    finally:
        _library.set(None)
