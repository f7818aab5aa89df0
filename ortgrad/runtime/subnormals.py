"""Flushing of subnormal numbers to zero on the calling thread, around runs that compute gradients.

Behind a saturated softmax or sigmoid, gradients are below 1.2e-38, and a processor takes about a hundred
times as long for such numbers as for others. The option `session.set_denormal_as_zero` of onnxruntime sets
up the threads of a session's pool. The calling thread it sets up only for a process's first session, and for
good. Here the state of the calling thread is changed for a run and then restored. Compiled kernels do
the same for themselves (ortgrad.compiled.entry).
"""

from __future__ import annotations

import ctypes
import operator
import platform
import sys
from typing import Any, NamedTuple

OPTION = "session.set_denormal_as_zero"
# Larger than the C type fenv_t of any system below.
_Environment = ctypes.c_uint32 * 16
_FTZ_AND_DAZ, _FZ = 0x8040, 1 << 24
# Where fenv_t has the control register, counted in words of 32 bits, and the bits that flush: MXCSR, FPCR.
_LAYOUTS = {
    ("linux", "x86_64"): (7, _FTZ_AND_DAZ),
    ("linux", "aarch64"): (0, _FZ),
    ("darwin", "x86_64"): (1, _FTZ_AND_DAZ),
    ("darwin", "arm64"): (2, _FZ),
}
_SMALLEST = 5e-324


class _Access(NamedTuple):
    """How to reach the floating-point state of a thread."""

    read: Any  # C's fegetenv
    write: Any  # C's fesetenv
    place: int
    bits: int


def _find_access() -> _Access | None:
    layout = _LAYOUTS.get((sys.platform, platform.machine()))
    if layout is None:
        return None
    for name in ("libm.so.6", None):
        try:
            library = ctypes.PyDLL(name)
            access = _Access(library.fegetenv, library.fesetenv, *layout)
        except (OSError, AttributeError):
            continue
        return access if _works(access) else None
    return None


def _works(access: _Access) -> bool:
    before, changed = _Environment(), _Environment()
    if access.read(before) != 0 or access.read(changed) != 0:
        return False
    changed[access.place] |= access.bits
    try:
        access.write(changed)
        return bool(operator.mul(_SMALLEST, 1.0) == 0)
    finally:
        access.write(before)


_access = _find_access()


def saved() -> Any:
    """Return the floating-point state of the calling thread; None where it cannot be changed."""
    if _access is None:
        return None
    state = _Environment()
    _access.read(state)
    return state


def flush(state: Any) -> None:
    """Flush subnormal numbers on the calling thread from now on, whose state was `state`."""
    if state is not None and _access is not None:
        changed = _Environment.from_buffer_copy(state)
        changed[_access.place] |= _access.bits
        _access.write(changed)


# A function of C, so that no signal handler can run between a call and its effect. `state` must not be None.
restore: Any = bool if _access is None else _access.write
