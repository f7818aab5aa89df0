"""The operator of a fused node, made from its program: a NumPy kernel and the text of a compiled one.

All results have one shape. Its axes are divided into three groups, rows, columns and inner axes (`_plan`), so
that along each group an input varies or is constant. A task computes a chunk of the inner axes for one row
and column.
"""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ortgrad.compiled.functions import fetch, put, use_short_vectors
from ortgrad.errors import NodeError
from ortgrad.fusion.expressions import COMPILED, NUMPY, literal, own_kernel, write
from ortgrad.fusion.program import Constant, Program, Shape, Step
from ortgrad.operators.call import Call, parse_call
from ortgrad.operators.compiled import CompiledKernel, Plan
from ortgrad.operators.declaration import Attribute, Operand, Operator, Parameter

DOMAIN = "ortgrad"
# The operator of fused nodes by the element type of their results.
NAMES = {"float32": "Fused", "float64": "FusedDouble"}
MOST_INPUTS, MOST_OUTPUTS = 12, 4

_CHUNK = 4096
_ATTRIBUTES = {
    "operands": Attribute("operands", str, True),
    "steps": Attribute("steps", str, True),
    "results": Attribute("results", int, True),
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
    outputs = tuple(Parameter(f"v{i}", element, False) for i in program.results)

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
    values = list(arrays)
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
    return tuple(values[i] for i in program.results)


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
    function = _make_function(_text(program), program)
    tensors = len(program.operands) + len(program.results)
    plan = functools.partial(_plan, program)
    return CompiledKernel(function, tensors, (1,) * tensors, plan, exact=True)


def _text(program: Program) -> str:
    """Return the text of the function that performs a task."""
    count = len(program.operands)
    numbers = ["columns", "chunks", "inner"]
    before = ["use_short_vectors()"] if _waits(program) else []
    before += [
        "place = task // chunks",
        f"start = (task - place * chunks) * {_CHUNK}",
        "row = place // columns",
        "column = place - row * columns",
        f"count = min({_CHUNK}, inner - start)",
    ]
    inside: list[str] = []
    for i, operand in enumerate(program.operands):
        numbers += (f"by_row{i}", f"by_column{i}")
        first = f"row * by_row{i} + column * by_column{i}"
        comparison = " != 0" if operand.type == "bool" else ""
        if operand.varies:
            before += (f"first{i} = {first} + start", f"x{i} = t{i}[first{i} : first{i} + count]")
            inside.append(f"v{i} = fetch(x{i}, k){comparison}")
        else:
            before.append(f"v{i} = t{i}[{first}]{comparison}")
    names = {constant: f"c{i}" for i, constant in enumerate(_parameters(program))}
    numbers += (f"{name}: float" for name in names.values())
    for i, step in enumerate(program.steps, count):
        operands = [
            names.get(o.number) or literal(o.number) if isinstance(o, Constant) else f"v{o}"
            for o in step.operands
        ]
        inside.append(f"v{i} = {write(step.expression, operands, dict(step.attributes))}")
    for i, value in enumerate(program.results):
        before.append(f"y{i} = t{count + i}[place * inner + start : place * inner + start + count]")
        inside.append(f"put(y{i}, k, v{value})")
    tensors = [f"t{i}" for i in range(count + len(program.results))]
    lines = [
        f"def fused({', '.join(['task', *tensors, *numbers])}):",
        *(f"    {line}" for line in before),
        "    for k in range(count):",
        *(f"        {line}" for line in inside),
    ]
    return "\n".join([*lines, ""])


def _waits(program: Program) -> bool:
    """Return whether the elements take less time to compute than to load."""
    return program.cost <= 2 * (len(program.operands) + len(program.results))


def _parameters(program: Program) -> list[float]:
    """Return the constants that the function takes as parameters.

    Networks have trained constants. With those in its text, every layer would have a kernel of its own.
    """
    constants = [o.number for step in program.steps for o in step.operands if isinstance(o, Constant)]
    return list(dict.fromkeys(c for c in constants if math.isfinite(c) and not _is_common(c)))


def _is_common(number: float) -> bool:
    return abs(number) <= 8 and (4 * number).is_integer()


def _make_function(text: str, program: Program) -> Callable[..., Any]:
    """Return the function of a text, whose source `inspect` can find."""
    # The name is that of the cached source, so it must be one of this text alone.
    name = f"<ortgrad {hashlib.sha256(text.encode()).hexdigest()}>"
    variables: dict[str, Any] = {
        **COMPILED,
        "fetch": fetch,
        "put": put,
        "use_short_vectors": use_short_vectors,
    }
    for step in program.steps:
        own = own_kernel(step.operator)
        if own is not None:
            variables[step.operator] = own[1].function
    exec(compile(text, name, "exec"), variables)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    function: Callable[..., Any] = variables["fused"]
    return function


def _plan(program: Program, *shapes: Shape, **_: Any) -> Plan | None:
    """Divide the axes of the results into rows, columns and an inner group of axes."""
    count = len(program.operands)
    inputs, outputs = shapes[:count], shapes[count:]
    full = outputs[0]
    if any(shape != full for shape in outputs):
        return None
    sizes, varying = _groups(full, inputs)
    expected = tuple(operand.varies for operand in program.operands)
    if sizes and varying[-1] != expected and sizes[-1] != 1:
        # The last axes may have one element each, and the rest be constant along what follows.
        sizes, varying = [*sizes, 1], [*varying, expected]
    elif not sizes:
        sizes, varying = [1], [expected]
    if len(sizes) > 3:
        return None
    rows, columns, inner = (*[1] * (3 - len(sizes)), *sizes)
    varying = [*[(False,) * count] * (3 - len(varying)), *varying]
    chunks = -(-inner // _CHUNK)
    numbers: dict[str, int | float | Sequence[int]] = {
        "columns": columns,
        "chunks": max(chunks, 1),
        "inner": inner,
    }
    for i in range(count):
        by_row, by_column, by_element = (group[i] for group in varying)
        step = inner if by_element else 1
        numbers[f"by_column{i}"] = step if by_column else 0
        numbers[f"by_row{i}"] = step * (columns if by_column else 1) if by_row else 0
    numbers.update({f"c{i}": constant for i, constant in enumerate(_parameters(program))})
    size = math.prod(full)
    views = [(math.prod(shape),) for shape in shapes]
    work = size * (len(shapes) + program.cost // 8)
    return Plan(rows * columns * chunks if size else 0, views, numbers, work)


def _groups(full: Shape, inputs: Sequence[Shape]) -> tuple[list[int], list[tuple[bool, ...]]]:
    """Return the sizes of groups of axes, and for each which inputs vary along it.

    Axes with one element belong to no group, and neighbours along which the same inputs vary to one.
    """
    sizes: list[int] = []
    varying: list[tuple[bool, ...]] = []
    for axis, size in enumerate(full):
        if size == 1:
            continue
        own = tuple(_size(shape, axis - len(full)) != 1 for shape in inputs)
        if varying and varying[-1] == own:
            sizes[-1] *= size
        else:
            sizes.append(size)
            varying.append(own)
    return sizes, varying


def _size(shape: Shape, axis: int) -> int:
    """Return the size of an axis that is counted from the end; 1 if there is none."""
    return shape[axis] if -axis <= len(shape) else 1
