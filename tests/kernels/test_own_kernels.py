"""Compiled kernels of a user's own: what they may refer to, and errors that name the user's file and line.

The oracle is Python itself, which evaluates the same expressions in double precision.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ortgrad.compiled import workers
from ortgrad.compiled.source import source_of
from ortgrad.errors import RegistrationError
from ortgrad.operators.compiled import CompiledKernel

pytest.importorskip("numba")
from numba import njit

from ortgrad.compiled import compiler

TYPES = ["float32"] * 3

# Of one number between 0.2 and 0.9.
MATH = """acos(x) asin(x) atan(x) ceil(x) cos(x) degrees(x) erf(x) erfc(x) exp(x) exp2(x) expm1(x) fabs(x)
floor(x) gamma(x) lgamma(x) log(x) log10(x) log1p(x) log2(x) radians(x) sin(x) sqrt(x) tan(x)
trunc(x) acosh(x+1) asinh(x) atanh(x) cosh(x) sinh(x) tanh(x) atan2(x,2.5) copysign(x,-1.5)
hypot(x,0.7) pow(x,2.5) ldexp(x,3) isnan(x) isinf(x) isfinite(x) frexp(x)[0] frexp(x)[1]"""
NUMPY = """abs(x) arccos(x) arccosh(x+1) arcsin(x) arcsinh(x) arctan(x) arctanh(x) cbrt(x) ceil(x) cos(x)
cosh(x) deg2rad(x) exp(x) exp2(x) expm1(x) fabs(x) floor(x) log(x) log10(x) log1p(x) log2(x)
negative(x) positive(x) rad2deg(x) reciprocal(x) rint(x) sign(x) signbit(x) sin(x) sinh(x)
sqrt(x) square(x) tan(x) tanh(x) trunc(x) isfinite(x) add(x,2.5) arctan2(x,2.5) copysign(x,-1.5)
divide(x,0.3) fmax(x,0.5) fmin(x,0.5) fmod(x,0.3) greater(x,0.5) hypot(x,0.7) ldexp(x,3)
less_equal(x,0.5) logaddexp(x,0.5) logaddexp2(x,0.5) maximum(x,0.5) minimum(x,0.5)
multiply(x,0.3) power(x,2.5) remainder(x,0.3) subtract(x,0.3) logical_not(x) round(x)"""
if sys.version_info < (3, 11):
    MATH = MATH.replace("exp2(x) ", "")
# Everything else that a kernel may refer to; the values are those of the modules below.
OTHERS = """math.pi*x math.e math.inf*x np.pi np.inf*x -np.inf np.e*x x**3 x**0.5 x**int(8*x) 2.0**x x%0.3
x//0.3 abs(-x) min(x,0.5) max(x,0.5) float(x) int(10*x) round(x) np.float32(x) bool(x)
sin(x)+cos(x) ufunc_exp(x) helpers.SCALE*x SCALE*x STEP*x HALF*x COUNT*x helpers.plain(x)
plain(x) other_name(x) nested(x) jitted(x) helpers.jitted(x) vectorized(x) with_default(x)
with_default(x,0.25) helpers.Mode.SECOND*x TABLE[1]*x TABLE[-1] helpers.WHOLE[1,0]*x
INDICES[1]*x PAIR[1]*x FLOATS[COUNTS[1]]*x root(x) functions.blend(x,0.5,x,2.0)
functions.rint(x) closure(x) helpers.deeper.LEVEL*x helpers.MASK[1]*x helpers.np.cosh(x)
operator.mul(x,2.5)"""

HELPERS = """
import enum
import numpy as np
from numba import njit, vectorize
import deeper

SCALE = 1.75
WHOLE = np.arange(6).reshape(3, 2)
MASK = np.array([False, True])

class Mode(enum.IntEnum):
    FIRST = 1
    SECOND = 2

def plain(x):
    '''The text.'''
    return x * SCALE + shape(x)

def shape(x: float) -> float:
    return np.real(x) * 0.5  # an attribute of the same name is no call

def nested(x):
    return plain(x) + jitted(x) * 2.0

@njit(fastmath=True)
def jitted(x):
    return x / 3.0

@vectorize
def vectorized(x):
    return x - 0.25

def with_default(x, factor=SCALE):
    return x * factor

def make(factor):
    def inside(x):
        return x * factor
    return inside
