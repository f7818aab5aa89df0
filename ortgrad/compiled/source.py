"""The source that Numba compiles for a kernel: a function `block` that performs a range of its tasks.

Floating-point numbers in the text of a kernel, and global ones that it refers to, get the element type of the
tensors: Numba would otherwise compute in double precision. The same applies to the functions that it calls.
ortgrad.compiled.variables says what its global names may stand for.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortgrad.compiled import functions, layout, mathematics, variables
from ortgrad.compiled.fields import lower_fields
from ortgrad.compiled.variables import Bundle, Foreign, Number, Value
from ortgrad.errors import RegistrationError
from ortgrad.operators.compiled import Argument, Bundled, CompiledKernel, may_fail
from ortgrad.operators.records import is_named_tuple


@dataclass(frozen=True)
class Function:
    """A Python function as text, and what its global names stand for: numbers, other functions or objects."""

    name: str
    text: str
    numbers: tuple[tuple[str, Number], ...] = ()
    functions: tuple[tuple[str, Function], ...] = ()
    # Whether it relies on the order of its operations, as the mathematical functions do.
    exact: bool = False
    values: tuple[tuple[str, Value], ...] = ()
    # The file and the line where it begins, and a function that returns its tree with the lines of that file:
    # for errors, and no part of the text.
    place: tuple[str, int] = field(default=("", 0), repr=False)
    tree: Callable[[], ast.FunctionDef] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Source:
    """All that determines the machine code of a kernel, besides the processor and the compiler."""

    element: str  # the element type
    phases: tuple[Function, ...]
    block: str  # the text of the function `block(call, i)`
    reorders: bool  # whether sums may be computed in another order
    bundles: tuple[tuple[str, Bundle], ...] = ()  # which the block makes, by their names in it

    @property
    def is_text(self) -> bool:
        """Whether another process can compile it."""
        values = [value for function in functions_of(self.phases) for _, value in function.values]
        return not any(isinstance(value, Foreign) for value in values)


def functions_of(functions: Iterable[Function]) -> Iterator[Function]:
    """Return the functions and those that they call."""
    for function in functions:
        yield function
        yield from functions_of(called for _, called in function.functions)


def source_of(kernel: CompiledKernel, dtypes: Sequence[str]) -> Source:
    """Return the source of a kernel for inputs and outputs of these element types."""
    element = next(dtype for dtype in dtypes if dtype.startswith("float"))
    phases = tuple(_function(function, element) for function in kernel.phases)
    bundles: dict[Bundle, str] = {}
    if kernel.elementwise:
        waits = not (phases[0].functions or phases[0].values or "/" in phases[0].text)
        lines = _elementwise_lines(kernel, dtypes, bundles, waits=waits)
    else:
        lines = _task_lines(kernel, [*dtypes, *[element] * len(kernel.scratch)], bundles)
    block = "def block(call, i):\n" + textwrap.indent("\n".join([*_RANGE, *lines]), "    ")
    reorders = not (kernel.elementwise or kernel.exact)
    return Source(element, phases, block, reorders, tuple((name, each) for each, name in bundles.items()))


def _function(
    function: Callable[..., Any], element: str, callers: tuple[Callable[..., Any], ...] = ()
) -> Function:
    if function in callers:
        raise RegistrationError(
            f"{place_of(function)}: {function.__name__} calls itself; a compiled kernel needs a loop instead"
        )
    lines = _lines_of(function)
    named = {
        name: value
        for name, value in variables.variables_of(function, element).items()
        # Python lists the names of attributes together with the names of variables.
        if not lines or re.search(rf"(?<![\w.]){re.escape(name)}\b", lines)
    }
    simple = {name: value for name, value in named.items() if _is_simple(value)}
    # It takes a millisecond to read a function, and most have no others.
    others = {} if len(simple) == len(named) else _others(function, named)
    renamed: dict[str, str] = {}
    numbers: dict[str, Number] = {}
    called: dict[str, Function] = {}
    values: dict[str, Value] = {}
    for name, value in {**simple, **others}.items():
        own = name.replace(".", "__") if "." in name else name
        while own != name and own in named:
            own += "_"
        python = variables.python_function(value)
        known = variables.reference(value, name)
        if _is_number(value):
            numbers[own] = variables.number(value)
        elif python in _PRIMITIVES:
            own = _PRIMITIVES[python]
        elif is_named_tuple(value):
            values[own] = variables.bundle(value)
        elif known is not None:
            first = name.partition(".")[0]
            if first != name and variables.reference(named[first], first) is not None:
                continue  # its module is among the values
            values[own] = known
        elif python is not None and _has_text(python):
            called[own] = _function(python, element, (*callers, function))
        else:
            values[own] = variables.array(value, element) or variables.foreign(value)
        if own != name:
            renamed[name] = own
    floats = frozenset(name for name, value in numbers.items() if isinstance(value, float))
    changes = floats, frozenset(renamed.items())
    return Function(
        function.__name__,
        _text(function, *changes),
        tuple(sorted(numbers.items())),
        tuple(sorted(called.items())),
        exact=function.__module__ in (functions.__name__, mathematics.__name__),
        values=tuple(sorted(values.items())),
        place=(function.__code__.co_filename, function.__code__.co_firstlineno),
        tree=functools.partial(_typed_tree, function, *changes),
    )


_PRIMITIVES = {function: name for name, function in functions.PRIMITIVES.items()}


def _is_number(value: Any) -> bool:
    try:
        variables.number(value)
    except TypeError:
        return False
    return True


def _is_simple(value: Any) -> bool:
    return isinstance(value, (int, float, tuple)) or inspect.isfunction(value) or is_named_tuple(value)


def _others(function: Callable[..., Any], named: dict[str, Any]) -> dict[str, Any]:
    """Return what a function refers to besides numbers and functions, also by dotted names."""
    tree = _tree_of(function)
    try:
        dotted = variables.dotted_names(tree, named)
    except AttributeError as error:
        line = function.__code__.co_firstlineno - 1 + getattr(error.obj, "lineno", 1)
        raise RegistrationError(f"{function.__code__.co_filename}:{line}: {error}") from error
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    alone = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in owners}
    others = {}
    for name, value in named.items():
        # Of a module of the user's, only what the dotted names stand for is needed.
        if name in alone or not variables.has_namespace(value) or variables.reference(value, name):
            others[name] = value
    return {**{name: value for name, value in others.items() if not _is_simple(value)}, **dotted}


def place_of(function: Callable[..., Any]) -> str:
    """Return the file and the line where a function begins, as compilers write them."""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def _has_text(function: Callable[..., Any]) -> bool:
    try:
        _tree_of(function)
    except RegistrationError:
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _text(function: Callable[..., Any], floats: frozenset[str], renamed: frozenset[tuple[str, str]]) -> str:
    """Return the text of a function, with the changes of `_typed_tree`.

    Kernels have functions in common, and it takes a millisecond to read one.
    """
    return ast.unparse(_typed_tree(function, floats, renamed))


def _typed_tree(
    function: Callable[..., Any], floats: frozenset[str], renamed: frozenset[tuple[str, str]]
) -> ast.FunctionDef:
    """Return a function in which numbers, and those that `floats` name, have the element type.

    Dotted names become simple ones, by `renamed`, and fields of records elements of arrays.
    """
    tree = _tree_of(function)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    tree = lower_fields(tree, function)
    tree.name, tree.decorator_list, tree.returns = "function", [], None
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    # What their expressions refer to may have changed.
    arguments.defaults = list(map(_default, function.__defaults__ or (), arguments.defaults))
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return ast.fix_missing_locations(_Typed(floats, dict(renamed)).visit(tree))


def _default(value: Any, expression: ast.expr) -> ast.expr:
    if not _is_number(value):
        return expression
    return ast.copy_location(ast.parse(repr(variables.number(value)), mode="eval").body, expression)


def _tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    tree = _parsed(_lines_of(function))
    if tree is None:
        # Finds where the function ends by its tokens, which takes several times as long.
        try:
            tree = _parsed(inspect.getsource(function))
        except OSError as error:
            raise RegistrationError(f"the source of the kernel {function.__name__} cannot be read") from error
    if tree is None:
        raise RegistrationError(f"{place_of(function)}: {function.__name__} is not written as `def`")
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

    def __init__(self, floats: frozenset[str], renamed: dict[str, str]) -> None:
        self._floats, self._renamed = floats, renamed

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return _element(node) if isinstance(node.value, float) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name = self._renamed.get(variables.dotted_name(node))
        if name is None:
            self.generic_visit(node)
            return node
        return self.visit_Name(ast.copy_location(ast.Name(name, node.ctx), node))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        node.id = self._renamed.get(node.id, node.id)
        return _element(node) if node.id in self._floats else node


def _element(value: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name("Element", ast.Load()), [value], []), value)


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


def _elementwise_lines(
    kernel: CompiledKernel, dtypes: Sequence[str], bundles: dict[Bundle, str], *, waits: bool
) -> list[str]:
    """Return lines that compute the elements from start to stop.

    The bundles that they make are added to `bundles`, with their names. `waits` says that the elements take
    less time to compute than to load.
    """
    lines = [*(("use_short_vectors()",) if waits else ()), *_WHOLE_LINES, "count = stop - start"]
    for i, dtype in enumerate(dtypes):
        address = f"{_tensor(i)} + start * {layout.ITEM_SIZES[dtype]}"
        lines.append(f"t{i} = view_of_{dtype}({address}, (count,))")
    numbers = _numbers(kernel, _views_place(kernel))
    last = len(dtypes) - 1
    names = dict(zip(kernel.numbers, numbers, strict=True))
    elements = [f"t{i}[k]" for i in range(last + bool(kernel.updated))]
    arguments = ", ".join([*elements, *(_value_of(each, names, bundles) for each in kernel.arguments)])
    results = ", ".join(f"t{i}[k]" for i in kernel.updated or (last,))
    return [*lines, *numbers.values(), "for k in range(count):", f"    {results} = phase0({arguments})"]


def _value_of(argument: Argument, names: dict[str, str], bundles: dict[Bundle, str]) -> str:
    """Return the text of an argument, given the names of tensors and numbers in the block."""
    if not isinstance(argument, Bundled):
        return names[argument]
    kind = bundles.setdefault(variables.bundle(argument.kind), f"Bundle{len(bundles)}")
    return f"{kind}({', '.join(_value_of(each, names, bundles) for each in argument.fields)})"


def _task_lines(kernel: CompiledKernel, dtypes: Sequence[str], bundles: dict[Bundle, str]) -> list[str]:
    """Return lines that perform the tasks from start to stop on views of the tensors.

    The bundles that they make are added to `bundles`, with their names.
    """
    assert kernel.views is not None
    lines, place = [], _views_place(kernel)
    for i, (dtype, rank) in enumerate(zip(dtypes, (*kernel.views, *kernel.scratch), strict=True)):
        sizes = "".join(f"{_field(place + k)}, " for k in range(rank))
        lines.append(f"t{i} = view_of_{dtype}({_tensor(i)}, ({sizes}))")
        place += rank
    numbers = _numbers(kernel, place)
    lines += numbers.values()
    names = {name: f"t{i}" for i, name in enumerate(kernel.names)}
    names.update(zip(kernel.numbers, numbers, strict=True))
    for i, function in enumerate(kernel.phases):
        given = [_value_of(each, names, bundles) for each in kernel.parameters(function)]
        arguments = ", ".join(["task", *given])
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
