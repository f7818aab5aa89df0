"""Where ortgrad meets onnxruntime-extensions. Nothing else in the package knows about it.

That library brings operators which are declared from Python into every session that registers it, in any
domain. How it runs them is no use here: it copies all tensors, and an exception in a Python function aborts
the process. But to onnxruntime an operator is a struct of function pointers, and the library hands these
structs to whoever registers it. So ortgrad declares its operators there, asks for their structs as
onnxruntime does, and has them call its own kernels.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.machinery
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime

from ortgrad.errors import RegistrationError
from ortgrad.operators.declaration import CALL_ATTRIBUTE, Operator, all_operators
from ortgrad.runtime import native
from ortgrad.runtime.c_api import ELEMENT_TYPES, CustomOp, list_operators

_PACKAGE = "onnxruntime_extensions"
_MODULE = f"{_PACKAGE}._extensions_pydll"
# The most that glibc lets its threshold grow to, less its own header.
_REUSED_BYTES = (1 << 25) - (1 << 16)
_UNKNOWN_LAYOUT = (
    "this release of onnxruntime-extensions keeps its operators in a way that ortgrad does not know; "
    "kernels='onnx' does without it, and release 0.15.2 is known to work"
)

_lock = threading.RLock()
_declared: set[Operator] = set()
_definitions: dict[int, native.NativeOperator] = {}
_kept: list[object] = []
_domains_in_use: set[str] = set()


def library_path() -> str:
    """The op library for `SessionOptions.register_custom_ops_library`, all operators declared."""
    with _lock:
        _declare_operators()
        _domains_in_use.update(operator.domain for operator in _declared)
    return _path()


@functools.cache
def runs_kernels() -> bool:
    """Whether the installed onnxruntime-extensions can be made to call ortgrad's kernels."""
    try:
        library_path()
    except (ImportError, OSError, _UnknownLayoutError):
        return False
    return True


class _UnknownLayoutError(RegistrationError):
    """The library keeps its operators in another way than the releases that ortgrad knows."""


def _declare_operators() -> None:
    new = [operator for operator in all_operators() if operator not in _declared]
    if _definitions and not _declared:
        raise _UnknownLayoutError(_UNKNOWN_LAYOUT)
    if not new:
        return
    for operator in new:
        if operator.domain in _domains_in_use:
            raise _too_late(f"{operator.domain}::{operator.name}", operator.domain)
    extensions = _extensions()
    if not _declared:
        # The library keeps onnxruntime's functions from the first registration.
        onnxruntime.SessionOptions().register_custom_ops_library(_path())
        _guard_domains(extensions)
        _refuse_to_move_others({operator.domain for operator in new})
        _keep_freed_memory()
    for operator in new:
        for variant in operator.variants():
            definition = extensions.PyCustomOpDef()
            definition.op_type = f"{operator.domain}::{operator.name}"
            definition.obj_id = id(definition)
            definition.input_types = [ELEMENT_TYPES[t] for t in variant.inputs]
            definition.output_types = [ELEMENT_TYPES[t] for t in variant.outputs]
            definition.attrs = {CALL_ATTRIBUTE: ELEMENT_TYPES["string"]}
            _add_operator()(definition)
            _kept.append(definition)
            _definitions[_native_address(definition)] = native.NativeOperator(operator, variant)
    _fill_structs()
    _declared.update(new)


def _fill_structs() -> None:
    """Have the library's structs of our operators call our kernels."""
    missing = set(_definitions)
    for _, address in list_operators(_library()):
        # Behind the struct the library keeps where the definition is: that tells whose it is, and that the
        # struct is as long as we think.
        key = ctypes.c_void_p.from_address(address + ctypes.sizeof(CustomOp)).value or 0
        if key in _definitions:
            native.fill(CustomOp.from_address(address), _definitions[key])
            missing.discard(key)
    if missing:
        raise _UnknownLayoutError(_UNKNOWN_LAYOUT)


def _native_address(definition: object) -> int:
    """Where the C++ object of a pybind11 object is: its first field after Python's own two."""
    fields = ctypes.cast(id(definition), ctypes.POINTER(ctypes.c_void_p))
    return fields[object.__basicsize__ // ctypes.sizeof(ctypes.c_void_p)] or 0


@functools.cache
def _extensions() -> ModuleType:
    """The library as a Python module, without the rest of its package, which imports PyTorch where it can."""
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    package = importlib.util.find_spec(_PACKAGE)
    folders = package.submodule_search_locations if package else None
    spec = importlib.machinery.PathFinder.find_spec(_MODULE, folders) if folders else None
    if spec is None or spec.loader is None:
        raise ImportError("onnxruntime-extensions is not installed, or was built without Python operators")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The package, if somebody imports it later, finds it there.
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
    """Have declarations by others refused in domains that are in use.

    The library keeps a domain's operators in a vector. Growing it moves them under the sessions that run on
    them.
    """
    add = _add_operator()

    def add_custom_op(definition: Any) -> None:
        domain = definition.op_type.rpartition("::")[0]
        with _lock:
            if domain in _domains_in_use:
                raise _too_late(definition.op_type, domain)
            add(definition)

    extensions.add_custom_op = add_custom_op  # type: ignore[attr-defined]
    # The package has its own name for it, if it was imported before.
    package = sys.modules.get(f"{_PACKAGE}._ocos")
    if package is not None:
        package.add_custom_op = add_custom_op  # type: ignore[attr-defined]


def _refuse_to_move_others(domains: set[str]) -> None:
    """Raise if others have operators in these domains, and sessions that may run on them."""
    shared = sorted(domains.intersection(domain for domain, _ in list_operators(_library())))
    if shared and any(issubclass(type(thing), onnxruntime.InferenceSession) for thing in gc.get_objects()):
        raise RegistrationError(
            f"another package has declared Python operators in {shared[0]!r}, and there are sessions that "
            "may run on them: call ortgrad.get_library_path() before the first session is made"
        )


def _too_late(name: str, domain: str) -> RegistrationError:
    return RegistrationError(
        f"operator {name} was declared after a session had been made with the operators of {domain!r}; "
        "declare operators before the first session, or in a domain of their own"
    )


def _keep_freed_memory() -> None:
    """Have the C library reuse the memory of arrays up to this size instead of handing it back.

    glibc learns from what is freed what is worth keeping. Before it has learned that, every run pays
    for new pages: three times as long for a million elements.
    """
    np.empty(_REUSED_BYTES, np.uint8)
