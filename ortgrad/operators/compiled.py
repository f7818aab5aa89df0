"""What an operator declares about its compiled kernel; the compiler itself is in ortgrad.compiled.

A compiled kernel is a Python function that Numba can compile. For an element-wise operator, whose tensors all
have one shape, it computes one element:

    @relu_grad.compiled
    def relu_grad_element(dy: float, x: float) -> float:
        return dy if x > 0 else 0.0

For other operators it performs one of several independent tasks. It receives the number of the task and a
view of every input and output. A plan, made in Python for each new combination of shapes, says how many tasks
there are and how the tensors are viewed:

    def rows(dy, y, dx, *, axis):
        shape = math.prod(y[:-1]), y[-1]
        return Plan(tasks=shape[0], views=[shape] * 3)

    @softmax_grad.compiled(views=[2, 2, 2], plan=rows)
    def softmax_grad_row(row: int, dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
        ...

Both may have further parameters, annotated as int or float: attributes, or numbers of the plan. A parameter
with another annotation is a list of integers of the plan. If the annotation is a record
(ortgrad.operators.records), the integers have names.
Floating-point numbers in the text of the function have the element type of the tensors. It may refer to what
Numba knows (functions of `math` and NumPy), to other functions, also those made by `njit`, and to numbers,
tuples and arrays, which are constants. It creates no arrays. An inner loop is
vectorized if its counter alone is the last index: take a slice of the row (`y[row, first:last]`) before it.
A task that returns a bool fails if that is true, and the NumPy kernel says why. So does one that raises an
exception.

Further functions, `first` and `last`, may perform tasks before the kernel's own tasks begin and after they
are done. All may take scratch tensors of the element type, after the outputs. They take the same parameters,
unless the declaration names all tensors. Then each takes only those that it reads, by their names, and lists
of integers are annotated as Integers or as records. Tensors and numbers that belong together may be a bundle
(ortgrad.operators.records), one parameter whose annotation says what it contains:

    @softmax_grad.compiled(views={"dy": 2, "y": 2, "dx": 2}, scratch={"sums": 1}, plan=rows)

Before and after all tasks, onnxruntime may compute products of matrices that the plan names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ortgrad.errors import RegistrationError
from ortgrad.operators.records import is_bundle, types_of
from ortgrad.threads import lazy


class Matrix(NamedTuple):
    """Consecutive elements of a tensor as a matrix. `tensor` is the name of the kernel's parameter."""

    tensor: str
    rows: int
    columns: int
    # The place of the first element in the tensor.
    start: int = 0


class Product(NamedTuple):
    """into = left right, which onnxruntime computes on all its threads."""

    into: Matrix
    left: Matrix
    right: Matrix
    # The factor that is transposed, if one is.
    transposed: Literal["", "left", "right"] = ""


class Plan(NamedTuple):
    """How a compiled kernel runs on tensors of certain shapes."""

    # The number of tasks; with `first` or `last`, the number of each function's tasks, in their order.
    tasks: int | tuple[int, ...]
    # The shape in which the kernel sees every input and output; one without elements if it is absent.
    views: Sequence[Sequence[int]]
    # Further arguments of the kernel: numbers, and lists of integers, which it sees as arrays.
    numbers: Mapping[str, int | float | Sequence[int]] = {}
    # The number of elementary operations, by which tasks are distributed to threads. By default the number of
    # elements of all views.
    work: int = 0
    # The shapes of the scratch tensors.
    scratch: Sequence[Sequence[int]] = ()
    # Products that are computed before the tasks, and after them.
    before: Sequence[Product] = ()
    after: Sequence[Product] = ()


def elementwise_plan(shape: Sequence[int]) -> Plan:
    """Return the plan of an element-wise kernel."""
    size = math.prod(shape)
    # Two inputs and an output are typical.
    return Plan(size, [], work=3 * size)


# Takes the shape of every input and output (None if it is absent) and the attributes as keywords. It returns
# None if the kernel does not support the case; the NumPy kernel then computes it.
Planner = Callable[..., "Plan | None"]


# A list of integers of a plan, as kernels see it: an array, parts of which may be records.
Integers: TypeAlias = Any

_KINDS = {float: "float", "float": "float", int: "int", "int": "int", inspect.Parameter.empty: "int"}


class Bundled(NamedTuple):
    """A parameter that is a bundle (see ortgrad.operators.records)."""

    kind: type
    fields: tuple[Argument, ...]


# What a function takes: the name of a tensor or number, or some of them in a bundle.
Argument: TypeAlias = "str | Bundled"


