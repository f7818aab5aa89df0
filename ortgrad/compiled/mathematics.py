"""Mathematical functions for compiled kernels, without branches, so that loops over them can be vectorized.

Errors are at most two units in the last place, in single and in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ortgrad.compiled.functions import ByType, exp, exp_of_small, exponent, fraction

_INFINITY = math.inf


def where(condition: bool, a: float, b: float) -> float:
    """Return a if the condition is true, else b."""
    return a if condition else b


def maximum(a: float, b: float) -> float:
    """Return the larger number, NaN if there is one."""
    larger = a if a > b else b
    return larger if a == a else a


def minimum(a: float, b: float) -> float:
    """Return the smaller number, NaN if there is one."""
    smaller = a if a < b else b
    return smaller if a == a else a


def negation(a: bool) -> bool:
    """Return whether a is false."""
    return not a


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-x))


# The smallest normal number, and a power of two that makes normal numbers of those below it.
_TINY: Any = ByType(1.1754943508222875e-38, 2.2250738585072014e-308)
_RAISE: Any = ByType(2.0**24, 2.0**54)
_RAISED: Any = ByType(24.0, 54.0)


def _log_single(r: float) -> float:
    """log(1 + r) - r for 1 + r between sqrt(1/2) and sqrt(2), as in Cephes"""
    z = r * r
    p = r * 7.0376836292e-2 - 1.1514610310e-1
    p = p * r + 1.1676998740e-1
    p = p * r - 1.2420140846e-1
    p = p * r + 1.4249322787e-1
    p = p * r - 1.6668057665e-1
    p = p * r + 2.0000714765e-1
    p = p * r - 2.4999993993e-1
    p = p * r + 3.3333331174e-1
    return p * r * z - 0.5 * z


def _log_double(r: float) -> float:
    z = r * r
    p = r * 1.01875663804580931796e-4 + 4.97494994976747001425e-1
    p = p * r + 4.70579119878881725854e0
    p = p * r + 1.44989225341610930846e1
    p = p * r + 1.79368678507819816313e1
    p = p * r + 7.70838733755885391666e0
    q = r + 1.12873587189167450590e1
    q = q * r + 4.52279145837532221105e1
    q = q * r + 8.29875266912776603211e1
    q = q * r + 7.11544750618563894466e1
    q = q * r + 2.31251620126765340583e1
    return r * (z * (p / q)) - 0.5 * z


_log_of_fraction: Any = ByType(_log_single, _log_double)


def log(x: float) -> float:
    """Return the natural logarithm: -inf for 0, NaN for a negative number."""
    small = x < _TINY
    a = x * _RAISE if small else x
    m, n = fraction(a), exponent(a)
    high = m > 1.4142135623730951
    m = m * 0.5 if high else m
    n = n + 1.0 if high else n
    n = n - _RAISED if small else n
    r = m - 1.0
    # log(2) in two parts
    y = _log_of_fraction(r) - n * 2.121944400546905827679e-4
    y = (r + y) + n * 0.693359375
    y = y if x < _INFINITY else x
    y = y if x != 0.0 else -_INFINITY
    return y if x >= 0.0 else x - x + (_INFINITY - _INFINITY)


def softplus(x: float) -> float:
    """Return log(1 + exp(x))."""
    u = exp(-abs(x))
    w = 1.0 + u
    # What rounding took from w
    rest = (u - (w - 1.0)) / w
    return maximum(x, 0.0) + (log(w) + rest)


def _tanh_single(x: float, z: float) -> float:
    """tanh(x) - x for |x| < 0.625 and z = x^2, as in Cephes"""
    p = z * -5.70498872745e-3 + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    return p * z * x


def _tanh_double(x: float, z: float) -> float:
    p = (z * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    return x * z * (p / q)


_tanh_near_zero: Any = ByType(_tanh_single, _tanh_double)


def tanh(x: float) -> float:
    """Return the hyperbolic tangent."""
    a = abs(x)
    # Beyond 20 the result is 1.
    b = a if a < 20.0 else 20.0
    far = 1.0 - 2.0 / (exp_of_small(2.0 * b) + 1.0)
    far = -far if x < 0.0 else far
    y = x + _tanh_near_zero(x, x * x) if a < 0.625 else far
    return y if x == x else x


def _erf_single(x: float) -> float:
    z = x * x
    # From Cephes
    p = z * 7.853861353153693e-5 - 8.010193625184903e-4
    p = p * z + 5.188327685732524e-3
    p = p * z - 2.685381193529856e-2
    p = p * z + 1.128358514861418e-1
    p = p * z - 3.761262582423300e-1
    near = x * (p * z + 1.128379165726710e0)
    # -log(1 - erf(|x|)) from 0.9 to 4, fitted so that the error of erf is below 2e-9
    a = abs(x)
    a = a if a < 4.0 else 4.0
    p = a * -0.000197182622 + 0.0030556157
    p = p * a - 0.0222771171
    p = p * a + 0.104037417
    p = p * a + 0.637059693
    p = p * a + 1.1277496
    far = 1.0 - exp_of_small(-(p * a + 0.000177487243))
    far = -far if x < 0.0 else far
    y = near if abs(x) < 1.0 else far
    return y if x == x else x


def _erf_double(x: float) -> float:
    z = x * x
    # From Cephes
    p = z * 9.60497373987051638749e0 + 9.00260197203842689217e1
    p = p * z + 2.23200534594684319226e3
    p = p * z + 7.00332514112805075473e3
    p = p * z + 5.55923013010394962768e4
    q = z + 3.35617141647503099647e1
    q = q * z + 5.21357949780152679795e2
    q = q * z + 4.59432382970980127987e3
    q = q * z + 2.26290000613890934246e4
    q = q * z + 4.92673942608635921086e4
    near = x * (p / q)
    a = abs(x)
    a = a if a < 6.0 else 6.0
    p = a * 2.46196981473530512524e-10 + 5.64189564831068821977e-1
    p = p * a + 7.46321056442269912687e0
    p = p * a + 4.86371970985681366614e1
    p = p * a + 1.96520832956077098242e2
    p = p * a + 5.26445194995477358631e2
    p = p * a + 9.34528527171957607540e2
    p = p * a + 1.02755188689515710272e3
    p = p * a + 5.57535335369399327526e2
    q = a + 1.32281951154744992508e1
    q = q * a + 8.67072140885989742329e1
    q = q * a + 3.54937778887819891062e2
    q = q * a + 9.75708501743205489753e2
    q = q * a + 1.82390916687909736289e3
    q = q * a + 2.24633760818710981792e3
    q = q * a + 1.65666309194161350182e3
    q = q * a + 5.57535340817727675546e2
    far = 1.0 - exp_of_small(-(a * a)) * (p / q)
    far = -far if x < 0.0 else far
    y = near if abs(x) < 1.0 else far
    return y if x == x else x


erf: Callable[[float], float] = ByType(_erf_single, _erf_double)
