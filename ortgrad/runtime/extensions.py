"""The interface to onnxruntime-extensions; no other module of the package uses it.

That library adds operators declared from Python to every session that registers it, in any domain. Its way
of running them is not usable here: it copies all tensors, and an exception in a Python function aborts the
process. But to onnxruntime an operator is a struct of function pointers, which the library provides when it
is registered. ortgrad therefore declares its operators there, gets their structs in the way that onnxruntime
does, and makes them call its own kernels.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime

from ortgrad.errors import RegistrationError
from ortgrad.lowering.fusion import kernel as fusion
from ortgrad.operators.declaration import CALL_ATTRIBUTE, Operator, Variant, all_operators
from ortgrad.runtime import native
from ortgrad.runtime.c_api import ELEMENT_TYPES, CustomOp, list_operators
from ortgrad.threads import make_reentrant_lock

_PACKAGE = "onnxruntime_extensions"
_MODULE = f"{_PACKAGE}._extensions_pydll"
# The largest value that glibc's mmap threshold grows to, minus room for its header.
_REUSED_BYTES = (1 << 25) - (1 << 16)
_UNKNOWN_LAYOUT = (
    "this release of onnxruntime-extensions stores its operators in a way that ortgrad does not support; "
    "kernels='onnx' does not need it, and release 0.15.2 is known to work"
)

_lock = make_reentrant_lock()
_declared: set[Operator] = set()
_definitions: dict[int, native.NativeOperator] = {}
_kept: list[object] = []
_domains_in_use: set[str] = set()


def library_path() -> str:
    """Declare all operators; returns the path for `SessionOptions.register_custom_ops_library`."""
    with _lock:
        _declare_operators()
        _domains_in_use.update(operator.domain for operator in _declared)
        _domains_in_use.add(fusion.DOMAIN)
    return _path()


@functools.cache
def runs_kernels() -> bool:
    """Return whether the installed onnxruntime-extensions can be made to call ortgrad's kernels."""
    try:
        library_path()
    except (ImportError, OSError, _UnknownLayoutError):
        return False
    return True


class _UnknownLayoutError(RegistrationError):
    """The library stores its operators in another way than the releases that ortgrad supports."""


def _declare_operators() -> None:
    new = [operator for operator in all_operators(internal=True) if operator not in _declared]
    if _definitions and not _declared:
        raise _UnknownLayoutError(_UNKNOWN_LAYOUT)
    if not new:
        return
    for operator in new:
        if operator.domain in _domains_in_use:
            raise _too_late(f"{operator.domain}::{operator.name}", operator.domain)
    extensions = _extensions()
    if not _declared:
        # The library keeps the OrtApi of its first registration.
        onnxruntime.SessionOptions().register_custom_ops_library(_path())
        _guard_domains(extensions)
        _refuse_to_move_others({operator.domain for operator in new})
        _keep_freed_memory()
        for element, name in fusion.NAMES.items():
            _define(
                f"{fusion.DOMAIN}::{name}", Variant((element,), (element,)), native.FusedOperator(element)
            )
    for operator in new:
        for variant in operator.variants():
            name = f"{operator.domain}::{operator.name}"
            _define(name, variant, native.NativeOperator(operator, variant))
    _fill_structs()
    _declared.update(new)


def _define(name: str, variant: Variant, kernel: native.NativeOperator) -> None:
    definition = _extensions().PyCustomOpDef()
    definition.op_type = name
    definition.obj_id = id(definition)
    definition.input_types = [ELEMENT_TYPES[t] for t in variant.inputs]
    definition.output_types = [ELEMENT_TYPES[t] for t in variant.outputs]
    definition.attrs = {CALL_ATTRIBUTE: ELEMENT_TYPES["string"]}
    _add_operator()(definition)
    _kept.append(definition)
    _definitions[_native_address(definition)] = kernel


def _fill_structs() -> None:
    """Make the structs of ortgrad's operators call ortgrad's kernels."""
    missing = set(_definitions)
    for _, address in list_operators(_library()):
        # After the struct, the library stores the address of the definition. It identifies the operator, and
        # confirms the size of the struct.
        key = ctypes.c_void_p.from_address(address + ctypes.sizeof(CustomOp)).value or 0
        if key in _definitions:
            native.fill(CustomOp.from_address(address), _definitions[key])
            missing.discard(key)
    if missing:
        raise _UnknownLayoutError(_UNKNOWN_LAYOUT)


def _native_address(definition: object) -> int:
    """Return the address of a pybind11 object's C++ object: the first field after Python's own two."""
    fields = ctypes.cast(id(definition), ctypes.POINTER(ctypes.c_void_p))
    return fields[object.__basicsize__ // ctypes.sizeof(ctypes.c_void_p)] or 0


@functools.cache
def _extensions() -> ModuleType:
    """Return the library as a Python module, without its package, which imports PyTorch if available."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    package = importlib.util.find_spec(_PACKAGE)
    folders = package.submodule_search_locations if package else None
    spec = importlib.machinery.PathFinder.find_spec(_MODULE, folders) if folders else None
    if spec is None or spec.loader is None:
        raise ImportError("onnxruntime-extensions is not installed, or was built without Python operators")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # If the package is imported later, it finds the module here.
    sys.modules[_MODULE] = module
    return module


def _path() -> str:
    path = _extensions().__file__
    assert path is not None
    return path


@functools.cache
def _library() -> ctypes.PyDLL:
    return ctypes.PyDLL(_path())


@functools.cache
def _add_operator() -> Any:
    return _extensions().add_custom_op


def _guard_domains(extensions: ModuleType) -> None:
    """Refuse further declarations, also by other packages, in domains that are in use.

    The library keeps a domain's operators in a vector. When it grows, the operators move in memory while
    sessions still refer to them.
    """
    add = _add_operator()

    def add_custom_op(definition: Any) -> None:
        domain = definition.op_type.rpartition("::")[0]
        with _lock:
            if domain in _domains_in_use:
                raise _too_late(definition.op_type, domain)
            add(definition)

    extensions.add_custom_op = add_custom_op  # type: ignore[attr-defined]
    # If the package was imported before, it has its own reference to the function.
    package = sys.modules.get(f"{_PACKAGE}._ocos")
    if package is not None:
        package.add_custom_op = add_custom_op  # type: ignore[attr-defined]


def _refuse_to_move_others(domains: set[str]) -> None:
    """Raise RegistrationError if other packages have operators in these domains and sessions may use them."""
    shared = sorted(domains.intersection(domain for domain, _ in list_operators(_library())))
    if shared and any(issubclass(type(thing), onnxruntime.InferenceSession) for thing in gc.get_objects()):
        raise RegistrationError(
            f"another package has declared Python operators in {shared[0]!r}, and there are sessions that "
            "may use them: call ortgrad.get_library_path() before the first session is created"
        )


def _too_late(name: str, domain: str) -> RegistrationError:
    return RegistrationError(
        f"operator {name} was declared after a session had been created with the operators of {domain!r}; "
        "declare operators before the first session, or in a domain of their own"
    )


def _keep_freed_memory() -> None:
    """Make the C library reuse the memory of freed arrays instead of returning it to the system.

    glibc raises its mmap threshold when a large block is freed. Until then every run pays for new pages, and
    takes three times as long for a million elements.
    """
    np.empty(_REUSED_BYTES, np.uint8)
