"""What convolutions cost: numbers by which plans choose between the ways to compute them.

The values below were fitted to measurements on one core of an AMD EPYC with AVX-512 (115 GFLOP/s in single
precision; that of docs/benchmarks.md). `python benchmarks/tune.py --write` fits them to the machine at hand,
and writes them to a file in the folder of compiled kernels, from which `current` reads them. The file has the
name of the processor, since machines may share the folder. It contains only numbers, which decide between
ways that are all correct.
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ortgrad.compiled import cache
from ortgrad.compiled.functions import TILE

# Files that are longer were not written by tune.py.
_LONGEST = 1 << 16


class ManyDx(NamedTuple):
    """Nanoseconds of dX if vectors hold positions."""

    call: float = 2100
    task: float = 406
    product: float = 0.0184  # of a filter, a channel, a tap and a position
    copy: float = 0.8832  # of up to 16 positions of a row to a panel
    weight: float = 0.206
    box: float = 0.128  # an element of a box of dY
    row: float = 5.5  # of a box
    filter: float = 18
    element: float = 0.75  # of dX


class ManyDw(NamedTuple):
    """Nanoseconds of dW if vectors hold filters."""

    call: float = 1700
    group: float = 910
    product: float = 0.0186
    tile: float = 44
    position: float = 0.47  # of dY, with the filters that fill vectors
    weight: float = 0.174  # with these filters
    box: float = 0.1  # an element of a box of X
    row: float = 6.6  # of a box


class FewDx(NamedTuple):
    """Nanoseconds of dX if vectors hold pairs of channel and tap, as they do for few positions."""

    call: float = 2300
    tile: float = 59
    seen: float = 0.555  # an element of the matrix of what windows see
    row: float = 8.7  # of a box
    product: float = 0.0201
    weight: float = 0.06


class FewDw(NamedTuple):
    """Nanoseconds of dW if vectors hold such pairs."""

    call: float = 1900
    group: float = 560
    tile: float = 16
    seen: float = 0.44
    row: float = 7.6
    product: float = 0.0201
    weight: float = 0.06


class Depthwise(NamedTuple):
    """The time of depthwise convolutions, in any unit; here it is that of a vector of 16 channels."""

    vector: float = 1
    block: float = 32  # of channels, of a strip
    piece_vector: float = 1.4  # if lanes are pieces of planes
    piece_block: float = 224
    tap: float = 8  # of the weights of a block of pieces


class Winograd(NamedTuple):
    """What Winograd's method takes, compared with what it saves."""

    transforms: float = 13.5  # of a tile's channel, in products with a filter
    tiles: float = 18  # tiles that save what the transforms of the weights take


class Ratios(NamedTuple):
    """The ratios of two estimates below which the first of two ways is taken."""

    few: float = 0.87  # of the times for few positions and for many
    skip: float = 0.97  # of the products of dW without those with padding, and all
    rows: float = 1 / 1.1  # of the products of the forward kernel with filters as rows, and as columns


class AgainstConv(NamedTuple):
    """When the kernel of dense convolutions is faster than onnxruntime's, for up to `filters` filters."""

    filters: float
    terms: int  # products of a result, at least
    positions: int  # at least
    partial: int  # the same, if the last filters do not fill a vector


class AgainstGemm(NamedTuple):
    """When the kernels for few positions are faster than onnxruntime's Gemm for pointwise convolutions."""

    dx_rows: tuple[int, int] = (2, 112)  # positions of all samples, at least and at most
    dx_filters: int = 32  # at least
    dx_elements: int = 1 << 15  # at most, and so are all numbers below
    dx_products: int = 1 << 22
    dw_rows: int = 32
    dw_rows_of_few: int = 400  # if there are few weights
    dw_weights: int = 1 << 14


# Limits that were measured beside onnxruntime's kernels; tune.py does not fit them. With few positions,
# transposing the weights of many filters takes too long.
AGAINST_CONV = (
    AgainstConv(2 * TILE, 64, 16, 128),
    AgainstConv(4 * TILE, 144, 64, 256),
    AgainstConv(math.inf, 240, 128, 128),
)
AGAINST_CONV_OF_FEW_TERMS = AgainstConv(TILE, 24, 1024, 1024)
AGAINST_GEMM = AgainstGemm()


class Costs(NamedTuple):
    """All numbers that tune.py fits, by what they belong to."""

    many_dx: ManyDx = ManyDx()
    many_dw: ManyDw = ManyDw()
    few_dx: FewDx = FewDx()
    few_dw: FewDw = FewDw()
    depthwise: Depthwise = Depthwise()
    winograd: Winograd = Winograd()
    ratios: Ratios = Ratios()


Counts = ManyDx | ManyDw | FewDx | FewDw | Depthwise
BUILT_IN = Costs()


@functools.cache
def current() -> Costs:
    """Return the numbers for this machine: those that were fitted to it, or else those that are built in.

    A file that cannot be used is ignored, with a warning.
    """
    data = cache.read_plain(path().name, _LONGEST)
    if data is None:
        return BUILT_IN
    try:
        return _checked(json.loads(data, parse_int=float))
    except (ValueError, RecursionError) as error:
        fix = "remove it, or run `python benchmarks/tune.py --write`"
        warnings.warn(f"{path()} is ignored: {error}; {fix}", RuntimeWarning, stacklevel=2)
        return BUILT_IN


def write(costs: Costs) -> None:
    """Let further processes on this machine use these numbers; raises OSError if that is not possible."""
    text = json.dumps({name: part._asdict() for name, part in costs._asdict().items()}, indent=2)
    cache.write_plain(path().name, f"{text}\n".encode())


def path() -> Path:
    """Return the file for this processor."""
    from ortgrad.compiled import processor  # imports llvmlite, which sessions without kernels do without

    return cache.folder() / f"costs-{re.sub(r'[^A-Za-z0-9.-]', '_', processor.description()[0])}.json"


def time_of(counts: Counts) -> float:
    """Return the time of a way; `counts` says how often each of its costs occurs."""
    own = next(part for part in current() if type(part) is type(counts))
    return sum(cost * count for cost, count in zip(own, counts, strict=True))


def takes(choice: str, first: float, second: float) -> bool:
    """Return whether to take the first of two ways; `choice` is a field of Ratios."""
    return first < getattr(current().ratios, choice) * second


def _checked(found: Any) -> Costs:
    """Return the numbers of a file; raises ValueError for what tune.py does not write."""
    _require_names("the file", found, Costs._fields)
    parts = []
    for name, part in BUILT_IN._asdict().items():
        numbers = found[name]
        _require_names(name, numbers, part._fields)
        for field, number in numbers.items():
            if not isinstance(number, float) or not math.isfinite(number) or number < 0:
                raise ValueError(f"{name}.{field} is {number!r:.40}, which is not a number of at least 0")
        parts.append(type(part)(**numbers))
    return Costs(*parts)


def _require_names(what: str, found: Any, names: Iterable[str]) -> None:
    if not isinstance(found, dict) or found.keys() != set(names):
        raise ValueError(f"{what} does not have exactly the names {', '.join(names)}")
