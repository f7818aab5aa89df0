"""The operator of a fused node, made from its program: a NumPy kernel and the plan of a compiled one.

All results, and the values that are added up, have one shape. Its axes are divided into three groups, rows,
columns and inner axes (`_plan`), so that along each group an input varies or is constant, and is added up or
not. A task computes a chunk of the inner axes for one row and column, or for several of them.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ortgrad.compiled.functions import SUMS
from ortgrad.compiled.sums import row_blocks
from ortgrad.errors import NodeError
from ortgrad.lowering.fusion.expressions import NUMPY, own_kernel, write
from ortgrad.lowering.fusion.program import Constant, Program, Shape, Step
from ortgrad.lowering.fusion.text import CHUNK, make_functions, parameters
from ortgrad.operators.call import Call, parse_call
from ortgrad.operators.compiled import CompiledKernel, Plan
from ortgrad.operators.declaration import Attribute, Operand, Operator, Parameter

DOMAIN = "ortgrad"
# The operator of fused nodes by the element type of their results.
NAMES = {"float32": "Fused", "float64": "FusedDouble"}
MOST_INPUTS, MOST_OUTPUTS, MOST_SUMS = 12, 4, 6

_ATTRIBUTES = {
    "operands": Attribute("operands", str, True),
    "steps": Attribute("steps", str, True),
    "results": Attribute("results", int, True),
    "sums": Attribute("sums", str, True),
    "nodes": Attribute("nodes", str, True),
}


def is_fused(name: str, domain: str) -> bool:
    """Return whether that is the operator of a fused node."""
    return domain == DOMAIN and name in NAMES.values()


def fused_call(text: str | bytes, element: str) -> Call:
    """Return the call of a fused node, with an operator for its program."""
    try:
        fields = json.loads(text)
        attributes = fields["attributes"]
        nodes = tuple(map(str, attributes["nodes"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NodeError(f"the attribute 'ortgrad' of a fused node cannot be read ({error})") from error
    program = Program.from_attributes(attributes)
    if len(nodes) != len(program.steps):
        raise NodeError("the program of a fused node does not name the node of every step")
    return parse_call(fused_operator(program, nodes, element), text)


def unread_operator(element: str) -> Operator:
    """Return the operator of fused nodes whose program is not known, or cannot be read."""
    return _operator(element, (), ())


@functools.lru_cache(maxsize=4096)
def fused_operator(program: Program, nodes: tuple[str, ...], element: str) -> Operator:
    """Return the operator that computes a program; `nodes` are the names of the nodes of its steps."""
    inputs = tuple(
        Parameter(f"v{i}", element if operand.type == "float" else "bool", False)
        for i, operand in enumerate(program.operands)
    )
    outputs = (
        *(Parameter(f"v{i}", element, False) for i in program.results),
        *(Parameter(f"s{i}", element, False) for i in range(len(program.sums))),
    )

    def shapes(*operands: Operand, **_: Any) -> list[Shape]:
        return program.shapes([operand.shape for operand in operands], nodes)  # type: ignore[misc]

    return _operator(
        element,
        inputs,
        outputs,
        kernel=functools.partial(_compute, program, np.dtype(element)),
        shapes=shapes,
        compiled_kernel=compiled_kernel(program),
    )


def _operator(
    element: str, inputs: tuple[Parameter, ...], outputs: tuple[Parameter, ...], **declared: Any
) -> Operator:
    fields = {"kernel": None, "shapes": None, **declared}
    return Operator(
        name=NAMES[element],
        domain=DOMAIN,
        inputs=inputs,
        outputs=outputs,
        attributes=_ATTRIBUTES,
        types={},
        auto="python",
        builder_name="fused",
        doc="",
        dims={},
        **fields,
    )


def _compute(program: Program, dtype: np.dtype, *arrays: np.ndarray, **_: Any) -> tuple[np.ndarray, ...]:
    """Compute the results with NumPy, for every kind of broadcasting."""
    values = [
        np.reshape(array, operand.extended(array.shape)) if operand.ones else array
        for array, operand in zip(arrays, program.operands, strict=True)
    ]
    for step in program.steps:
        operands = [
            np.full((1,) * o.rank, o.number, dtype) if isinstance(o, Constant) else values[o]
            for o in step.operands
        ]
        own = own_kernel(step.operator)
        if own is not None:
            result = own[0](*operands, **dict(step.attributes))
        else:
            result = _numpy_function(step.operator, len(operands), step.attributes)(*operands)
        values.append(np.asarray(result, bool if step.expression.gives == "bool" else dtype))
    results = [values[i] for i in program.results]
    for total in program.sums:
        value = values[total.value]
        with np.errstate(invalid="ignore", over="ignore"):
            results.append(np.reshape(value.sum(total.axes, keepdims=True), total.shape(value.shape)))
    return tuple(results)


@functools.lru_cache(maxsize=1024)
def _numpy_function(name: str, count: int, attributes: tuple[tuple[str, float], ...]) -> Callable[..., Any]:
    operands = [f"v{i}" for i in range(count)]
    step = Step(name, tuple(range(count)), attributes)
    text = f"lambda {', '.join(operands)}: {write(step.expression, operands, dict(attributes))}"
    function: Callable[..., Any] = eval(text, dict(NUMPY))
    return function


@functools.lru_cache(maxsize=4096)
def compiled_kernel(program: Program) -> CompiledKernel:
    """Return the compiled kernel of a program. Equal programs have one kernel."""
    function, last = make_functions(program)
    sums = len(program.sums)
    tensors = len(program.operands) + len(program.results) + sums
    plan = functools.partial(_plan, program)
    return CompiledKernel(function, tensors, (1,) * tensors, plan, scratch=(1,) * sums, last=last, exact=True)


def _plan(program: Program, *shapes: Shape, **_: Any) -> Plan | None:
    """Divide the axes of the results into rows, columns and an inner group of axes."""
    count = len(program.operands)
    inputs = [operand.extended(shape) for operand, shape in zip(program.operands, shapes, strict=False)]
    values = program.value_shapes(shapes[:count], [""] * len(program.steps))
    full, *others = (values[i] for i in (*program.results, *(total.value for total in program.sums)))
    if any(shape != full for shape in others):
        return None
    sizes, kinds = _groups(full, inputs, program)
    # Whether each input varies along the inner axes, and each sum is over them.
    expected = (*(operand.varies for operand in program.operands), *(t.by_rows for t in program.sums))
    if sizes and kinds[-1] != expected and sizes[-1] != 1:
        # The last axes may have one element each, and the rest be constant along what follows.
        sizes, kinds = [*sizes, 1], [*kinds, expected]
    elif not sizes:
        sizes, kinds = [1], [expected]
    if len(sizes) > 3 or not _are_sums_by_columns(program, kinds[:-1]):
        return None
    rows, columns, inner = (*[1] * (3 - len(sizes)), *sizes)
    kinds = [*[(False,) * len(expected)] * (3 - len(kinds)), *kinds]
    numbers: dict[str, int | float | Sequence[int]] = {"columns": columns, "inner": inner}
    for i in range(count):
        by_row, by_column, by_element = (group[i] for group in kinds)
        step = inner if by_element else 1
        numbers[f"by_column{i}"] = step if by_column else 0
        numbers[f"by_row{i}"] = step * (columns if by_column else 1) if by_row else 0
    numbers.update({f"c{i}": constant for i, constant in enumerate(parameters(program))})
    views = [(math.prod(shape),) for shape in shapes]
    work = math.prod(full) * (len(shapes) + program.cost // 8)
    places = rows * columns
    if program.sums and not program.sums[0].by_rows:
        blocks, chunks = row_blocks(places), -(-inner // SUMS)
        numbers.update(places=places, blocks=blocks, chunks=max(chunks, 1))
        scratch = [(blocks * inner,)] * len(program.sums)
        return Plan((blocks * chunks, chunks), views, numbers, work, scratch)
    chunks = -(-inner // CHUNK)
    numbers["chunks"] = max(chunks, 1)
    if not program.sums:
        return Plan(places * chunks, views, numbers, work)
    # Several short rows are one task.
    many = max(1, CHUNK // max(inner, 1))
    numbers.update(places=places, many=many, parts=chunks)
    tasks = -(-places // many) * chunks
    scratch = []
    for i, (by_row, by_column) in enumerate(zip(kinds[0][count:], kinds[1][count:], strict=True)):
        for name, size, is_added in (("rows", rows, by_row), ("columns", columns, by_column)):
            numbers[f"kept_{name}{i}"], numbers[f"added_{name}{i}"] = (1, size) if is_added else (size, 1)
        # A task may compute the sum itself, and nothing is left to be added up.
        numbers[f"whole{i}"] = is_whole = int(chunks == 1 and not by_row and not by_column)
        numbers[f"kept_rows{i}"] = 0 if is_whole else numbers[f"kept_rows{i}"]
        scratch.append((0 if is_whole else places * chunks,))
    return Plan((tasks, 1), views, numbers, work, scratch)


def _are_sums_by_columns(program: Program, kinds: Sequence[tuple[bool, ...]]) -> bool:
    """Return whether all axes before the inner ones are added up, unless the sums are by rows."""
    count = len(program.operands)
    return all(t.by_rows or kind[count + i] for kind in kinds for i, t in enumerate(program.sums))


def _groups(
    full: Shape, inputs: Sequence[Shape], program: Program
) -> tuple[list[int], list[tuple[bool, ...]]]:
    """Return the sizes of groups of axes, and for each which inputs vary along it and which sums are over it.

    Axes with one element belong to no group, and neighbours of the same kind to one.
    """
    sizes: list[int] = []
    kinds: list[tuple[bool, ...]] = []
    for axis, size in enumerate(full):
        if size == 1:
            continue
        kind = (
            *(_size(shape, axis - len(full)) != 1 for shape in inputs),
            *(axis in total.axes for total in program.sums),
        )
        if kinds and kinds[-1] == kind:
            sizes[-1] *= size
        else:
            sizes.append(size)
            kinds.append(kind)
    return sizes, kinds


def _size(shape: Shape, axis: int) -> int:
    """Return the size of an axis that is counted from the end; 1 if there is none."""
    return shape[axis] if -axis <= len(shape) else 1
