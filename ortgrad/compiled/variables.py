"""What the global names and closure variables of a kernel stand for.

Whatever can be written as text is: numbers, arrays, objects of modules that Numba knows (by their names), and
other functions, also those that Numba has compiled. The text is all that determines the machine code, so that
it can be cached, and compiled by another process. Numba gets all other objects as they are.
"""

from __future__ import annotations

import ast
import collections
import enum
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ortgrad.compiled import functions

Number: TypeAlias = "int | float | complex | str | tuple[Number, ...] | None"

# Modules whose functions Numba implements itself, in the order in which names are looked up.
_MODULES = ("builtins", "math", "numpy", "numba", "cmath", "operator")


@dataclass(frozen=True)
class Reference:
    """A module that Numba knows, or an object of it."""

    module: str
    name: str = ""

    def value(self) -> Any:
        """Return what it refers to."""
        module = importlib.import_module(self.module)
        return getattr(module, self.name) if self.name else module


@dataclass(frozen=True)
class Array:
    """The contents of an array, which are constant for Numba."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def value(self) -> Any:
        """Return the array."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Foreign:
    """An object that has no text: machine code for it is valid only in this process."""

    number: int  # its place in the list of this process

    def value(self) -> Any:
        """Return the object."""
        return _foreign[self.number]


@dataclass(frozen=True)
class Bundle:
    """A type of bundles (see ortgrad.operators.records)."""

    name: str
    fields: tuple[str, ...]

    def value(self) -> Any:
        """Return a type with these fields, the same one for equal names."""
        return _named_tuple(self.name, self.fields)


_named_tuple = functools.cache(collections.namedtuple)


Value: TypeAlias = "Reference | Array | Foreign | Bundle"

_foreign: list[Any] = []


def foreign(value: Any) -> Foreign:
    """Return the number of an object, which is kept for the rest of the process: kernels are, too."""
    for i, known in enumerate(_foreign):
        if known is value:
            return Foreign(i)
    _foreign.append(value)
    return Foreign(len(_foreign) - 1)


def variables_of(function: Callable[..., Any], element: str) -> dict[str, Any]:
    """Return what a function refers to by names that are not its own, besides builtins."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    found = {}
    for name in dict.fromkeys((*code.co_freevars, *_names_in(code))):
        if name in cells:
            try:
                found[name] = cells[name].cell_contents
            except ValueError:
                continue  # it is not assigned yet: Numba reports it
        elif name in function.__globals__ and name not in (*code.co_varnames, *code.co_cellvars):
            found[name] = function.__globals__[name]
    return {
        name: value[element] if isinstance(value, functions.ByType) else value
        for name, value in found.items()
    }


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def number(value: Any) -> Number:
    """Return a number, a string, None or a tuple of them as such; raises TypeError for other objects."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    # Those of enumerations, and of NumPy, have another text.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return complex(value)
    if type(value) is tuple:
        return tuple(map(number, value))
    raise TypeError(f"{value!r} is not a number")


def has_namespace(value: Any) -> bool:
    """Return whether attributes of a value are names of other values, as in a module."""
    return isinstance(value, types.ModuleType) or (isinstance(value, type) and issubclass(value, enum.Enum))


def dotted_names(tree: ast.AST, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the dotted names in a function stand for that begin with modules or enumerations.

    Raises AttributeError, with the node, if one of them has no such attribute.
    """
    found = {}
    for node in ast.walk(tree):
        name = dotted_name(node)
        first, *rest = name.split(".")
        value: Any = variables.get(first)
        for attribute in rest:
            if not has_namespace(value):
                break
            if not hasattr(value, attribute):
                raise AttributeError(f"{value.__name__} has no attribute {attribute!r}", obj=node)
            value = getattr(value, attribute)
        else:
            if rest and not has_namespace(value):
                found[name] = value
    return found


def dotted_name(node: ast.AST) -> str:
    """Return the name that a node consists of, such as "math.pi"; else nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def reference(value: Any, name: str) -> Reference | None:
    """Return the reference to a value that a module of Numba's has; None for others."""
    if isinstance(value, types.ModuleType):
        known = value.__name__.partition(".")[0] in _MODULES
        return Reference(value.__name__) if known else None
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for each in (getattr(value, "__name__", None), getattr(value, "name", None), name):
            if isinstance(each, str) and getattr(module, each, _MISSING) is value:
                return Reference(module.__name__, each)
    return None


_MISSING = object()


def array(value: Any, element: str) -> Array | None:
    """Return an array's contents, in the element type if they are floating-point numbers; None for others."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        return None
    value = np.array(value, element if value.dtype.kind == "f" else None, order="C")
    return Array(value.dtype.str, value.shape, value.tobytes())


def bundle(kind: Any) -> Bundle:
    """Return the name and the fields of a type of bundles."""
    return Bundle(kind.__name__, kind._fields)


def python_function(value: Any) -> Callable[..., Any] | None:
    """Return a function, or that from which Numba has made one; None for other objects."""
    if "numba" in sys.modules:  # else nothing has been made by it
        from numba.core.dispatcher import Dispatcher
        from numba.np.ufunc.dufunc import DUFunc

        if isinstance(value, (Dispatcher, DUFunc)):
            # The latter has one of the former.
            value = getattr(getattr(value, "_dispatcher", value), "py_func", None)
    return value if inspect.isfunction(value) else None
