"""One declaration per gradient operator: contract, NumPy kernel and body in standard ONNX.

    @operator("TanhGrad", inputs=["dY", "Y"], outputs=["dX"], shapes="Y", dims={"dY": "*S", "Y": "*S"})
    def tanh_grad(dy, y):
        \"\"\"dX = dY * (1 - Y^2)\"\"\"

    @tanh_grad.onnx
    def tanh_grad_body(op, dy, y):
        return dy * (1.0 - y * y)

The onnx schema, the Python custom operator, the node builder and the documentation are derived from it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar, overload

import numpy as np

from ortgrad.errors import NodeError, RegistrationError
from ortgrad.keywords import checked
from ortgrad.operators.compiled import CompiledKernel, Planner
from ortgrad.operators.contract import MOST_DIMENSIONS, Contract, Dims

DOMAIN = "com.microsoft"
# Operators of this domain replace nodes in sessions that run compiled kernels; no model is saved with them.
INTERNAL_DOMAIN = "ortgrad"
# The string attribute with the data for the Python kernel (see ortgrad.operators.call).
CALL_ATTRIBUTE = "ortgrad"
# Tells which of the operator's bodies in the model belongs to the node (see ortgrad.passes.attach).
BODY_ATTRIBUTE = "ortgrad_body"
# Begins the domains of functions that stand for gradient nodes (see ortgrad.graph.portable_calls).
PORTABLE_PREFIX = "ortgrad."

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32")
# The element types that onnxruntime-extensions can pass to Python; other types run through the body.
PYTHON_TYPES = frozenset({"float32", "float64", "int32", "int64", "bool"})

# The largest absolute value of an integer attribute, by its name. Larger ones mean nothing; lists of such a
# length would be made of axes; some kernels of onnxruntime abort the process if a sum of them overflows.
LIMITS = {
    **dict.fromkeys(("axis", "axes", "batch_dims"), MOST_DIMENSIONS),
    **dict.fromkeys(
        ("kernel_shape", "strides", "pads", "dilations", "output_padding", "output_shape"), 2**31
    ),
}
# Of a list with such a name: two numbers for each dimension.
_LONGEST_LIST = 2 * MOST_DIMENSIONS
_LARGEST_INTEGER = 2**63 - 1

Shape = tuple["int | str | None", ...]
Kernel = Callable[..., Any]
Function = TypeVar("Function", bound=Kernel)
# empty(i, shape) returns an uninitialized array for output i, in the output's own memory.
Empty = Callable[[int, Sequence[int]], np.ndarray]
Way = Literal["python", "onnx"]


@dataclass(frozen=True)
class Parameter:
    """One input or output. `type` is a type variable such as "T" or an element type."""

    name: str
    type: str
    optional: bool

    @classmethod
    def parse(cls, text: str) -> Parameter:
        """Read "dY", "B?" (optional) or "SL?: int32"; the type is "T" if none is written."""
        name, _, type_ = (part.strip() for part in text.partition(":"))
        return cls(name.removesuffix("?"), type_ or "T", name.endswith("?"))


class Choice:
    """A string attribute with a fixed set of values; the first one is the default."""

    def __init__(self, *values: str) -> None:
        self.values = values


@dataclass(frozen=True)
class Attribute:
    """Type, default and allowed values of one attribute. A default of None means "may be absent"."""

    name: str
    type: type  # int, float or str
    is_list: bool
    default: Any = None
    choices: tuple[str, ...] = ()

    @classmethod
    def declare(cls, name: str, spec: Any) -> Attribute:
        """Make an attribute from a default value, a type (`float`, `list[int]`: no default) or a Choice."""
        if isinstance(spec, Choice):
            return cls(name, str, False, spec.values[0], spec.values)
        if isinstance(spec, type) and spec in (int, float, str):
            return cls(name, spec, False)
        if getattr(spec, "__origin__", None) is list:
            return cls(name, spec.__args__[0], True)
        return cls(name, type(spec), False, spec)

    def convert(self, value: Any) -> Any:
        """Return the value as plain Python data; raises NodeError if its type or value is not allowed."""
        if self.is_list:
            if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
                raise NodeError(
                    f"attribute {self.name!r} takes a list of {self.type.__name__}, got {_short(value)}"
                )
            if self.name in LIMITS and len(value) > _LONGEST_LIST:
                raise NodeError(
                    f"attribute {self.name!r} has {len(value)} numbers; no tensor has so many dimensions"
                )
            return [self._scalar(item) for item in value]
        return self._scalar(value)

    def _scalar(self, value: Any) -> Any:
        if isinstance(value, bytes):
            value = value.decode()
        fits = (
            isinstance(value, str)
            if self.type is str
            else isinstance(value, (int, np.integer))
            if self.type is int
            else isinstance(value, (int, float, np.integer, np.floating))
        )
        if not fits:
            raise NodeError(f"attribute {self.name!r} takes {self.type.__name__}, got {_short(value)}")
        if self.choices and value not in self.choices:
            raise NodeError(
                f"attribute {self.name!r} is {_short(value)}; it must be one of {', '.join(self.choices)}"
            )
        value = self.type(value)
        most = LIMITS.get(self.name, _LARGEST_INTEGER)
        if self.type is int and not -most <= value <= most:
            raise NodeError(
                f"attribute {self.name!r} is {_short(value)}; it must be between {-most} and {most}"
            )
        if self.type is float and not math.isfinite(value):
            raise NodeError(f"attribute {self.name!r} must be finite, got {value!r}")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


class Operand(NamedTuple):
    """An input as shape functions see it: its shape and, for a constant int64 tensor, its value."""

    shape: Shape | None
    value: np.ndarray | None = None


@dataclass(frozen=True)
class Variant:
    """Concrete element types for every input and output of an operator."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(eq=False)
