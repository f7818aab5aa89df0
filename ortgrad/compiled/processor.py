"""The processor, and loading of object code for it, by llvmlite. Numba is not imported."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import llvmlite.binding as llvm

from ortgrad.threads import make_lock

# What the loaded function is called in its object code.
NAME = "ortgrad"
# Functions that compiled code may refer to: those of the wrapper that Numba puts around each function for
# exceptions, which kernels do not raise, and those of the C library.
_PYTHON = (
    "PyErr_Clear",
    "PyErr_SetNone",
    "PyErr_SetString",
    "PyErr_WriteUnraisable",
    "PyUnicode_FromString",
    "Py_DecRef",
)
_RENAMED = {
    "numba_gil_ensure": "PyGILState_Ensure",
    "numba_gil_release": "PyGILState_Release",
    "NRT_MemInfo_call_dtor": "Py_IsInitialized",  # never called: kernels allocate no memory
}
_C = ("malloc", "free", "memcpy", "memset", "memmove")
SYMBOLS = frozenset((*_PYTHON, *_RENAMED, *_C))
# The addresses of memory that tasks have released, by its size (see ortgrad.compiled.instructions).
KEPT, KEPT_SIZES, KEPT_OF_A_SIZE = "ortgrad_kept", 6, 4
_kept = (ctypes.c_int64 * (KEPT_SIZES * KEPT_OF_A_SIZE))()
llvm.add_symbol(KEPT, ctypes.addressof(_kept))

_lock = make_lock()


@functools.cache
def target_machine() -> Any:
    """Return LLVM's description of this processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = description()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=name, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


@functools.cache
def description() -> tuple[str, str]:
    """Return the name and the features of the processor to compile for.

    That is this one, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say otherwise, as they do for Numba.
    """
    name, features = (os.environ.get(f"NUMBA_CPU_{what}") for what in ("NAME", "FEATURES"))
    return name or llvm.get_host_cpu_name(), features or llvm.get_host_cpu_features().flatten()


@functools.cache
def features() -> frozenset[str]:
    """Return what the processor to compile for can do, as "avx2" or "neon"."""
    return frozenset(item[1:] for item in description()[1].split(",") if item.startswith("+"))


def has_many_registers() -> bool:
    """Return whether there are 32 vector registers, rather than 16."""
    return not features().isdisjoint(("avx512f", "neon"))


@functools.cache
def _engine() -> Any:
    for name, real in _RENAMED.items():
        function = getattr(ctypes.pythonapi, real)
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return []


def load(code: bytes) -> int:
    """Load object code for the rest of the process; returns the address of its function."""
    with _lock:
        engines = _engine()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        engines.append(engine)
        return int(engine.get_function_address(NAME))
