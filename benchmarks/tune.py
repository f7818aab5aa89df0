"""Fit the costs by which plans of convolutions choose between ways (ortgrad.ops.conv.costs) to this machine.

    python benchmarks/tune.py [--only CHOICE ...] [--cases N] [--rounds N] [--seed N] [--write]

Both ways of a choice are timed on random shapes. Kernels are run directly, one task after the other on one
thread. The time is CPU time, and the least of several rounds, so that other load on the machine matters
little. An idle core is still better: `taskset -c 1 python benchmarks/tune.py`.

Costs in nanoseconds are those with the least relative error of the times, drawn to the old ones where the
measurements do not determine them. Ratios and the costs of Winograd's method are those by which plans make
the best choices. The script prints old and new numbers, the errors of the times, and how much longer than
the best choices those of plans take. With --write, all further processes on this machine use the new numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ortgrad.compiled import layout, machine_code
from ortgrad.operators.call import Call, make_call
from ortgrad.operators.compiled import Plan
from ortgrad.operators.declaration import Operator
from ortgrad.ops._windows import windows
from ortgrad.ops.conv import costs
from ortgrad.ops.conv.conv import conv_grad
from ortgrad.ops.conv.costs import Costs, Counts, Depthwise, Winograd
from ortgrad.ops.conv.depthwise import depthwise_conv, depthwise_conv_grad
from ortgrad.ops.conv.forward import dense_conv
from ortgrad.ops.conv.winograd import is_fastest, winograd_conv, winograd_conv_grad
from ortgrad.runtime.evaluate import declared_shapes
from ortgrad.runtime.plans import block_fields

# The seconds of a round, at least; and the products of a case, at least and at most.
ROUND_SECONDS = 2e-3
FEWEST_PRODUCTS, MOST_PRODUCTS = 1 << 12, 1 << 24
# How strongly costs are drawn to the old ones.
WEIGHT_OF_OLD = 0.05
# A new ratio must be so much better than the old one, as a part of the time.
LEAST_GAIN = 0.002
# By which estimated times plans choose.
DECIDED_BY = {"few": ("many_dx", "many_dw", "few_dx", "few_dw"), "depthwise": ("depthwise",)}


@dataclass(frozen=True)
class Case:
    """A node on tensors of certain shapes."""

    operator: Operator
    x: tuple[int, ...]
    w: tuple[int, ...]
    attributes: dict[str, Any]
    wanted: tuple[str, ...]

    @property
    def y(self) -> tuple[int, ...]:
        """The shape of Y and dY."""
        outputs = windows(
            self.x[2:], self.w[2:], pads=self.attributes["pads"], strides=self.attributes["strides"]
        )
        return self.x[0], self.w[0], *outputs.outputs

    @property
    def products(self) -> int:
        return self.x[0] * math.prod(self.w) * math.prod(self.y[2:])

    @property
    def call(self) -> Call:
        present = [parameter.name in ("X", "W", "dY") for parameter in self.operator.inputs]
        flags = [parameter.name in self.wanted for parameter in self.operator.outputs]
        return make_call(self.operator, "node", self.attributes, present, flags)

    def of(self, operator: Operator) -> Case:
        """Return the same for another operator."""
        return Case(operator, self.x, self.w, self.attributes, self.wanted)

    @property
    def inputs(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs; those that are absent are empty."""
        sizes = {"X": self.x, "W": self.w, "dY": self.y}
        return [sizes.get(parameter.name, (0,)) for parameter in self.operator.inputs]

    @property
    def outputs(self) -> list[tuple[int, ...] | None]:
        """The shapes of the outputs, None for those that are not wanted."""
        call = self.call
        zeros = [np.broadcast_to(np.float32(0), shape) for shape in self.inputs]
        shapes = zip(declared_shapes(call, zeros), call.wanted, strict=True)
        return [tuple(shape) if flag else None for shape, flag in shapes]

    def plan(self) -> Plan | None:
        """Return the kernel's plan."""
        call, kernel = self.call, self.operator.compiled_kernel
        assert kernel is not None and kernel.plan is not None
        given = [shape if real else None for shape, real in zip(self.inputs, call.present, strict=True)]
        return kernel.plan(*given, *self.outputs, **call.attributes)