class Operator:
    """A gradient operator, created by the `operator` decorator."""

    name: str
    domain: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    attributes: dict[str, Attribute]
    types: dict[str, tuple[str, ...]]
    kernel: Kernel
    shapes: Callable[..., Sequence[Shape | None]]
    auto: Way
    builder_name: str  # of the node builder in ortgrad.nodes, e.g. conv_grad
    doc: str
    dims: Dims
    forward_attributes: frozenset[str] = frozenset()
    body: Callable[..., Any] | None = None
    compiled_kernel: CompiledKernel | None = None

    @property
    def has_optional_outputs(self) -> bool:
        return any(parameter.optional for parameter in self.outputs)

    def takes_floats(self, i: int) -> bool:
        """Whether the i-th input is a tensor of floating-point numbers."""
        return "float32" in self.types.get(self.inputs[i].type, ())

    def onnx(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the body in standard ONNX operators (see ortgrad.graph.recorder for `op`)."""
        if self.body is not None:
            raise RegistrationError(f"{self.name} has a body in standard ONNX already")
        self.body = body
        return body

    @overload
    def compiled(self, function: Function) -> Function: ...

    @overload
    def compiled(
        self,
        *,
        views: Sequence[int] | Mapping[str, int] | None = None,
        plan: Planner | None = None,
        first: Kernel | None = None,
        last: Kernel | None = None,
        scratch: Sequence[int] | Mapping[str, int] = (),
        products: bool = False,
        auto: bool | Callable[..., bool] = True,
    ) -> Callable[[Function], Function]: ...

    def compiled(
        self,
        function: Function | None = None,
        *,
        views: Sequence[int] | Mapping[str, int] | None = None,
        plan: Planner | None = None,
        first: Kernel | None = None,
        last: Kernel | None = None,
        scratch: Sequence[int] | Mapping[str, int] = (),
        products: bool = False,
        auto: bool | Callable[..., bool] = True,
    ) -> Function | Callable[[Function], Function]:
        """Declare the kernel that Numba compiles (see ortgrad.operators.compiled), as a decorator.

        Without arguments, the function computes one element. Otherwise it performs one task on views of the
        tensors; `views` gives the number of dimensions of each, and `plan` returns a Plan for given shapes.
        `first` performs tasks before those, `last` after them, and `scratch` gives the dimensions of tensors
        for the results. If `views` and `scratch` are dictionaries, functions take only the tensors that they
        read, by these names. With `products`, plans may have matrix products for onnxruntime.
        `auto` says whether kernels="auto" uses it; it may be a function of the inputs' shapes, as far as they
        are known (None for a size or a shape that is not), and of the attributes, as keywords.
        """
        if self.compiled_kernel is not None:
            raise RegistrationError(f"{self.name} has a compiled kernel already")

        def declare(function: Function) -> Function:
            tensors = len(self.inputs) + len(self.outputs)
            names = (*views, *scratch) if isinstance(views, Mapping) else ()
            shapes, others = (
                tuple(each.values()) if isinstance(each, Mapping) else None if each is None else tuple(each)
                for each in (views, scratch)
            )
            self.compiled_kernel = CompiledKernel(
                function, tensors, shapes, plan, first, others or (), auto, last, products, tensor_names=names
            )
            return function

        return declare if function is None else declare(function)

    def __call__(self, *arrays: np.ndarray | None, **attributes: Any) -> Any:
        """Check the arrays' shapes and run the NumPy kernel for all outputs."""
        inputs = [None if a is None else np.asarray(a, order="C") for a in arrays]
        inputs += [None] * (len(self.inputs) - len(inputs))
        bound = {s.type: a.dtype for s, a in zip(self.inputs, inputs, strict=True) if a is not None}

        def empty(i: int, shape: Sequence[int]) -> np.ndarray:
            type_ = self.outputs[i].type
            return np.empty(shape, bound.get(type_, type_))

        completed = self.with_defaults(attributes)
        self.contract(completed).check_arrays(inputs)
        return self.compute(inputs, completed, (True,) * len(self.outputs), empty)

    def contract(self, attributes: Mapping[str, Any]) -> Contract:
        """Return the contract of the inputs' shapes; `attributes` must include the defaults."""
        names = [parameter.name for parameter in self.inputs]
        return (
            Contract(names, self.dims(**attributes), attributes)
            if callable(self.dims)
            else Contract(names, self.dims, {})
        )

    def compute(
        self,
        arrays: Sequence[np.ndarray | None],
        attributes: Mapping[str, Any],
        wanted: Sequence[bool],
        empty: Empty,
    ) -> Any:
        """Run the NumPy kernel."""
        extra: dict[str, Any] = {"wanted": tuple(wanted)} if self.has_optional_outputs else {}
        if _takes_empty(self.kernel):
            extra["empty"] = empty
        return self.kernel(*arrays, **attributes, **extra)

    def with_defaults(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return all attributes by name, with defaults; raises NodeError for an unknown or invalid one."""
        unknown = sorted(set(attributes) - set(self.attributes) - {CALL_ATTRIBUTE, BODY_ATTRIBUTE})
        if unknown:
            known = ", ".join(self.attributes) or "none"
            raise NodeError(f"{self.name} has no attribute {unknown[0]!r} (it has: {known})")
        result = {}
        for name, attribute in self.attributes.items():
            value = attributes.get(name)
            result[name] = attribute.default if value is None else attribute.convert(value)
        return result

    def variants(self) -> Iterator[Variant]:
        """Yield the combinations of element types that have a Python operator."""
        names = list(self.types)
        choices = [[t for t in self.types[n] if t in PYTHON_TYPES] for n in names]
        for combination in product(*choices):
            bound = dict(zip(names, combination, strict=True))
            yield Variant(
                tuple(bound.get(parameter.type, parameter.type) for parameter in self.inputs),
                tuple(bound.get(parameter.type, parameter.type) for parameter in self.outputs),
            )


_operators: dict[tuple[str, str], Operator] = {}


@checked
def operator(
    name: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    shapes: str | Callable[..., Sequence[Shape | None]],
    dims: Dims | None = None,
    attributes: Mapping[str, Any] | None = None,
    types: Mapping[str, Sequence[str]] | None = None,
    auto: Way = "onnx",
    forward_attributes: Sequence[str] = (),
    domain: str = DOMAIN,
) -> Callable[[Kernel], Operator]:
    """Declare a gradient operator; the decorated function is its NumPy kernel.

    The kernel receives one array per input (None if it is absent), the attributes as keywords, and
    `wanted`, a tuple of bools, if an output is optional. It returns one array per output (None if it is
    not wanted). The arrays are onnxruntime's own memory: a kernel must neither write into them nor keep
    them. A kernel with a keyword `empty` can avoid copying its results: `empty(i, shape)` returns an
    uninitialized array in the memory of output i.

    `shapes` is the name of the input whose shape the only output has, or a function that takes one Operand
    per input (None if it is absent) and the attributes, and returns one shape per output. `dims` gives the
    patterns that the inputs' shapes must match (see ortgrad.operators.contract), or a function of the
    attributes that returns them. They are checked before the kernel runs; conditions that patterns cannot
    express are checked by the kernel, and in the body with `op.require`. `auto` ("python" or "onnx") is the
    way that was measured to be faster. `forward_attributes` are attributes of the forward operator that the
    gradient does not use: onnxruntime-training copies them to its nodes, and rules may pass them.

    >>> import numpy as np, ortgrad
    >>> @ortgrad.operator("SquareGrad", inputs=["dY", "X"], outputs=["dX"], shapes="X", domain="my.domain")
    ... def square_grad(dy, x):
    ...     "dX = 2 X dY"
    ...     return 2 * x * dy
    >>> @square_grad.onnx
    ... def square_grad_body(op, dy, x):
    ...     return dy * x * 2.0
    >>> model = ortgrad.nodes.make_model(ortgrad.nodes.square_grad("dY", "X", "dX"))
    >>> ortgrad.InferenceSession(model).run(None, {"dY": np.float32([1, 1]), "X": np.float32([3, 4])})
    [array([6., 8.], dtype=float32)]
    """
    key = (domain, name)
    if key in _operators:
        raise RegistrationError(f"operator {domain}::{name} is declared already")
    parameters = tuple(Parameter.parse(text) for text in inputs)
    shape_function = _like([s.name for s in parameters].index(shapes)) if isinstance(shapes, str) else shapes

    def declare(kernel: Kernel) -> Operator:
        from ortgrad.operators.schema import check_schema

        op = Operator(
            name=name,
            domain=domain,
            inputs=parameters,
            outputs=tuple(Parameter.parse(text) for text in outputs),
            attributes={k: Attribute.declare(k, v) for k, v in (attributes or {}).items()},
            types={k: tuple(v) for k, v in (types or {"T": FLOATS}).items()},
            kernel=kernel,
            shapes=shape_function,
            auto=auto,
            builder_name=kernel.__name__,
            doc=inspect.cleandoc(kernel.__doc__ or ""),
            dims=dims or {},
            forward_attributes=frozenset(forward_attributes),
        )
        if any(op.builder_name == other.builder_name for other in _operators.values()):
            raise RegistrationError(f"there is a kernel named {op.builder_name!r} already")
        check_schema(op)
        _operators[key] = op
        return op

    return declare


@functools.lru_cache(maxsize=4096)
def _takes_empty(kernel: Kernel) -> bool:
    return "empty" in inspect.signature(kernel).parameters


def _like(index: int) -> Callable[..., Sequence[Shape | None]]:
    def shapes(*operands: Operand | None, **_: Any) -> Sequence[Shape | None]:
        operand = operands[index]
        return [None if operand is None else operand.shape]

    return shapes


def find_operator(name: str, domain: str = DOMAIN) -> Operator | None:
    """Return the operator of that name and domain, or None."""
    return _operators.get((domain, name))


def find_anywhere(name: str) -> Operator | None:
    """Return the first operator of that name in any domain, or None."""
    return next((operator for operator in _operators.values() if operator.name == name), None)


def all_operators(*, internal: bool = False) -> tuple[Operator, ...]:
    """Return all declared operators, in their order; with `internal`, also the ones only sessions use."""
    return tuple(o for o in _operators.values() if internal or o.domain != INTERNAL_DOMAIN)
