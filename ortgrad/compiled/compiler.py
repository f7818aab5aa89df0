"""Compilation with Numba. This module imports Numba, which takes most of a second."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import cfunc, njit, types
from numba.core.errors import NumbaError

from ortgrad.compiled import (
    channels,
    entry,
    instructions,
    libraries,
    panels,
    processor,
    products,
    rows,
    squares,
    transforms,
)
from ortgrad.compiled.functions import PRIMITIVES
from ortgrad.compiled.layout import ITEM_SIZES
from ortgrad.compiled.source import Function, Source, functions_of
from ortgrad.errors import RegistrationError

_WORD = types.int64
# The modules of instructions for arrays, which add to `instructions.INSTRUCTIONS`.
_FAMILIES = (channels, panels, products, rows, squares, transforms)
# Results with NaN and infinities must equal the NumPy kernels' results, so the compiler may only fuse
# multiplications and additions, and reorder the terms of sums.
_FUSE, _REORDER = frozenset({"contract"}), frozenset({"contract", "reassoc", "nsz"})
# The file name of generated functions.
_GENERATED = "<ortgrad>"
# How Numba names places, and colours.
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_UNDEFINED = re.compile(r"name '(\w+)' is not defined|module '.*' has no attribute '(\w+)'")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class _MissingError(Exception):
    """Code refers to functions that do not exist where it runs."""

    def __init__(self, names: list[str], library: Any) -> None:
        super().__init__(f"it cannot call {', '.join(names)}")
        self.names, self.library = names, library


def compile_entry(name: str) -> bytes:
    """Return the object code of a function in ortgrad.compiled.entry."""
    function = getattr(entry, name)
    return _object_code(function, _WORD(*[_WORD] * function.__code__.co_argcount), _FUSE)


def compile_block(source: Source) -> bytes:
    """Return the object code of a kernel's block.

    Raises RegistrationError, with the file and the line, if Numba cannot compile it.
    """
    kernel = source.phases[-1]
    try:
        return _object_code(python_block(source), types.void(_WORD, _WORD), _flags(source))
    except RegistrationError:
        raise
    except Exception as error:  # Numba raises exceptions of many types
        file, line = _place_of(error, source) or kernel.place
        raise RegistrationError(f"{file}:{line}: the kernel {kernel.name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, _MissingError):
        return (
            f"{error}; a kernel must not create arrays (declare scratch tensors, or use `allocate` of "
            "ortgrad.compiled.functions), strings or other objects"
        )
    if not isinstance(error, NumbaError):
        return f"Numba cannot compile it: {type(error).__name__}: {error}"
    lines = _ESCAPES.sub("", str(error)).splitlines()
    said = [line for line in lines if not line.startswith("Failed in nopython mode pipeline")]
    # The rest tells how Numba reached the place.
    ends = [i for i, line in enumerate(said) if i > 0 and line.startswith(("During:", "File "))]
    return "Numba cannot compile it: " + "\n".join(said[: min(ends, default=None)]).strip()


def _place_of(error: Exception, source: Source) -> tuple[str, int] | None:
    """Return the file and the line of an error, the innermost if Numba names several."""
    functions = list(functions_of(source.phases))
    files = {function.place[0] for function in functions}
    if isinstance(error, _MissingError):
        return libraries.caller_of(error.library, frozenset(error.names), files)
    message = _ESCAPES.sub("", str(error))
    undefined = _UNDEFINED.search(message)
    if undefined is not None:  # Numba does not say where
        for function in functions:
            for node in ast.walk(function.tree()) if function.tree is not None else ():
                found = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
                if isinstance(node, ast.expr) and found in undefined.groups():
                    return function.place[0], node.lineno
    for file, line in _PLACE.findall(message):
        # Numba names files relative to the current folder.
        if (name := os.path.abspath(file)) in files:
            return name, int(line)
    return None


def python_block(source: Source) -> Callable[..., Any]:
    """Return the function that compile_block compiles."""
    names: dict[str, Any] = {f"view_of_{dtype}": instructions.view_of(dtype) for dtype in ITEM_SIZES}
    names.update(
        Element=getattr(numba, source.element),
        load=instructions.load,
        load_double=instructions.load_double,
        store=instructions.store,
        use_short_vectors=instructions.use_short_vectors,
        **{name: bundle.value() for name, bundle in source.bundles},
        **{
            f"phase{i}": compile_function(function, source.element, _flags(source))
            for i, function in enumerate(source.phases)
        },
    )
    exec(compile(source.block, _GENERATED, "exec"), names)
    return names["block"]


def compile_function(function: Function, element: str, flags: Set[str], *, checked: bool = False) -> Any:
    """Return the function, with those that it calls, for Numba; with `checked`, indices are checked."""
    return _compile_function(function, element, frozenset(flags), checked)


@functools.cache
def _compile_function(function: Function, element: str, flags: frozenset[str], checked: bool) -> Any:
    real = np.dtype(element).type
    names: dict[str, Any] = {name: _typed(value, real) for name, value in function.numbers}
    names.update({name: getattr(instructions, name, None) for name in PRIMITIVES})
    names.update(instructions.INSTRUCTIONS)
    if checked:
        # Instructions address memory themselves; only in Python can their indices be checked.
        for name in ("fetch", "put", *instructions.INSTRUCTIONS):
            names[name] = njit(boundscheck=True)(PRIMITIVES[name])
    names.update(
        Element=getattr(numba, element),
        allocate=instructions.allocator(element),
        allocate_integers=instructions.allocator("int64"),
    )
    names.update({name: value.value() for name, value in function.values})
    for name, called in function.functions:
        names[name] = _compile_function(called, element, _FUSE if called.exact else flags, checked)
    python = _execute(function, names)
    if checked:
        return njit(error_model="numpy", fastmath=set(flags), boundscheck=True)(python)
    return libraries.inner(python, fastmath=set(flags), inlined=not _has_long_loops(function.text))


def _has_long_loops(text: str) -> bool:
    """Return whether a function has loops, besides those over tuples, which are short and unrolled."""
    return any(
        isinstance(node, ast.While) or (isinstance(node, ast.For) and isinstance(node.iter, ast.Call))
        for node in ast.walk(ast.parse(text))
    )


def _flags(source: Source) -> frozenset[str]:
    return _REORDER if source.reorders else _FUSE


def _execute(function: Function, names: Mapping[str, Any]) -> Any:
    variables, file = dict(names), function.place[0] or _GENERATED
    # With the lines of its file, if it is known: Numba names them in errors.
    tree = ast.parse(function.text) if function.tree is None else ast.Module([function.tree()], [])
    try:
        exec(compile(tree, file, "exec"), variables)
    except Exception as error:
        raise RegistrationError(f"{file}:{function.place[1]}: {function.name}: {error}") from error
    return variables["function"]


def _typed(value: Any, real: Callable[[Any], Any]) -> Any:
    """Return a tuple in which numbers have the element type, unless all are integers."""
    if not isinstance(value, tuple) or not _has_floats(value):
        return value
    return tuple(_typed(each, real) if isinstance(each, tuple) else real(each) for each in value)


def _has_floats(value: Any) -> bool:
    return any(map(_has_floats, value)) if isinstance(value, tuple) else isinstance(value, float)


def _object_code(function: Callable[..., Any], signature: Any, flags: Set[str]) -> bytes:
    compiled = cfunc(signature, error_model="numpy", fastmath=set(flags), pipeline_class=libraries.Compiler)(
        function
    )
    module = llvm.parse_assembly(compiled.inspect_llvm())
    missing = processor.missing_symbols(f.name for f in module.functions if f.is_declaration)
    if missing:
        raise _MissingError(missing, compiled._library)
    for f in module.functions:
        if f.name == compiled.native_name:
            f.name = processor.NAME
    return processor.target_machine().emit_object(module)
