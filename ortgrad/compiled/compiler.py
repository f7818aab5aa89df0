"""Compilation with Numba. This module imports Numba, which takes most of a second."""

from __future__ import annotations

import ast
import functools
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
from ortgrad.compiled.source import Function, Source
from ortgrad.errors import RegistrationError

_WORD = types.int64
# Results with NaN and infinities must be those of the NumPy kernels, so only these liberties are allowed:
# to fuse multiplications and additions, and, in sums, to add in another order.
_FUSE, _REORDER = frozenset({"contract"}), frozenset({"contract", "reassoc", "nsz"})


def compile_entry(name: str) -> bytes:
    """Return the object code of a function in ortgrad.compiled.entry."""
    function = getattr(entry, name)
    return _object_code(function, _WORD(*[_WORD] * function.__code__.co_argcount), _FUSE)


def compile_block(source: Source) -> bytes:
    """Return the object code of a kernel's block."""
    return _object_code(python_block(source), types.void(_WORD, _WORD), _flags(source))


def python_block(source: Source) -> Callable[..., Any]:
    """Return the function that compile_block compiles."""
    names = {f"view_of_{dtype}": instructions.view_of(dtype) for dtype in ITEM_SIZES}
    names.update(
        Element=getattr(numba, source.element),
        load=instructions.load,
        load_double=instructions.load_double,
        store=instructions.store,
        use_short_vectors=instructions.use_short_vectors,
        **{
            f"phase{i}": compile_function(function, source.element, _flags(source))
            for i, function in enumerate(source.phases)
        },
    )
    return _execute(source.block, "block", names)


def compile_function(function: Function, element: str, flags: Set[str], *, checked: bool = False) -> Any:
    """Return the function, with those that it calls, for Numba; with `checked`, indices are checked."""
    return _compile_function(function, element, frozenset(flags), checked)


@functools.cache
def _compile_function(function: Function, element: str, flags: frozenset[str], checked: bool) -> Any:
    real = np.dtype(element).type
    names: dict[str, Any] = {
        name: tuple(map(real, value)) if isinstance(value, tuple) else value
        for name, value in function.numbers
    }
    names.update({name: getattr(instructions, name, None) for name in PRIMITIVES})
    for module in (channels, panels, products, rows, squares, transforms):
        for name in module.NAMES:
            # Instructions address memory themselves; only in Python can their indices be checked.
            plain = njit(boundscheck=True)(PRIMITIVES[name]) if checked else None
            names[name] = plain or getattr(module, name)
    if checked:
        names.update({name: njit(boundscheck=True)(PRIMITIVES[name]) for name in ("fetch", "put")})
    names.update(
        Element=getattr(numba, element),
        allocate=instructions.allocator(element),
        allocate_integers=instructions.allocator("int64"),
    )
    for name, called in function.functions:
        names[name] = _compile_function(called, element, _FUSE if called.exact else flags, checked)
    python = _execute(function.text, "function", names)
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


def _execute(text: str, name: str, names: Mapping[str, Any]) -> Any:
    variables = dict(names)
    exec(compile(text, "<ortgrad>", "exec"), variables)
    return variables[name]


def _object_code(function: Callable[..., Any], signature: Any, flags: Set[str]) -> bytes:
    try:
        compiled = cfunc(
            signature, error_model="numpy", fastmath=set(flags), pipeline_class=libraries.Compiler
        )(function)
    except NumbaError as error:
        raise RegistrationError(f"Numba cannot compile the kernel: {error}") from error
    module = llvm.parse_assembly(compiled.inspect_llvm())
    missing = {
        f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")
    } - processor.SYMBOLS
    if missing:
        raise RegistrationError(
            f"a compiled kernel cannot call {', '.join(sorted(missing))}: it must not raise exceptions or "
            "allocate arrays, and must take mathematical functions from ortgrad.compiled.functions"
        )
    for f in module.functions:
        if f.name == compiled.native_name:
            f.name = processor.NAME
    return processor.target_machine().emit_object(module)