class Block:
    """The machine code of a kernel with a plan, on memory of its own."""

    def __init__(self, case: Case, plan: Plan) -> None:
        kernel, random = case.operator.compiled_kernel, np.random.default_rng(0)
        assert kernel is not None
        numbers = {**case.call.attributes, **plan.numbers}
        fields = np.array(block_fields(kernel, plan, numbers, 4), np.int64)
        self._phases = len(plan.tasks) if isinstance(plan.tasks, tuple) else 1
        # All tasks of a phase are one block.
        fields[layout.PHASE_FIELDS + 1 : layout.PHASE_FIELDS + 2 * self._phases : 2] = 1
        tensors = [_aligned(math.prod(shape)) for shape in case.inputs]
        for tensor in tensors:
            random.standard_normal(out=tensor, dtype=np.float32)
        tensors += [_aligned(0 if shape is None else math.prod(shape)) for shape in case.outputs]
        address = machine_code.block(kernel, ["float32"] * len(tensors))
        tensors += [_aligned(math.prod(shape)) for shape in plan.scratch]
        self._kept = fields, tensors
        addresses = [tensor.ctypes.data for tensor in tensors]
        self._call = np.array([fields.ctypes.data, 0, 0, address, *addresses], np.int64)
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)

    def run(self) -> None:
        """Perform all tasks."""
        for phase in range(self._phases):
            self._call[layout.CALL_PHASE] = phase
            self._function(self._call.ctypes.data, 0)

    def seconds(self, rounds: int) -> float:
        """Return the least CPU time of several rounds."""
        self.run()
        start = time.perf_counter()
        self.run()
        times = max(1, math.ceil(ROUND_SECONDS / (time.perf_counter() - start)))
        found = math.inf
        for _ in range(rounds):
            start = time.thread_time()
            for _ in range(times):
                self.run()
            found = min(found, (time.thread_time() - start) / times)
        if self._call[layout.CALL_FAILED]:
            raise RuntimeError("a task has failed")
        return found


