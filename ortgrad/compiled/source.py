"""The source that Numba compiles for a kernel: a function `block` that performs a range of its tasks.

Floating-point numbers in the text of a kernel, and global ones that it refers to, get the element type of the
tensors: Numba would otherwise compute in double precision. So do those of the functions that it calls.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ortgrad.compiled import functions, layout, mathematics
from ortgrad.errors import RegistrationError
from ortgrad.operators.compiled import CompiledKernel, may_fail

Number: TypeAlias = "int | float | tuple[float, ...]"


@dataclass(frozen=True)
class Function:
    """A Python function as text, and what its global names stand for: numbers, or other functions."""

    name: str
    text: str
    numbers: tuple[tuple[str, Number], ...] = ()
    functions: tuple[tuple[str, Function], ...] = ()
    # Whether it relies on the order of its operations, as the mathematical functions do.
    exact: bool = False


@dataclass(frozen=True)
class Source:
    """All that determines the machine code of a kernel, besides the processor and the compiler."""

    element: str  # the element type
    phases: tuple[Function, ...]
    block: str  # the text of the function `block(call, i)`
    reorders: bool  # whether sums may be computed in another order


def source_of(kernel: CompiledKernel, dtypes: Sequence[str]) -> Source:
    """Return the source of a kernel for inputs and outputs of these element types."""
    element = next(dtype for dtype in dtypes if dtype.startswith("float"))
    phases = tuple(_function(function, element) for function in kernel.phases)
    if kernel.elementwise:
        lines = _elementwise_lines(
            kernel, dtypes, waits=not phases[0].functions and "/" not in phases[0].text
        )
    else:
        lines = _task_lines(kernel, [*dtypes, *[element] * len(kernel.scratch)])
    block = "def block(call, i):\n" + textwrap.indent("\n".join([*_RANGE, *lines]), "    ")
    return Source(element, phases, block, reorders=not (kernel.elementwise or kernel.exact))


def _function(function: Callable[..., Any], element: str) -> Function:
    variables = inspect.getclosurevars(function)
    named = {
        name: value[element] if isinstance(value, functions.ByType) else value
        for name, value in {**variables.globals, **variables.nonlocals}.items()
    }
    numbers = {name: value for name, value in named.items() if isinstance(value, (int, float, tuple))}
    called = {
        name: _function(value, element)
        for name, value in named.items()
        if inspect.isfunction(value) and value not in functions.PRIMITIVES.values()
    }
    return Function(
        function.__name__,
        _text(function, frozenset(name for name, value in numbers.items() if isinstance(value, float))),
        tuple(sorted(numbers.items())),
        tuple(sorted(called.items())),
        exact=function.__module__ in (functions.__name__, mathematics.__name__),
    )


@functools.lru_cache(maxsize=1024)
def _text(function: Callable[..., Any], floats: frozenset[str]) -> str:
    """Return the text of a function in which numbers, and those that `floats` name, have the element type.

    Kernels have functions in common, and it takes a millisecond to read one.
    """
    tree = _tree_of(function)
    tree.name, tree.decorator_list, tree.returns = "function", [], None
    for argument in tree.args.args:
        argument.annotation = None
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return ast.unparse(_Typed(floats).visit(tree))


def _tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = _parsed(_lines_of(function))
    if tree is None:
        # Finds where the function ends by its tokens, which takes several times as long.
        try:
            tree = _parsed(inspect.getsource(function))
        except OSError as error:
            raise RegistrationError(f"the source of the kernel {function.__name__} cannot be read") from error
    assert tree is not None
    return tree


def _parsed(text: str) -> ast.FunctionDef | None:
    try:
        body = ast.parse(textwrap.dedent(text)).body
    except SyntaxError:
        return None
    return body[0] if len(body) == 1 and isinstance(body[0], ast.FunctionDef) else None


def _lines_of(function: Callable[..., Any]) -> str:
    """Return the lines from which Python has made a function; nothing if it does not tell where they end."""
    code = function.__code__
    if not hasattr(code, "co_positions"):  # before Python 3.11
        return ""
    last = max(end or 0 for _, end, _, _ in code.co_positions())
    return "".join(linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 : last])


class _Typed(ast.NodeTransformer):
    """Gives floating-point numbers, and the names of such numbers, the element type."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return _element(node) if isinstance(node.value, float) else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _element(node) if node.id in self._names else node