def vectors(names: str) -> dict[str, int]:
    """Return the declaration of tensors that a kernel sees as vectors."""
    return dict.fromkeys(names.split(), 1)


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """A function for Numba, and what is needed to call it."""

    function: Callable[..., Any]
    tensors: int
    # The number of dimensions of every view; None for an element-wise kernel.
    views: tuple[int, ...] | None = None
    plan: Planner | None = None
    # The function of the tasks that are performed before.
    first: Callable[..., Any] | None = None
    # The number of dimensions of every scratch tensor.
    scratch: tuple[int, ...] = ()
    # Whether it was measured to be the fastest way; or a function that tells it for a node, given the shapes
    # of the inputs as far as they are known, and the attributes as keywords.
    auto: bool | Callable[..., bool] = True
    # The function of the tasks that are performed after.
    last: Callable[..., Any] | None = None
    # Whether its plans have products.
    products: bool = False
    # Whether the operations are performed in the order in which they are written. Element-wise kernels are
    # exact; in others, terms of a sum may change places.
    exact: bool = False
    # The names of inputs, outputs and scratch tensors. With them, all functions get what they take by name;
    # without them, all take the same parameters.
    tensor_names: tuple[str, ...] = ()
    # The places of the tensors that an element-wise kernel updates: it takes an element of every tensor, and
    # returns the new elements of these. Without them, its last tensor is the result.
    updated: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        found = len(self.tensor_names) + 1 if self.tensor_names else len(_parameters(self.function))
        expected = self._count_of_arguments()
        if found < expected or (self.views is not None and len(self.views) != self.tensors):
            raise RegistrationError(
                f"the compiled kernel {self.function.__name__} must take {expected} parameters or more, "
                "and have a view for every input and output"
            )
        for phase in self.phases if self.tensor_names else ():
            for name, annotation in _names(_parameters(phase)[1:]):
                if annotation in ("np.ndarray", np.ndarray) and name not in self.tensor_names:
                    raise RegistrationError(
                        f"{phase.__name__} takes {name!r}, which is none of the tensors of the compiled "
                        f"kernel: {', '.join(self.tensor_names)}"
                    )

    @property
    def elementwise(self) -> bool:
        """Whether the function computes one element."""
        return self.views is None

    @lazy
    def numbers(self) -> dict[str, str]:
        """The names of the parameters besides the tensors, with their types: "float", "int" or "array"."""
        if self.tensor_names:
            found = [each for phase in self.phases for each in _names(_parameters(phase)[1:])]
            found = [(name, annotation) for name, annotation in found if name not in self.tensor_names]
        else:
            found = _names(_parameters(self.function)[self._count_of_arguments() :])
        return {name: _KINDS.get(annotation, "array") for name, annotation in found}

    @property
    def phases(self) -> tuple[Callable[..., Any], ...]:
        """The functions in the order in which their tasks are performed."""
        return tuple(each for each in (self.first, self.function, self.last) if each is not None)

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in their order."""
        if self.tensor_names:
            return [*self.tensor_names]
        return [name for name, _ in _parameters(self.function)[1 : self._count_of_arguments()]]

    def parameters(self, function: Callable[..., Any]) -> list[Argument]:
        """Return the tensors and numbers that a function takes after the number of the task."""
        if self.tensor_names:
            return [_argument(*parameter) for parameter in _parameters(function)[1:]]
        return [*self.names, *self.numbers]

    @property
    def arguments(self) -> list[Argument]:
        """What an element-wise kernel takes after the elements of tensors: numbers, or bundles of them."""
        return [_argument(*each) for each in _parameters(self.function)[self._count_of_arguments() :]]

    def _count_of_arguments(self) -> int:
        """Return the number of parameters before the numbers."""
        if self.elementwise:
            return self.tensors if self.updated else self.tensors - 1
        return self.tensors + len(self.scratch) + 1


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the names of a function's parameters with their annotations, which are types for bundles."""
    found = [(p.name, p.annotation) for p in inspect.signature(function).parameters.values()]
    kinds = [function.__globals__.get(kind) if isinstance(kind, str) else kind for _, kind in found]
    return [(name, of if is_bundle(of) else kind) for (name, kind), of in zip(found, kinds, strict=True)]


def _names(parameters: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the names of parameters with their annotations; fields take the place of their bundles."""
    found: list[tuple[str, Any]] = []
    for name, kind in parameters:
        found += _names(types_of(kind).items()) if is_bundle(kind) else [(name, kind)]
    return found


def _argument(name: str, kind: Any) -> Argument:
    if not is_bundle(kind):
        return name
    return Bundled(kind, tuple(_argument(*field) for field in types_of(kind).items()))


def may_fail(function: Callable[..., Any]) -> bool:
    """Return whether a task returns True if it fails; the NumPy kernel then reports why."""
    return inspect.signature(function).return_annotation in (bool, "bool")