def _aligned(count: int) -> np.ndarray:
    """Return an array that begins where a cache line does, as tensors in sessions do."""
    memory = np.zeros(count + 16, np.float32)
    return memory[-memory.ctypes.data % 64 // 4 :][:count]


@dataclass
class Compared:
    """What a plan has compared: the times of ways, with how often their costs occur, and ratios."""

    times: list[tuple[float, Counts]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    def least(self, kind: type) -> Counts | None:
        """Return the counts of a kind with the least time."""
        found = [each for each in self.times if isinstance(each[1], kind)]
        return min(found, key=lambda each: each[0])[1] if found else None


@contextlib.contextmanager
def planning(found: Costs) -> Iterator[Compared]:
    """Let plans use certain costs, and note what they compare."""
    compared, before = Compared(), (costs.current, costs.time_of, costs.takes)

    def time_of(counts: Counts) -> float:
        compared.times.append((before[1](counts), counts))
        return compared.times[-1][0]

    def takes(choice: str, first: float, second: float) -> bool:
        compared.ratios[choice] = first / second
        return before[2](choice, first, second)

    costs.current, costs.time_of, costs.takes = lambda: found, time_of, takes  # type: ignore[assignment]
    try:
        yield compared
    finally:
        costs.current, costs.time_of, costs.takes = before


class Timed(NamedTuple):
    """The seconds of a way, and how often its costs occur. What else takes time is in `others`."""

    counts: Counts
    seconds: float
    others: tuple[float, ...] = ()


@dataclass
class Choice:
    """Cases in which plans have two ways, with the seconds of both.

    `first` says whether plans take the first way of a case, if they use certain costs.
    """

    first: Callable[[Case, Costs], bool]
    cases: list[tuple[Case, float, float]] = field(default_factory=list)

    def loss(self, found: Costs) -> float:
        """Return how much longer than the best ones the ways that plans take by certain costs take."""
        lost = [math.log((a if self.first(c, found) else b) / min(a, b)) for c, a, b in self.cases]
        return math.expm1(sum(lost) / len(lost)) if lost else 0.0


class Machine:
    """What is measured, and the costs that this machine has had so far."""

    def __init__(self, cases: int, rounds: int, seed: int) -> None:
        self.wanted, self.rounds, self.old = cases, rounds, costs.current()
        self.random = np.random.default_rng(seed)
        self.timed: dict[str, list[Timed]] = {}
        self.choices: dict[str, Choice] = {}

    def case(
        self, operator: Operator, wanted: Sequence[str], *, least: int = 4, most: int = 512, kernel: int = 0
    ) -> Case:
        """Return a random case of two dimensions."""
        depthwise = operator in (depthwise_conv, depthwise_conv_grad)
        while True:
            taps = kernel or self._pick(1, 3, 3, 3, 5)
            channels, filters = self._size(least, most), self._size(least, most)
            pad, step = self._pick(0, taps // 2, taps // 2), 1 if kernel else self._pick(1, 1, 1, 2)
            sizes = self._size(max(2, taps // 2), 64), self._size(max(2, taps // 2), 64)
            w = (channels, 1, taps, taps) if depthwise else (filters, channels, taps, taps)
            attributes = {"pads": [pad] * 4, "strides": [step] * 2, "group": channels if depthwise else 1}
            if min(sizes) + 2 * pad < taps:
                continue
            x = self._pick(1, 1, 2, 4, 8, 16), channels, *sizes
            case = Case(operator, x, w, attributes, tuple(wanted))
            if FEWEST_PRODUCTS < case.products < MOST_PRODUCTS:
                return case

    def _size(self, least: int, most: int) -> int:
        """Return a random number; small ones are as likely as large ones."""
        return int(math.exp(self.random.uniform(math.log(least), math.log(most + 1))))

    def _pick(self, *choices: int) -> int:
        return choices[self.random.integers(len(choices))]

    def measure(self, case: Case, **changes: Any) -> tuple[float, Compared]:
        """Return the time of a case whose plan is made with other costs, and what the plan has compared."""
        with planning(self.old._replace(**changes)) as compared:
            plan = case.plan()
        assert plan is not None
        return Block(case, plan).seconds(self.rounds), compared

    def measure_ratio(self, name: str, cases: Iterator[Case], **others: float) -> None:
        """Measure cases in both ways of a choice by a ratio."""

        def ratio(case: Case, found: Costs) -> float | None:
            with planning(found._replace(ratios=found.ratios._replace(**others))) as compared:
                case.plan()
            return compared.ratios.get(name)

        choice = Choice(lambda case, found: (ratio(case, found) or 0) < getattr(found.ratios, name))
        self.choices[name] = choice
        for case in cases:
            if ratio(case, self.old) is None:
                continue
            seconds = []
            for limit in (math.inf, 0.0):
                ratios = self.old.ratios._replace(**{**others, name: limit})
                taken, compared = self.measure(case, ratios=ratios)
                seconds.append(taken)
                # Of the counts, the first are those of the first way.
                if name == "few":
                    counts = compared.times[0 if limit else 1][1]
                    self.timed.setdefault(_name_of(counts), []).append(Timed(counts, taken))
            choice.cases.append((case, seconds[0], seconds[1]))
            if len(choice.cases) == self.wanted:
                return

    def measure_few(self) -> None:
        """Measure dX and dW with vectors of pairs and of positions or filters."""
        names = itertools.cycle(("dX", "dW"))
        self.measure_ratio("few", (self.case(conv_grad, [next(names)]) for _ in itertools.count()))

    def measure_skip(self) -> None:
        """Measure dW with and without the products with padding."""
        self.measure_ratio("skip", (self.case(conv_grad, ["dW"]) for _ in itertools.count()), few=0.0)

    def measure_rows(self) -> None:
        """Measure the forward kernel with filters as rows, and as columns, of its tiles."""
        cases = (self.case(dense_conv, ["Y"], most=128) for _ in itertools.count())
        self.measure_ratio("rows", (case for case in cases if case.w[2] > 1))

    def measure_depthwise(self) -> None:
        """Measure depthwise convolutions whose lanes are pieces, and channels."""

        def takes_pieces(case: Case, found: Costs) -> bool:
            with planning(found) as compared:
                case.plan()
            least = compared.least(Depthwise)
            return isinstance(least, Depthwise) and least.piece_block > 0

        choice = self.choices["depthwise"] = Choice(takes_pieces)
        operators = itertools.cycle(((depthwise_conv, ["Y"]), (depthwise_conv_grad, ["dX", "dW"])))
        only = self.old.depthwise._replace(block=math.inf), self.old.depthwise._replace(piece_block=math.inf)
        while len(choice.cases) < self.wanted:
            case = self.case(*next(operators), most=40)
            if case.x[1] % 16 == 0 or case.w[2] == 1:
                continue
            seconds = []
            for forced in only:
                taken, compared = self.measure(case, depthwise=forced)
                counts = compared.least(Depthwise)
                assert isinstance(counts, Depthwise)
                full = 1.0 if counts.piece_block else -(-case.x[1] // 16) * 16 / case.x[1]
                others = (1.0, case.products * full / 16)
                self.timed.setdefault("depthwise", []).append(Timed(counts, taken, others))
                seconds.append(taken)
            choice.cases.append((case, seconds[0], seconds[1]))

    def measure_winograd(self) -> None:
        """Measure convolutions with 3x3 kernels and their gradients by Winograd's method, and directly."""
        choice = self.choices["winograd"] = Choice(_takes_winograd)
        operators = itertools.cycle(
            (
                (winograd_conv, dense_conv, ["Y"]),
                (winograd_conv_grad, conv_grad, ["dX", "dW", "dB"]),
            )
        )
        for _ in range(self.wanted):
            first, second, wanted = next(operators)
            case = self.case(first, wanted, least=16, kernel=3)
            choice.cases.append((case, self.measure(case)[0], self.measure(case.of(second))[0]))


def _takes_winograd(case: Case, found: Costs) -> bool:
    with planning(found):
        return is_fastest(case.x, case.w, case.attributes)


def _name_of(counts: Counts) -> str:
    return next(name for name, part in costs.BUILT_IN._asdict().items() if type(part) is type(counts))


def fitted(timed: Sequence[Timed], old: Sequence[float]) -> list[float]:
    """Return the costs, none negative, with the least relative errors of the times, in nanoseconds."""
    seconds = np.array([each.seconds for each in timed]) * 1e9
    rows = np.array([[*each.counts, *each.others] for each in timed]) / seconds[:, None]
    # What is small beside the typical time is not determined: it stays near the old cost, on a machine that
    # is faster or slower.
    weight, known = WEIGHT_OF_OLD * math.sqrt(len(timed)), len(old)
    scale = 1 / np.median(rows[:, :known] @ old)
    pull = np.zeros((known, rows.shape[1]))
    pull[:, :known] = np.diag(weight / (scale * np.array(old)))
    matrix = np.concatenate([rows, pull])
    target = np.concatenate([np.ones(len(timed)), np.full(known, weight)])
    free = np.full(rows.shape[1], True)
    while True:
        found = np.zeros(len(free))
        found[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if (found >= 0).all():
            return [float(f"{cost:.3g}") for cost in found[:known]]
        free &= found > 0


def errors(timed: Sequence[Timed], own: Sequence[float]) -> tuple[float, float]:
    """Return the median of the relative errors, and that below which nine tenths of them are."""
    found = []
    for each in timed:
        expected = sum(cost * count for cost, count in zip(own, each.counts, strict=True))
        found.append(abs(expected / (each.seconds * 1e9) - 1))
    return float(np.median(found)), float(np.quantile(found, 0.9))


def with_best_ratio(choice: Choice, name: str, found: Costs) -> Costs:
    """Return the costs with the ratio by which plans make the best choices."""
    compared = []
    for case, first, second in choice.cases:
        with planning(found._replace(ratios=found.ratios._replace(few=0.0))) as ratios:
            case.plan()
        compared.append((ratios.ratios[name], math.log(first / second)))
    compared.sort()
    # The first ways of all cases up to one are taken.
    sums = [0.0, *itertools.accumulate(lost for _, lost in compared)]
    i = min(range(1, len(compared)), key=lambda i: sums[i], default=0)
    if i == 0:
        return found
    limit = float(f"{math.sqrt(compared[i - 1][0] * compared[i][0]):.3g}")
    best = found._replace(ratios=found.ratios._replace(**{name: limit}))
    return best if choice.loss(best) < choice.loss(found) - LEAST_GAIN else found


def fit(machine: Machine) -> Costs:
    """Return the new costs."""
    new = machine.old
    for name, timed in machine.timed.items():
        old = getattr(new, name)
        new = new._replace(**{name: type(old)(*fitted(timed, old))})
    for name, choice in machine.choices.items():
        if name in new.ratios._fields:
            new = with_best_ratio(choice, name, new)
        if name in DECIDED_BY and choice.loss(new) > choice.loss(machine.old):
            print(f"the costs of {name} are kept: the new ones do not lead to better choices")
            old = {part: getattr(machine.old, part) for part in DECIDED_BY[name]}
            ratios = new.ratios._replace(few=machine.old.ratios.few) if name == "few" else new.ratios
            new = new._replace(**old, ratios=ratios)
    if "winograd" in machine.choices:
        choice, own = machine.choices["winograd"], new.winograd
        steps = np.geomspace(1 / 3, 3, 23)
        pairs = itertools.product(steps, steps)
        grid = [new._replace(winograd=Winograd(own.transforms * a, own.tiles * b)) for a, b in pairs]
        best = min(grid, key=choice.loss)
        if choice.loss(best) < choice.loss(new) - LEAST_GAIN:
            new = new._replace(winograd=Winograd(*(float(f"{number:.3g}") for number in best.winograd)))
    return new


def report(machine: Machine, new: Costs) -> None:
    """Print old and new numbers, and how good they are."""
    for name, part in new._asdict().items():
        old, timed = getattr(machine.old, name), machine.timed.get(name, [])
        print(f"\n{name:20}{'old':>10}{'new':>10}")
        for of_part, before, after in zip(part._fields, old, part, strict=True):
            print(f"  {of_part:18}{before:10.4g}{after:10.4g}")
        if timed and name != "depthwise":
            found = zip(("median", "nine tenths"), errors(timed, old), errors(timed, part), strict=True)
            for what, before, after in found:
                print(f"  {f'error, {what}':18}{before:10.0%}{after:10.0%}")
    print("\nlonger than the best choices, on average")
    for name, choice in machine.choices.items():
        losses = choice.loss(machine.old), choice.loss(new)
        print(f"  {name:18}{losses[0]:10.1%}{losses[1]:10.1%}  ({len(choice.cases)} cases)")


def main() -> int:
    measurements = [name.removeprefix("measure_") for name in dir(Machine) if name.startswith("measure_")]
    names = [name for name in measurements if name != "ratio"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="CHOICE", help=", ".join(names)
    )
    parser.add_argument("--cases", type=int, default=150, metavar="N", help="of each choice (default: 150)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of each case (default: 7)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random shapes")
    parser.add_argument("--write", action="store_true", help="let further processes use the new numbers")
    arguments = parser.parse_args()
    if arguments.cases < 1 or arguments.rounds < 1:
        parser.error("nothing to measure")
    machine = Machine(arguments.cases, arguments.rounds, arguments.seed)
    print("old numbers:", "built in" if machine.old == costs.BUILT_IN else costs.path())
    for name in arguments.only:
        start = time.perf_counter()
        print(f"measuring {name}", end="", flush=True)
        getattr(machine, f"measure_{name}")()
        print(f": {time.perf_counter() - start:.0f} s", flush=True)
    new = fit(machine)
    report(machine, new)
    if arguments.write:
        costs.write(new)
        print(f"\nwritten to {costs.path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
