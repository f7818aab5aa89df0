"""ConvGrad for Numba: both gradients are sums of products that `add_products` computes in registers.

dX is the convolution of the weights with dY, which is in a box with zeros around it. The rows of a tile are
channels and its columns consecutive positions, so that a tap of the kernel is a shift of the columns. With
strides, dX is divided into parts, each of which has its own taps and is such a convolution; parts that share
rows of dX are interleaved. If rows of dX are short, the columns are first packed into panels, since they
would otherwise contain many zeros.

dW is the product of X, which is in a box with its padding, and the transposed dY. The rows of a tile are
pairs of channel and tap and its columns are filters, so that X is not copied for every tap. If much of what a
window sees is padding, as in small pictures, products with padding are left out: the rows of a tile are then
channels, and it has a single tap.

The products of W with the zeros around dY must be zero, so the NumPy kernel takes over if W contains NaN or
infinities. The same applies if dY contains them and products with padding are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ortgrad.compiled.functions import TILE, TILE_ROWS, clear, transpose
from ortgrad.operators.compiled import Plan
from ortgrad.operators.records import numbers_of
from ortgrad.ops._windows import Windows
from ortgrad.ops.conv import costs
from ortgrad.ops.conv._compiled_dw import DwTables, sum_of_filter, weights_task
from ortgrad.ops.conv._compiled_dx import DxTables, channels_task
from ortgrad.ops.conv._dense import Known, Sizes, in_three_dimensions, place_in, reaches, views_of, windows_of
from ortgrad.ops.conv._few_positions import Few, FewTask, few_channels_task, few_weights_task
from ortgrad.ops.conv._few_positions_plan import Division, FewPositions
from ortgrad.ops.conv._geometry import (
    COLUMNS,
    TERMS,
    Convolution,
    Frame,
    Geometry,
    Part,
    Range,
    Spatial,
    volume,
)
from ortgrad.ops.conv._memory import Given, Gradients, aligned, are_finite, embed
from ortgrad.ops.conv.costs import Counts, ManyDw, ManyDx

# There are enough tasks for several threads, provided that each has enough products, and enough channels or
# pairs of channel and tap. With panels it has more channels, since each task packs the columns itself.
_TASKS, _PRODUCTS = 16, 1 << 20
_FEW_CHANNELS, _FEW_CHANNELS_OF_PANELS, _FEW_PAIRS, _MOST_PAIRS = 24, 128, 24, 288
# Blocks of positions per task. With strides, a part uses few of the weights of a cache line, so it should use
# each of them for many positions.
_BLOCKS, _BLOCKS_OF_PARTS = 2, 4
# A number of pairs that fills both tiles and the squares that are transposed at once.
_PAIRS = 48


def plan(
    dy: Sizes, x: Sizes, w: Sizes, dx: Sizes | None, dw: Sizes | None, db: Sizes | None, **attributes: Any
) -> Plan | None:
    """Return the plan; None for tensors without elements, and for more than three spatial dimensions."""
    win, group = windows_of(x, w, attributes)
    if dy[2:] != win.outputs or win.rank > 3 or not math.prod(x) * math.prod(w):
        return None
    win = in_three_dimensions(win)
    samples, filters, channels, taps = x[0], w[0] // group, w[1], math.prod(w[2:])
    positions = math.prod(win.outputs)
    tasks = min(_TASKS, max(1, samples * math.prod(w) * positions // _PRODUCTS))
    division = _Division.of(win, samples, group, channels, tasks)
    dx_tasks, table = division.table()
    ranges = _ranges(win)
    skips = _pays_to_skip(win, channels, ranges)
    unit = taps if skips else 1
    pairs = _pairs_of_task(group * -(-filters // COLUMNS), channels * taps, tasks, unit)
    dw_tasks = group * -(-filters // COLUMNS) * -(-channels * taps // pairs)
    few = FewPositions(win, samples, group, filters, channels)
    few_dx = dx is not None and few.dx_is_possible and _takes_few(few.dx_counts, _dx_counts(few, division))
    few_dw = dw is not None and few.dw_is_possible and _takes_few(few.dw_counts, _dw_counts(few, skips))
    few_tasks = Division.of(few, tasks, dx=few_dx, dw=few_dw)
    dx_tasks, dw_tasks = few_tasks.dx_tasks or dx_tasks, few_tasks.dw_tasks or dw_tasks
    dx_tasks, dw_tasks = dx_tasks if dx else 0, dw_tasks if dw else 0
    x_in_place, x_box, box = few.in_place, few.box, division.box
    dy_in_place = win.outputs == win.sizes == division.box and positions % TILE == 0
    dy_boxes = samples * dy[1] if dx and not dy_in_place and not few_dx else 0
    x_boxes = samples * x[1] if dw and not x_in_place and not few_dw else 0
    transpositions = samples * group * -(-filters // TILE) if dw and not few_dw else 0
    geometry = Geometry(
        conv=few.convolution,
        dy=Frame(Spatial(*win.outputs), Spatial(*box), Spatial(*division.heads)),
        dy_in_place=dy_in_place,
        panels=division.panels,
        dy_boxes=dy_boxes,
        x_boxes=x_boxes,
        transpositions=transpositions,
        dx_tasks=dx_tasks,
        dw_tasks=dw_tasks,
        dx_channels=division.channels_of_task,
        dx_blocks=division.blocks_of_task,
        dx_members=division.members,
        dw_rows=pairs,
        dw_skips=skips,
        kernel_columns=win.kernel[2],
        db_filters=few.biases_of_task,
    )
    return Plan(
        tasks=(
            dy_boxes + x_boxes + transpositions + (w[0] if dx and not few_dx else 0),
            dx_tasks + dw_tasks + (-(-w[0] // few.biases_of_task) if db else 0),
        ),
        views=views_of(dy, x, w, dx, dw, db),
        numbers={
            "geometry": numbers_of(geometry),
            "taps": [tap for part in division.parts for tap in part.taps],
            "shifts": [place_in(shift, box) for part in division.parts for shift in part.shifts],
            "parts": table,
            "offsets": [place_in(reach, x_box) for reach in reaches(win)],
            "ranges": [number for tap in ranges for number in numbers_of(tap)],
            "few": numbers_of(few_tasks.numbers),
        },
        work=samples * math.prod(w) * positions // 8,
        scratch=[
            # Columns are read up to a multiple of 16, and no other row follows the last one.
            (dy_boxes * math.prod(box) + COLUMNS + TILE + box[2] if dy_boxes else 0,),
            (x_boxes * math.prod(x_box),),
            (transpositions * TILE * positions + TILE if transpositions else 0,),
            (few_tasks.memory,),
        ],
    )


def _takes_few(few: Counts, many: Counts) -> bool:
    return costs.takes("few", costs.time_of(few), costs.time_of(many))


def _dx_counts(few: FewPositions, division: _Division) -> ManyDx:
    """Return how often each cost of dX occurs."""
    filters, channels = few.filters * few.group, few.channels * few.group
    products, copies = division.counts
    return ManyDx(
        call=1,
        task=division.table()[0],
        product=filters * products,
        copy=filters * copies,
        weight=filters * few.channels * few.taps,
        box=filters * few.samples * math.prod(division.box),
        row=filters * few.samples * division.box[0] * division.box[1],
        filter=filters,
        element=few.samples * channels * math.prod(few.win.sizes),
    )


def _dw_counts(few: FewPositions, skips: bool) -> ManyDw:
    """Return how often each cost of dW occurs."""
    pairs, filters = few.channels * few.taps, -(-few.filters // TILE) * TILE * few.group
    products = few.rows * filters * -(-pairs // TILE_ROWS) * TILE_ROWS
    if skips:
        products = few.samples * _seen(_ranges(few.win)) * filters * -(-few.channels // TILE_ROWS) * TILE_ROWS
    boxes = 0 if few.in_place else few.samples * few.channels * few.group
    return ManyDw(
        call=1,
        group=few.group,
        product=products,
        tile=-(-pairs // TILE_ROWS) * -(-few.filters // COLUMNS) * -(-few.rows // TERMS) * few.group,
        position=filters * few.rows,
        weight=filters * pairs,
        box=boxes * math.prod(few.box),
        row=boxes * few.box[0] * few.box[1],
    )


def is_fastest(dy: Known, x: Known, w: Known, *, group: int, strides: Sequence[int] | None, **_: Any) -> bool:
    """Return whether the compiled kernel was measured to be faster than the body."""
    if w is None:
        return True
    if len(w) > 5 or (w[1] == 1 and group > 1):
        return False
    # If windows do not overlap, the body copies nothing either.
    steps = strides or [1] * len(w[2:])
    return any(k is None or k > s for k, s in zip(w[2:], steps, strict=False))


@dataclass(frozen=True)
class _Part:
    """The elements of dX whose places in the padded X leave a certain remainder when divided by the strides.

    Its position p is that of the padded X, divided by the strides. Its taps read dY at p - shift.
    """

    remainder: Sizes
    first: Sizes
    count: Sizes
    taps: tuple[int, ...]
    shifts: tuple[Sizes, ...]

    @classmethod
    def all(cls, win: Windows) -> list[_Part]:
        """Return the parts that have elements."""
        taps: dict[Sizes, list[tuple[int, Sizes]]] = {}
        for tap, reach in enumerate(reaches(win)):
            remainder = tuple(r % s for r, s in zip(reach, win.strides, strict=True))
            shift = tuple(r // s for r, s in zip(reach, win.strides, strict=True))
            taps.setdefault(remainder, []).append((tap, shift))
        parts = []
        for remainder in itertools.product(*map(range, win.strides)):
            firsts, counts = [], []
            for r, s, h, n in zip(remainder, win.strides, win.heads, win.sizes, strict=True):
                firsts.append(-((r - h) // s))
                counts.append((n - 1 + h - r) // s - firsts[-1] + 1)
            own = taps.get(remainder, [])
            if min(counts) > 0:
                shifts = tuple(shift for _, shift in own)
                parts.append(cls(remainder, tuple(firsts), tuple(counts), tuple(t for t, _ in own), shifts))
        # Parts that share rows are neighbours, in the order in which they begin in a row.
        step = win.strides[2]
        return sorted(parts, key=lambda p: (*p.remainder[:2], p.first[2] * step + p.remainder[2]))


@dataclass(frozen=True)
class _Division:
    """How dX is divided into tasks, and the boxes of dY for it."""

    parts: list[_Part]
    samples: int
    group: int
    channels: int
    heads: Sizes  # zeros before dY in its box
    box: Sizes
    panels: bool
    blocks_of_task: int
    channels_of_task: int

    @classmethod
    def of(cls, win: Windows, samples: int, group: int, channels: int, tasks: int) -> _Division:
        parts = _Part.all(win)
        heads, box = [], []
        for axis, outputs in enumerate(win.outputs):
            ranges = [
                (part.first[axis] - shift[axis], part.count[axis]) for part in parts for shift in part.shifts
            ]
            before = max(0, *(-first for first, _ in ranges), 0)
            behind = max(0, *(first + count - outputs for first, count in ranges), 0)
            heads.append(before)
            # The zeros after a row are also those before the next one.
            zeros = max(before, behind) if axis == 2 else before + behind
            most = max(part.count[axis] for part in parts) if axis == 2 else 0
            box.append(max(outputs + zeros, most))
        blocks = _BLOCKS if len(parts) == 1 else _BLOCKS_OF_PARTS
        whole = cls(parts, samples, group, channels, tuple(heads), tuple(box), False, blocks, channels)
        panels = replace(whole, panels=True)
        best = panels if panels._cost < whole._cost else whole
        while best.table()[0] < tasks and best.blocks_of_task > 1:
            best = replace(best, blocks_of_task=best.blocks_of_task // 2)
        splits = -(-tasks // best.table()[0])
        few = max(_FEW_CHANNELS_OF_PANELS if best.panels else _FEW_CHANNELS, -(-channels // splits))
        return replace(best, channels_of_task=min(channels, -(-few // TILE_ROWS) * TILE_ROWS))

    @property
    def members(self) -> int:
        """How many parts share rows of dX and are computed together; with panels, each is computed alone."""
        first = self.parts[0]
        return 1 if self.panels else sum(part.remainder[:2] == first.remainder[:2] for part in self.parts)

    def _lines(self, part: _Part) -> tuple[int, int]:
        """Return the number of lines of consecutive positions, and their length."""
        if self.panels:
            return 1, self.samples * math.prod(part.count)
        return self.samples * part.count[0], (part.count[1] - 1) * self.box[2] + part.count[2]

    @property
    def counts(self) -> tuple[int, float]:
        """The numbers of products and copies of a filter."""
        products, copies = 0, 0.0
        for part in self.parts:
            lines, length = self._lines(part)
            products += len(part.taps) * lines * -(-length // TILE) * TILE * self.channels
            if self.panels:
                width = part.count[2]
                copies += len(part.taps) * lines * length / width * -(-width // TILE)
        return products, copies

    @property
    def _cost(self) -> float:
        cost, (products, copies) = costs.current().many_dx, self.counts
        return cost.product * products + cost.copy * copies

    def table(self) -> tuple[int, list[int]]:
        """Return the number of tasks, and the table of parts for the kernel."""
        tasks, table, tap = 0, [], 0
        splits = -(-self.channels // self.channels_of_task)
        for i, part in enumerate(self.parts):
            lines, length = self._lines(part)
            units = -(-length // (self.blocks_of_task * COLUMNS))
            numbers = Part(
                task=tasks,
                first=Spatial(*part.first),
                counts=Spatial(*part.count),
                place=Spatial(*part.remainder),
                tap=tap,
                taps=len(part.taps),
                units=units,
            )
            table += numbers_of(numbers)
            # The first one is the longest.
            tasks += lines * units * self.group * splits if i % self.members == 0 else 0
            tap += len(part.taps)
        return tasks, table


def _pairs_of_task(blocks: int, pairs: int, tasks: int, taps: int) -> int:
    """Return the number of pairs of channel and tap of a task, for `blocks` blocks of filters.

    It is a multiple of the number of taps of a tile.
    """
    wanted = max(_FEW_PAIRS, -(-pairs * blocks // tasks))
    if taps > 1:
        unit = TILE_ROWS * taps
        return min(max(1, _MOST_PAIRS // unit), -(-wanted // unit)) * unit
    unit = _PAIRS if wanted >= _PAIRS else TILE_ROWS
    return min(_MOST_PAIRS, -(-wanted // unit) * unit)


def _ranges(win: Windows) -> list[Range]:
    """Return, for each tap of the kernel, the rows and columns of the output for which it sees no padding."""
    ranges = []
    for reach in reaches(win):
        tap: list[int] = []
        for axis in (1, 2):
            shift, stride = win.heads[axis] - reach[axis], win.strides[axis]
            first = min(max(0, -(-shift // stride)), win.outputs[axis])
            tap += [first, max(first, min(win.outputs[axis], (win.sizes[axis] - 1 + shift) // stride + 1))]
        ranges.append(Range(*tap))
    return ranges


def _pays_to_skip(win: Windows, channels: int, ranges: list[Range]) -> bool:
    """Return whether dW is faster if products with padding are left out."""
    positions, taps = math.prod(win.outputs), math.prod(win.kernel)
    if win.outputs[0] * win.kernel[0] > 1 or positions > 2 * TERMS or taps * TILE_ROWS > _MOST_PAIRS:
        return False
    # Tiles of all taps are full; tiles of one tap may have unused rows.
    rows = -(-channels // TILE_ROWS) * TILE_ROWS
    return costs.takes("skip", _seen(ranges) * rows, positions * taps * channels)


def _seen(ranges: list[Range]) -> int:
    """Return the number of pairs of a tap and a position in a plane such that the tap sees no padding."""
    return sum((bottom - top) * (right - left) for top, bottom, left, right in ranges)


class Tables(NamedTuple):
    """The lists of a plan."""

    of_dx: DxTables
    of_dw: DwTables


class Boxes(NamedTuple):
    """dY and X in boxes, and the transposed dY."""

    dy_boxes: np.ndarray
    x_boxes: np.ndarray
    turned: np.ndarray


def prepare(task: int, given: Given, boxes: Boxes, geometry: Geometry) -> bool:
    """Copy a channel of dY or X into its box, transpose dY of some filters, or check W of a filter."""
    if task < geometry.dy_boxes:
        plane = volume(geometry.dy.box)
        embed(task, given.dy, boxes.dy_boxes, task * plane, geometry.dy)
        if task == geometry.dy_boxes - 1:
            clear(boxes.dy_boxes, (task + 1) * plane, len(boxes.dy_boxes) - (task + 1) * plane)
        return False
    task -= geometry.dy_boxes
    if task < geometry.x_boxes:
        embed(task, given.x, boxes.x_boxes, task * volume(geometry.conv.x.box), geometry.conv.x)
        return False
    task -= geometry.x_boxes
    if task < geometry.transpositions:
        return _transpose_filters(task, given.dy, aligned(boxes.turned), geometry)
    task -= geometry.transpositions
    size = len(given.w) // (geometry.conv.filters * geometry.conv.groups)
    return not are_finite(given.w[task * size : (task + 1) * size])


def _transpose_filters(task: int, dy: np.ndarray, turned: np.ndarray, geometry: Geometry) -> bool:
    """Transpose dY of up to 16 filters of a sample, with zeros for filters that do not exist.

    Return whether there are NaN or infinities whose products with padding would be left out.
    """
    conv: Convolution = geometry.conv
    filters, positions = conv.filters, volume(conv.output)
    slices = (filters + TILE - 1) // TILE
    sample, group, first = task // slices // conv.groups, task // slices % conv.groups, task % slices * TILE
    block = first // COLUMNS * COLUMNS
    columns, count = min(COLUMNS, slices * TILE - block), min(TILE, filters - first)
    place = (group * slices * TILE + block) * conv.samples * positions
    place += sample * positions * columns + first - block
    source = ((sample * conv.groups + group) * filters + first) * positions
    p = 0
    while count == TILE and p + TILE <= positions:
        transpose(turned, place + p * columns, columns, dy, source + p, positions)
        p += TILE
    for k in range(p, positions):
        for i in range(TILE):
            turned[place + k * columns + i] = dy[source + i * positions + k] if i < count else 0.0
    return geometry.dw_skips != 0 and not are_finite(dy[source : source + count * positions])


def conv_grad_task(
    task: int,
    given: Given,
    gradients: Gradients,
    boxes: Boxes,
    scratch: np.ndarray,
    geometry: Geometry,
    few: Few,
    tables: Tables,
) -> bool:
    """Compute dX of some channels and positions, dW of some filters, or dB of some."""
    conv: Convolution = geometry.conv
    if task < geometry.dx_tasks:
        if few.dx:
            of_task = FewTask(scratch, conv, few, tables.of_dw.offsets)
            return few_channels_task(task, given.dy, given.w, gradients.dx, of_task)
        source = given.dy if geometry.dy_in_place else boxes.dy_boxes
        return channels_task(task, source, given.w, gradients.dx, geometry, tables.of_dx)
    task -= geometry.dx_tasks
    if task < geometry.dw_tasks:
        if few.dw:
            of_task = FewTask(scratch, conv, few, tables.of_dw.offsets)
            return few_weights_task(task, given.dy, given.x, gradients.dw, of_task)
        values = given.x if conv.x_in_place else boxes.x_boxes
        return weights_task(task, values, boxes.turned, gradients.dw, geometry, tables.of_dw)
    task -= geometry.dw_tasks
    filters = conv.filters * conv.groups
    for m in range(task * geometry.db_filters, min((task + 1) * geometry.db_filters, filters)):
        gradients.db[m] = sum_of_filter(m, given.dy, conv.samples, filters)
    return False
