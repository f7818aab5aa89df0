"""The processor, and loading of object code for it, by llvmlite. Numba is not imported."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm

from ortgrad.threads import make_lock

# What the loaded function is called in its object code.
NAME = "ortgrad"
# Functions of the C library that compiled code may refer to: those of memory, and mathematical ones, which
# LLVM also calls for its intrinsic functions and some instructions.
_MEMORY = ("malloc", "free", "memcpy", "memset", "memmove")
_MATH = frozenset(
    (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos"),
        *("cosh", "erf", "erfc", "exp", "exp10", "exp2", "expm1", "fabs", "floor", "fma", "fmax", "fmin"),
        *("fmod", "frexp", "hypot", "_hypot", "ldexp", "lgamma", "log", "log10", "log1p", "log2"),
        *("nearbyint", "nextafter", "pow", "rint", "round", "roundeven", "sin", "sincos", "sinh", "sqrt"),
        *("tan", "tanh", "tgamma", "trunc"),
    )
)
# Numba has names of its own for some.
_RENAMED = {f"numba_{name}": name for name in ("frexp", "ldexp", "nextafter")} | {"numba_gamma": "tgamma"}


def _math_symbols() -> dict[str, int]:
    """Return the addresses of the mathematical functions that the system has, in both precisions."""
    wanted = {**{name: name for name in _MATH}, **_RENAMED}
    wanted |= {f"{name}f": f"{real}f" for name, real in wanted.items()}
    found: dict[str, int] = {}
    for library in ("ucrtbase",) if sys.platform == "win32" else ("libm.so.6", None):
        try:
            loaded = ctypes.CDLL(library)
        except OSError:
            continue
        for name, real in wanted.items():
            if name not in found and hasattr(loaded, real):
                found[name] = ctypes.cast(getattr(loaded, real), ctypes.c_void_p).value or 0
    return found


_math = _math_symbols()
for _name, _address in _math.items():
    llvm.add_symbol(_name, _address)
SYMBOLS = frozenset((*_MEMORY, *_math))
_INTRINSIC = re.compile(r"llvm\.([a-z0-9]+)\.(?:v\d+)?f(32|64)")
# The addresses of memory that tasks have released, by its size (see ortgrad.compiled.instructions).
KEPT, KEPT_SIZES, KEPT_OF_A_SIZE = "ortgrad_kept", 6, 4
_kept = (ctypes.c_int64 * (KEPT_SIZES * KEPT_OF_A_SIZE))()
llvm.add_symbol(KEPT, ctypes.addressof(_kept))

_lock = make_lock()
_engines: list[Any] = []


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


def missing_symbols(names: Iterable[str]) -> list[str]:
    """Return which of these functions, by LLVM's names, cannot be called."""
    needed = set()
    for name in names:
        intrinsic = _INTRINSIC.fullmatch(name)
        if intrinsic is not None and intrinsic[1] in _MATH:
            needed.add(intrinsic[1] + ("f" if intrinsic[2] == "32" else ""))
        elif not name.startswith("llvm."):
            needed.add(name)
    return sorted(needed - SYMBOLS)


def load(code: bytes) -> int:
    """Load object code for the rest of the process; returns the address of its function."""
    with _lock:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
        return int(engine.get_function_address(NAME))
