"""The text of the functions of a fused node's compiled kernel, made from its program."""

from __future__ import annotations

import hashlib
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

from ortgrad.compiled.functions import SUMS, accumulate, double, fetch, put, use_short_vectors
from ortgrad.lowering.fusion.expressions import COMPILED, literal, own_kernel, write
from ortgrad.lowering.fusion.program import Constant, Program
from ortgrad.lowering.fusion.sums import PIECE, add_columns, add_parts

# The number of elements of a row that a task computes at most.
CHUNK = 4096
_NUMBERS = ("columns", "chunks", "inner", "places", "many")


def make_functions(program: Program) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return the function that performs a task, and one that adds up the parts of sums, if there are any."""
    if not program.sums:
        return _make_function(_text(program), program), None
    by_rows = program.sums[0].by_rows
    function, last = (_rows_text, _last_of_rows) if by_rows else (_columns_text, _last_of_columns)
    return _make_function(function(program), program), _make_function(last(program), program)


def parameters(program: Program) -> list[float]:
    """Return the constants that the functions take as parameters.

    Networks have trained constants. With those in its text, every layer would have a kernel of its own.
    """
    constants = [o.number for step in program.steps for o in step.operands if isinstance(o, Constant)]
    return list(dict.fromkeys(c for c in constants if math.isfinite(c) and not _is_common(c)))


def _is_common(number: float) -> bool:
    return abs(number) <= 8 and (4 * number).is_integer()


def _text(program: Program) -> str:
    """Return the text of the function that computes a chunk of a row."""
    lines = [
        "place = task // chunks",
        f"start = (task - place * chunks) * {CHUNK}",
        "row = place // columns",
        "column = place - row * columns",
        f"count = min({CHUNK}, inner - start)",
        *_constants_of_row(program),
        *_slices(program),
        "for k in range(count):",
        *_indented(_element(program, sliced=True)),
    ]
    return _function(program, ["columns", "chunks", "inner"], lines)


def _rows_text(program: Program) -> str:
    """Return the text of the function that computes a chunk of some rows, and adds it up."""
    totals, first = range(len(program.sums)), _first_sum(program)
    sums = [f"s{i} = accumulate(s{i}, v{total.value})" for i, total in enumerate(program.sums)]
    piece = [
        f"first = start + piece * {PIECE}",
        f"size = min({PIECE}, start + count - first)",
        *_places(program, "first"),
        *(f"s{i} = 0.0" for i in totals),
        "for k in range(size):",
        *_indented([*_element(program), *sums]),
        *(f"total{i} += double(s{i})" for i in totals),
    ]
    row = [
        *_constants_of_row(program),
        *(f"total{i} = double(0.0)" for i in totals),
        f"for piece in range((count + {PIECE - 1}) // {PIECE}):",
        *_indented(piece),
        *(line for i in totals for line in _store(i, first + i)),
    ]
    return _function(program, _numbers_of_rows(program), _rows_of_task(row))


def _store(i: int, tensor: int) -> list[str]:
    """Return lines that store a sum, or a part of it."""
    return [
        f"if whole{i}:",
        f"    put(t{tensor}, place, total{i})",
        "else:",
        f"    put(p{i}, place * chunks + chunk, total{i})",
    ]


def _rows_of_task(row: list[str]) -> list[str]:
    """Return lines that do something for every row of a task, without a division for each."""
    return [
        "group = task // chunks",
        "chunk = task - group * chunks",
        f"start = chunk * {CHUNK}",
        f"count = min({CHUNK}, inner - start)",
        *_loop_over_rows("group * many", "min(group * many + many, places)", row),
    ]


def _loop_over_rows(first: str, last: str, row: list[str]) -> list[str]:
    step = ["column += 1", "if column == columns:", "    column = 0", "    row += 1"]
    return [
        f"row = {first} // columns",
        f"column = {first} - row * columns",
        f"for place in range({first}, {last}):",
        *_indented([*row, *step]),
    ]


def _last_of_rows(program: Program) -> str:
    lines = []
    for i in range(len(program.sums)):
        counts = f"kept_rows{i}, added_rows{i}, kept_columns{i}, added_columns{i}"
        lines.append(f"add_parts(p{i}, t{_first_sum(program) + i}, columns, parts, {counts})")
    return _function(program, _numbers_of_rows(program), lines)


def _numbers_of_rows(program: Program) -> list[str]:
    names = ("whole", "kept_rows", "added_rows", "kept_columns", "added_columns")
    counts = [f"{name}{i}" for i in range(len(program.sums)) for name in names]
    return [*_NUMBERS, "parts", *counts]


def _columns_text(program: Program) -> str:
    """Return the text of the function that computes some columns of a block of rows, and adds them up."""
    totals = range(len(program.sums))
    # `put` says that they are disjoint from the inputs.
    sums = [f"put(a{i}, k, a{i}[k] + v{total.value})" for i, total in enumerate(program.sums)]
    row = [
        *_constants_of_row(program),
        *_places(program, "start"),
        "for k in range(count):",
        *_indented([*_element(program), *sums]),
    ]
    lines = [
        "block = task // chunks",
        f"start = (task - block * chunks) * {SUMS}",
        f"count = min({SUMS}, inner - start)",
        "first = block * inner + start",
        *(f"a{i} = p{i}[first : first + count]" for i in totals),
        "for k in range(count):",
        *_indented([f"a{i}[k] = 0.0" for i in totals]),
        "begin = places * block // blocks",
        *_loop_over_rows("begin", "places * (block + 1) // blocks", row),
    ]
    return _function(program, _NUMBERS_OF_COLUMNS, lines)


def _last_of_columns(program: Program) -> str:
    first = _first_sum(program)
    lines = [f"add_columns(p{i}, t{first + i}, task * {SUMS}, blocks)" for i in range(len(program.sums))]
    return _function(program, _NUMBERS_OF_COLUMNS, lines)


_NUMBERS_OF_COLUMNS = ("columns", "chunks", "inner", "places", "blocks")


def _function(program: Program, numbers: Sequence[str], lines: list[str]) -> str:
    """Return the text of a function: of the task, the tensors, scratch tensors and numbers."""
    tensors = [f"t{i}" for i in range(_first_sum(program) + len(program.sums))]
    scratch = [f"p{i}" for i in range(len(program.sums))]
    strides = [f"by_{name}{i}" for i in range(len(program.operands)) for name in ("row", "column")]
    constants = [f"c{i}: float" for i in range(len(parameters(program)))]
    head = f"def fused({', '.join(['task', *tensors, *scratch, *numbers, *strides, *constants])}):"
    before = ["use_short_vectors()"] if _waits(program) else []
    return "\n".join([head, *_indented([*before, *lines]), ""])


def _first_sum(program: Program) -> int:
    return len(program.operands) + len(program.results)


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _constants_of_row(program: Program) -> list[str]:
    """Return lines that load the inputs that are constant along a row."""
    return [
        f"v{i} = t{i}[row * by_row{i} + column * by_column{i}]" + _comparison(operand.type)
        for i, operand in enumerate(program.operands)
        if not operand.varies
    ]


def _slices(program: Program) -> list[str]:
    """Return lines that take a chunk of a row of the inputs and results."""
    lines = []
    for i, operand in enumerate(program.operands):
        if operand.varies:
            lines.append(f"first{i} = row * by_row{i} + column * by_column{i} + start")
            lines.append(f"x{i} = t{i}[first{i} : first{i} + count]")
    for i in range(len(program.operands), _first_sum(program)):
        lines.append(f"y{i} = t{i}[place * inner + start : place * inner + start + count]")
    return lines


def _places(program: Program, start: str) -> list[str]:
    """Return lines that find a part of a row in the inputs and results.

    A loop over slices is faster for long rows, but sums are often of short ones, for which slices cost more.
    """
    lines = [
        f"x{i} = row * by_row{i} + column * by_column{i} + {start}"
        for i, operand in enumerate(program.operands)
        if operand.varies
    ]
    return [*lines, *([f"y = place * inner + {start}"] if program.results else [])]


def _element(program: Program, *, sliced: bool = False) -> list[str]:
    """Return lines that compute element k of a part of a row, and store the results."""
    lines = [
        f"v{i} = fetch({f'x{i}, k' if sliced else f't{i}, x{i} + k'})" + _comparison(operand.type)
        for i, operand in enumerate(program.operands)
        if operand.varies
    ]
    names = {constant: f"c{i}" for i, constant in enumerate(parameters(program))}
    for i, step in enumerate(program.steps, len(program.operands)):
        operands = [
            names.get(o.number) or literal(o.number) if isinstance(o, Constant) else f"v{o}"
            for o in step.operands
        ]
        lines.append(f"v{i} = {write(step.expression, operands, dict(step.attributes))}")
    first = len(program.operands)
    for i, value in enumerate(program.results, first):
        lines.append(f"put(y{i}, k, v{value})" if sliced else f"put(t{i}, y + k, v{value})")
    return lines


def _comparison(type_: str) -> str:
    return " != 0" if type_ == "bool" else ""


def _waits(program: Program) -> bool:
    """Return whether the elements take less time to compute than to load."""
    return program.cost <= 2 * (len(program.operands) + len(program.results))


def _make_function(text: str, program: Program) -> Callable[..., Any]:
    """Return the function of a text, whose source `inspect` can find."""
    # The name is that of the cached source, so it must be one of this text alone.
    name = f"<ortgrad {hashlib.sha256(text.encode()).hexdigest()}>"
    variables: dict[str, Any] = {
        **COMPILED,
        "fetch": fetch,
        "put": put,
        "use_short_vectors": use_short_vectors,
        "accumulate": accumulate,
        "double": double,
        "add_parts": add_parts,
        "add_columns": add_columns,
    }
    for step in program.steps:
        own = own_kernel(step.operator)
        if own is not None:
            variables[step.operator] = own[1].function
    exec(compile(text, name, "exec"), variables)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function: Callable[..., Any] = variables["fused"]
    return function