def _element(value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("Element", ast.Load()), [value], [])


_RANGE = (
    f"plan = load(call + {8 * layout.CALL_PLAN})",
    f"phase = load(call + {8 * layout.CALL_PHASE})",
    f"tasks = load(plan + {8 * layout.PHASE_FIELDS} + 16 * phase)",
    f"blocks = load(plan + {8 * layout.PHASE_FIELDS} + 16 * phase + 8)",
    "start = tasks * i // blocks",
    "stop = tasks * (i + 1) // blocks",
)


# Blocks begin where a cache line does, so that vectors do not cross lines and threads do not share any.
_WHOLE_LINES = ("start = start & -64", "stop = tasks if i + 1 == blocks else stop & -64")


def _elementwise_lines(kernel: CompiledKernel, dtypes: Sequence[str], *, waits: bool) -> list[str]:
    """Return lines that compute the elements from start to stop; the last tensor is the result.

    `waits` says that they take less time to compute than to load.
    """
    lines = [*(("use_short_vectors()",) if waits else ()), *_WHOLE_LINES, "count = stop - start"]
    for i, dtype in enumerate(dtypes):
        address = f"{_tensor(i)} + start * {layout.ITEM_SIZES[dtype]}"
        lines.append(f"t{i} = view_of_{dtype}({address}, (count,))")
    numbers = _numbers(kernel, _views_place(kernel))
    last = len(dtypes) - 1
    arguments = ", ".join([*(f"t{i}[k]" for i in range(last)), *numbers])
    return [*lines, *numbers.values(), "for k in range(count):", f"    t{last}[k] = phase0({arguments})"]


def _task_lines(kernel: CompiledKernel, dtypes: Sequence[str]) -> list[str]:
    """Return lines that perform the tasks from start to stop on views of the tensors."""
    assert kernel.views is not None
    lines, place = [], _views_place(kernel)
    for i, (dtype, rank) in enumerate(zip(dtypes, (*kernel.views, *kernel.scratch), strict=True)):
        sizes = "".join(f"{_field(place + k)}, " for k in range(rank))
        lines.append(f"t{i} = view_of_{dtype}({_tensor(i)}, ({sizes}))")
        place += rank
    numbers = _numbers(kernel, place)
    arguments = ", ".join(["task", *(f"t{i}" for i in range(len(dtypes))), *numbers])
    lines += numbers.values()
    for i, function in enumerate(kernel.phases):
        call = f"phase{i}({arguments})"
        if may_fail(function):
            call = f"if {call}: store(call + {8 * layout.CALL_FAILED}, 1)"
        lines += [f"if phase == {i}:", "    for task in range(start, stop):", f"        {call}"]
    return lines


def _views_place(kernel: CompiledKernel) -> int:
    """Return the place of the sizes of the views in a plan."""
    return layout.PHASE_FIELDS + 2 * len(kernel.phases) + len(kernel.scratch)


def _numbers(kernel: CompiledKernel, place: int) -> dict[str, str]:
    """Return the variables for the kernel's numbers, each with the line that loads it."""
    lines = {}
    for i, kind in enumerate(kernel.numbers.values()):
        if kind == "array":
            # Its place, in bytes, and its length.
            value = f"view_of_int64(plan + {_field(place)}, ({_field(place + 1)},))"
        else:
            value = f"Element(load_double(plan + {8 * place}))" if kind == "float" else _field(place)
        lines[f"n{i}"] = f"n{i} = {value}"
        place += 2 if kind == "array" else 1
    return lines


def _field(place: int) -> str:
    return f"load(plan + {8 * place})"


def _tensor(i: int) -> str:
    return f"load(call + {8 * (layout.TENSORS + i)})"