"""

OWN = """
import math, operator, sys
import numpy as np
import helpers
from math import cos, sin
from numpy import exp as ufunc_exp
import ortgrad
from helpers import SCALE, jitted, nested, plain, vectorized, with_default
from helpers import plain as other_name
from ortgrad.compiled import functions
from ortgrad.compiled.functions import sqrt as root
from ortgrad.operators.compiled import Plan

STEP, HALF, COUNT, PAIR, FLOATS = np.float64(0.125), np.float32(0.5), np.int64(3), (4, 5), (1.5, 2.5, 3)
COUNTS = (0, 2)
TABLE, INDICES = np.array([1.5, 2.5, 3.5]), np.array([7, 9], np.int32)[::-1]
closure = helpers.make(0.375)


def declare(name, count):
    def reference(x):
        raise AssertionError("the compiled kernel should run")

    reference.__name__ = name.lower()
    shapes = lambda x: [(*x.shape, count)]
    operator = ortgrad.operator(name, domain="own", inputs=["X"], outputs=["Y"], shapes=shapes)(reference)
    return operator.compiled(views=[1, 2], plan=lambda x, y: Plan(x[0], [x, y]))


@ortgrad.operator("Picky", domain="own", inputs=["X"], outputs=["Y"], shapes="X")
def picky(x):
    if (x > 100).any():
        raise ValueError("too large for Picky")
    return x * 0 - 1


@picky.compiled
def picky_element(x: float) -> float:
    if x > 10:
        raise ValueError("the NumPy kernel says why")
    return x * math.tau
"""


def statements(expressions: str, module: str = "") -> str:
    lines = [f"    y[i, {k}] = {module}{text}" for k, text in enumerate(expressions.split())]
    return "\n".join(["    x = xs[i]", *lines])


def kernel(name: str, expressions: str, module: str = "") -> str:
    return f"""
@declare("{name}", {len(expressions.split())})
def {name.lower()}_row(i: int, xs: np.ndarray, y: np.ndarray) -> None:
{statements(expressions, module)}
"""


KERNELS = {"OfMath": (MATH, "math."), "OfNumpy": (NUMPY, "np."), "Others": (OTHERS, "")}
XS = np.linspace(0.21, 0.88, 5)

RUN = """
import own
ortgrad, np = own.ortgrad, own.np
for dtype in map(np.dtype, sys.argv[2:]):
    x = np.linspace(0.21, 0.88, 5).astype(dtype)
    for name in ("OfMath", "OfNumpy", "Others", "Picky"):
        node = getattr(ortgrad.nodes, name.lower())("X", "Y")
        model = ortgrad.nodes.make_model(node, shapes={"X": [None]}, dtype=dtype.name)
        session = ortgrad.InferenceSession(model, kernels="compiled")
        np.save(f"{name}-{dtype.name}-{sys.argv[1]}.npy", session.run(None, {"X": x})[0])
# The last one: a task that raises an exception has failed, and the NumPy kernel computes the node.
np.testing.assert_array_equal(session.run(None, {"X": x * 50})[0], [-1] * 5)
try:
    session.run(None, {"X": x * 500})
except ortgrad.KernelError as error:
    assert "too large for Picky" in str(error), error
else:
    raise AssertionError("no error")
"""
# With a warm cache nothing is compiled.
WARM = """
import sys
from ortgrad.compiled import machine_code
machine_code._compile_block = None
"""


def run(folder: Path, what: str, *dtypes: str, first: str = "import sys") -> None:
    program = folder / f"{what}.py"
    program.write_text(first + RUN)
    done = subprocess.run(
        [sys.executable, str(program), what, *dtypes],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"ORTGRAD_CACHE_DIR": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr


def write_modules(folder: Path, helpers: str = HELPERS) -> None:
    own = "\n".join([OWN, *(kernel(name, *what) for name, what in KERNELS.items())])
    for name, text in {"helpers": helpers, "deeper": "LEVEL = 0.625", "own": own}.items():
        (folder / f"{name}.py").write_text(text)


def expected(name: str, folder: Path) -> np.ndarray:
    """What Python computes, in double precision."""
    names: dict[str, object] = {"math": math, "np": np}
    if name == "Others":
        sys.path.insert(0, str(folder))
        try:
            exec(OWN.partition("\ndef declare")[0], names)
        finally:
            sys.path.remove(str(folder))
            for module in ("helpers", "deeper"):
                sys.modules.pop(module, None)
    exec(f"def row(i, xs, y):\n{statements(*KERNELS[name])}", names)
    y = np.empty((len(XS), len(KERNELS[name][0].split())))
    for i in range(len(XS)):
        names["row"](i, XS, y)  # type: ignore[operator]
    return y


def test_what_a_kernel_may_refer_to(tmp_path: Path) -> None:
    write_modules(tmp_path)
    tolerances = {"float32": 3e-6, "float64": 1e-13}
    run(tmp_path, "cold", *tolerances)
    run(tmp_path, "warm", *tolerances, first=WARM)
    for name, (expressions, _) in KERNELS.items():
        right = expected(name, tmp_path).T
        for dtype, tolerance in tolerances.items():
            cold, warm = (np.load(tmp_path / f"{name}-{dtype}-{what}.npy") for what in ("cold", "warm"))
            np.testing.assert_array_equal(warm, cold)
            for text, actual, desired in zip(expressions.split(), cold.T, right, strict=True):
                np.testing.assert_allclose(
                    actual, desired, rtol=tolerance, atol=tolerance / 10, err_msg=f"{text} in {dtype}"
                )
    # What a function contains that a kernel calls is part of the kernel.
    write_modules(tmp_path, HELPERS.replace("x / 3.0", "x / 4.0").replace("SCALE = 1.75", "SCALE = 2.75"))
    run(tmp_path, "changed", "float64")
    changed = np.load(tmp_path / "Others-float64-changed.npy")
    np.testing.assert_allclose(changed, expected("Others", tmp_path), rtol=1e-13)
    assert (changed != cold).any()


def undefined(dy: float, x: float) -> float:
    y = dy + x
    return nowhere(y)  # type: ignore[name-defined]  # noqa: F821  # WRONG


def calls_undefined(dy: float, x: float) -> float:
    return undefined(
        dy,
        x,
    )


def wrong_types(dy: float, x: float) -> float:
    y = dy * x
    return y + "text"  # type: ignore[operator]  # WRONG


@njit  # type: ignore[untyped-decorator]
def jitted_wrong_types(x: float) -> float:
    return x["key"]  # type: ignore[index]  # WRONG


def calls_jitted(dy: float, x: float) -> float:
    return float(jitted_wrong_types(dy * x))


def no_such_attribute(dy: float, x: float) -> float:
    return dy * math.nothing(x)  # type: ignore[attr-defined]  # WRONG


def allocates(dy: float, x: float) -> float:  # WRONG
    return dy + np.full(int(x), dy)[0]


def calls_allocates(dy: float, x: float) -> float:
    return allocates(dy, x)


def recursive(dy: float, x: float) -> float:  # WRONG
    return recursive(dy, x - 1.0) if x > 0 else dy


OBJECT = object()


def refers_to_an_object(dy: float, x: float) -> float:
    return dy if OBJECT else x  # WRONG


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (undefined, undefined),
        (calls_undefined, undefined),
        (wrong_types, wrong_types),
        (calls_jitted, jitted_wrong_types),
        (no_such_attribute, no_such_attribute),
        (calls_allocates, allocates),
        (recursive, recursive),
        (refers_to_an_object, refers_to_an_object),
    ],
    ids=lambda function: getattr(function, "__name__", ""),
)
def test_errors_name_the_file_and_the_line(function: object, wrong: object) -> None:
    code = getattr(wrong, "py_func", wrong).__code__
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n in range(code.co_firstlineno, len(lines)) if lines[n - 1].endswith("# WRONG"))
    with pytest.raises(RegistrationError) as caught:
        compiler.compile_block(source_of(CompiledKernel(function, 3), TYPES))  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{__file__}:{line}: "), caught.value


jitted_lambda = njit(lambda x: x * 2.5)


def calls_lambda(dy: float, x: float) -> float:
    return dy * jitted_lambda(x)


TABLE = np.array([0.5, math.inf])


def calls_all(dy: float, x: float) -> float:
    return dy * math.exp(x) + np.tanh(x) * TABLE[0] - math.inf * TABLE.size


def test_functions_without_text_are_compiled_for_this_process_only() -> None:
    """Others are all text, from which other processes compile the same."""
    source = source_of(CompiledKernel(calls_lambda, 3), TYPES)
    assert not source.is_text
    assert compiler.compile_block(source)
    source = source_of(CompiledKernel(calls_all, 3), TYPES)
    assert source.is_text
    copy = eval(repr(source), dict(workers._NAMES))
    assert repr(copy) == repr(source)
    assert compiler.compile_block(copy)
