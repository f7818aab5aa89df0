"""The recorder: the object `op` with which bodies and gradient rules record nodes."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.errors import NodeError, unknown_rank
from ortgrad.graph.names import Names
from ortgrad.graph.traversal import is_integer
from ortgrad.operators.assertions import REQUIRES
from ortgrad.operators.declaration import Operator, all_operators, find_anywhere, find_operator
from ortgrad.threads import make_lock

# Bodies use operators in the form that they have since this opset (reductions with axes as an input,
# ScatterElements with reduction, Pad with axes); older models are converted to it.
MINIMUM_OPSET = 18


RANDOM = frozenset(
    [
        "Bernoulli",
        "Dropout",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ]
)


class Recorder(ir.tape.Tape):
    """Records nodes: `op.Mul(x, y)`, `op.Conv(x, w, pads=[1, 1])`, `op.TopK(x, k, _outputs=2)`.

    In a body or rule, `x * y` and `1.0 - x` are recorded as well (see `arithmetic`). The same operator on the
    same operands is recorded once. An operator that is neither in ONNX nor declared in ortgrad is an error,
    unless its domain is given: `op.Inverse(x, _domain="com.microsoft")`.

    A rule passes the attributes of its node on with `op.SoftmaxGrad_13(dy, y, **node.attributes)`; attributes
    that the gradient operator declares as `forward_attributes` are left out.

    Operands are values, or: None for an absent input, a float for a scalar of the element type of the first
    tensor that is not boolean, an int for an int64 scalar, a list of ints for an int64 vector, a NumPy array.
    """

    def __init__(self, opset: int, names: Names | None = None, scope: str = "") -> None:
        super().__init__()
        self.opset = opset
        # The source of names; for nodes of a model, that of the model.
        self.names = Names() if names is None else names
        # A prefix of the names that shows what the nodes belong to.
        self.scope = scope
        # Whether `require` records comparisons, and the node and operator that their errors name.
        self.checked = False
        self.label = ""
        self._recorded: dict[Any, Any] = {}
        # Sequences of zeros except for one element, with its place and the element.
        self._placed: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return functools.partial(self._record, op_type)

    def _record(
        self, op_type: str, *operands: Any, _outputs: int = 1, _domain: str = "", **attributes: Any
    ) -> Any:
        # The condition of Where is skipped: where types are unknown, it is not recognized as boolean.
        typed = operands[1:] if op_type == "Where" else operands
        like = next((o for o in typed if isinstance(o, ir.Value) and o.dtype != ir.DataType.BOOL), None)
        inputs = [self._operand(o, like) for o in operands]
        if op_type == "CastLike" and inputs[1] is not None and inputs[1].dtype is not None:
            # onnxruntime has no kernel for CastLike, and warns when it folds constants.
            return self._record("Cast", inputs[0], to=int(inputs[1].dtype))
        gradient = _declared(op_type, _domain)
        dropped = gradient.forward_attributes if gradient else ()
        attributes = {k: v for k, v in attributes.items() if v is not None and k not in dropped}
        key = (op_type, _domain, *map(id, inputs), repr(sorted(attributes.items())), _outputs)
        if key in self._recorded:
            return self._recorded[key]
        if gradient is None and not _domain and not onnx.defs.has(op_type, self.opset):
            raise _unknown_operator(op_type, self.opset)
        domain = gradient.domain if gradient else _domain
        outputs = self.add(op_type, inputs, attributes, outputs=_outputs, domain=domain)
        elements = self._element_types(op_type, gradient, inputs, attributes, _outputs)
        for output, element in zip(outputs, elements, strict=False):
            if element is not None:
                tensor = ir.TensorType(element)
                output.type = ir.SequenceType(tensor) if op_type in _TO_SEQUENCES else tensor
        result = outputs[0] if _outputs == 1 else outputs
        if op_type not in RANDOM and not any(type(a) is ir.Graph for a in attributes.values()):
            self._recorded[key] = result
        return result

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        outputs: int = 1,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        """Record a node as given, with unique names for it and its outputs."""
        name = self.name(op_type)
        values = self.op_multi_out(op_type, inputs, attributes, num_outputs=outputs, domain=domain, name=name)
        for i, value in enumerate(values):
            value.name = name if outputs == 1 else self.names.fresh(f"{name}.{i}")
        return values

    def in_place_of(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
        """Record a node with the operator, the attributes and the name of one that it replaces."""
        (value,) = self.add(node.op_type, inputs, node.attributes, domain=node.domain)
        made = value.producer()
        assert made is not None
        made.name = node.name or made.name
        return value

    def name(self, name: str) -> str:
        """Return a unique name in the current scope."""
        return self.names.fresh(f"{self.scope}/{name}" if self.scope else name)

    def _operand(self, operand: Any, like: ir.Value | None) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        if isinstance(operand, float):
            if like is None:
                raise TypeError("a float operand needs a tensor operand that determines its type")
            return self.number(operand, like)
        if isinstance(operand, np.ndarray | np.generic):
            return self.constant(np.asarray(operand))
        return self.constant(np.array(operand, np.int64))

    def constant(self, array: np.ndarray) -> ir.Value:
        """Return a constant tensor; equal constants are recorded once."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._recorded:
            (value,) = self.add("Constant", [], {"value": ir.tensor(array)})
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            value.shape = ir.Shape(array.shape)
            self._recorded[key] = value
        return self._recorded[key]

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """Return a scalar of the element type of `like`."""
        if like.dtype is not None:
            return self.constant(np.array(value, like.dtype.numpy()))
        return self.CastLike(np.array(value, np.float64), like)

    def copy(self, value: ir.Value) -> ir.Value:
        """Return a copy of the value, for an output that needs a name of its own."""
        (copied,) = self.add("Identity", [value])
        copied.type, copied.shape = value.type, value.shape
        return copied

    def shape_of(self, value: ir.Value, start: int = 0, end: int | None = None) -> ir.Value:
        """Return the shape, or the sizes of axes `start` to `end`, as an int64 vector.

        It is a constant if these sizes are known, else computed.
        """
        if value.shape is not None:
            sizes = list(value.shape)[start:end]
            if all(isinstance(size, int) for size in sizes):
                return self.constant(np.array(sizes, np.int64))
        shape: ir.Value = self.Shape(value, start=start or None, end=end)
        return shape

    def full_like(self, value: ir.Value, number: float) -> ir.Value:
        """Return a tensor of the shape and element type of `value`, filled with a number.

        For a sequence, return the sequence of such tensors.
        """
        if isinstance(value.type, ir.SequenceType):
            return self.map(lambda op, element: op.full_like(element, number), value, key=number)
        return self.Expand(self.number(number, value), self.shape_of(value))

    def sum(self, values: Sequence[ir.Value]) -> ir.Value:
        """Return the sum of tensors of one shape, or the sequence of the sums of sequences' elements."""
        if isinstance(values[0].type, ir.SequenceType):
            return self._sum_of_sequences(values)
        return self.Add(*values) if len(values) == 2 else self.Sum(*values)

    def _sum_of_sequences(self, values: Sequence[ir.Value]) -> ir.Value:
        full = [value for value in values if value not in self._placed]
        single = [value for value in values if value in self._placed]
        # The same value may be there twice.
        full = full or [single.pop()]
        total = full[0] if len(full) == 1 else self.map(lambda op, *e: op.sum(e), *full, key="sum")
        for value in single:
            # One addition, not one for each element.
            place, element = self._placed[value]
            total = self._put(total, place, self.Add(self.SequenceAt(total, place), element))
        return total

    def placed(self, element: ir.Value, place: ir.Value, like: ir.Value) -> ir.Value:
        """Return a sequence like another one: the element at a place (not negative), zeros elsewhere."""
        result = self._put(self.full_like(like, 0.0), place, element)
        self._placed[result] = place, element
        return result

    def _put(self, sequence: ir.Value, place: ir.Value, element: ir.Value) -> ir.Value:
        return self.SequenceInsert(self.SequenceErase(sequence, place), element, place)

    def map(self, function: Callable[..., ir.Value], *sequences: ir.Value, key: Any) -> ir.Value:
        """Return the sequence of `function(op, *elements)` for the elements of sequences of one length.

        `key` identifies the function: with equal keys, the same sequences are mapped once. The results have
        the element type of the first sequence. This is a Loop, because onnxruntime has no kernel for
        SequenceMap.
        """
        place = ("map", key, *map(id, sequences))
        if place in self._recorded:
            return self._recorded[place]
        first = sequences[0]
        empty = self.SequenceEmpty(dtype=int(first.dtype or ir.DataType.FLOAT))
        number, condition, made = (
            ir.Value(name=self.name(f"map/{name}"), type=type_, shape=shape)
            for name, type_, shape in (
                ("i", ir.TensorType(ir.DataType.INT64), ir.Shape([])),
                ("condition", ir.TensorType(ir.DataType.BOOL), ir.Shape([])),
                ("made", empty.type, None),
            )
        )

        def step(op: Recorder, i: ir.Value, condition: ir.Value, made: ir.Value) -> Sequence[ir.Value]:
            elements = [op.SequenceAt(sequence, i) for sequence in sequences]
            for element, sequence in zip(elements, sequences, strict=True):
                # The shape of a sequence is what its elements' shapes have in common.
                element.shape = sequence.shape
            return op.constant(np.array(True)), op.SequenceInsert(made, function(op, *elements))

        body = self.subgraph("map", [number, condition, made], step)
        (result,) = self.add("Loop", [self.SequenceLength(first), None, empty], {"body": body})
        result.type, result.shape = first.type, first.shape
        self._recorded[place] = result
        return result

    def zeros_for(self, value: ir.Value) -> ir.Value:
        """Return a gradient of zeros for the value; that of an integer value is float."""
        if not is_integer(value):
            return self.full_like(value, 0.0)
        zeros: ir.Value = self.Expand(np.float32(0), self.shape_of(value))
        return zeros

    def rank(self, value: ir.Value) -> int:
        """Return the number of dimensions; raises NodeError if it is unknown."""
        if value.shape is None:
            raise NodeError(unknown_rank(repr(value.name)))
        return len(value.shape)

    def Pad(  # noqa: N802
        self,
        value: ir.Value,
        pads: Any,
        constant: Any = None,
        axes: Any = None,
        *,
        rank: int | None = None,
        mode: str | None = None,
    ) -> ir.Value:
        """Pad along `axes`. `rank` is the value's number of dimensions, if it is known.

        The recorded node has pads for all axes and no `axes`: when onnxruntime moves a Transpose past a Pad,
        it reorders `pads` but not `axes`.
        """
        if axes is not None:
            if rank is None and value.shape is not None:
                rank = len(value.shape)
            pads = self._all_pads(value, self._operand(pads, None), self._operand(axes, None), rank)
        padded: ir.Value = self._record("Pad", value, pads, constant, mode=mode)
        return padded

    def _all_pads(self, value: ir.Value, pads: Any, axes: Any, rank: int | None) -> ir.Value:
        """Return the pads of all axes, given those of `axes`."""
        known = ir.convenience.get_const_tensor(axes)
        if known is None or rank is None or axes.is_graph_input():
            axes = self.Cast(axes, to=ir.DataType.INT64)
            count = self.Shape(self.Shape(value)) if rank is None else self.constant(np.array([rank]))
            axes = self.Where(self.Less(axes, 0), self.Add(axes, count), axes)
            places = self.Concat(axes, self.Add(axes, count), axis=0)
            zeros = self.Expand(0, self.Mul(count, 2))
            scattered: ir.Value = self.ScatterElements(zeros, places, pads, axis=0)
            return scattered
        order = [int(axis) % rank for axis in known.numpy()]
        given = ir.convenience.get_const_tensor(pads)
        if given is not None and not pads.is_graph_input():
            full = np.zeros((2, rank), np.int64)
            full[:, order] = given.numpy().reshape(2, -1)
            return self.constant(full.reshape(-1))
        # The appended 0 is the pad of all other axes.
        places = np.full((2, rank), 2 * len(order))
        places[:, order] = np.arange(2 * len(order)).reshape(2, -1)
        gathered: ir.Value = self.Gather(self.Concat(pads, [0], axis=0), places.reshape(-1))
        return gathered

    def require(self, value: ir.Value, failures: Sequence[ir.Value], what: str) -> ir.Value:
        """Return the value; where calls are checked, a run fails if an element of `failures` is not 0.

        onnxruntime's error shows the failing node's name, which contains `what`. No data is moved: the
        indices of nonzero elements, reshaped to length 0, are appended to the shape, which fails if there
        are any.
        """
        if not (self.checked and failures):
            return value
        nothing = []
        for failure in failures:
            empty = self.Reshape(self.NonZero(failure), [0], allowzero=1)
            nothing.append(self.saying(empty, what))
        result: ir.Value = self.Reshape(value, self.Concat(self.Shape(value), *nothing, axis=0), allowzero=1)
        result.type, result.shape = value.type, value.shape
        return result

    def require_shape(self, value: ir.Value, like: ir.Value, what: str) -> ir.Value:
        """Return the value; where calls are checked, a run fails if its shape differs from that of `like`."""
        if not self.checked:
            return value
        shape = self.Shape(like)
        # Fails if the ranks differ; Sub alone would broadcast a vector of one element.
        own = self.saying(self.Reshape(self.Shape(value), self.Shape(shape), allowzero=1), what)
        return self.require(value, [self.Sub(own, shape)], what)

    def saying(self, value: ir.Value, what: str) -> ir.Value:
        """Name the value and its node so that an error of the node says what is required."""
        node = value.producer()
        if node is not None and REQUIRES not in (value.name or ""):
            node.name = value.name = f"{value.name}: {self.label}{REQUIRES}{what}"
        return value

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Within this context, `+`, `-`, `*` and `/` on values of this thread record nodes here."""
        outer = _recording.set(self)
        try:
            with _arithmetic:
                yield
        finally:
            _recording.reset(outer)

    @contextmanager
    def scoped(self, scope: str) -> Iterator[None]:
        """Within this context, the names of recorded nodes begin with `scope`."""
        outer, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = outer

    @contextmanager
    def checking(self, label: str) -> Iterator[None]:
        """Within this context, `require` records comparisons; their errors contain `label`."""
        self.checked, self.label = True, label
        try:
            yield
        finally:
            self.checked, self.label = False, ""

    def subgraph(
        self, name: str, inputs: Sequence[ir.Value], build: Callable[..., Sequence[ir.Value]]
    ) -> ir.Graph:
        """Return a graph for Scan, Loop or If; `build(op, *inputs)` records it and returns its outputs."""
        inner = self.inside(name)
        with inner.arithmetic():
            results = build(inner, *inputs)
        # Each output of a graph must be the output of a different node in it.
        outputs = [inner.copy(value) for value in results]
        return ir.Graph(inputs, outputs, nodes=inner.nodes, name=name, opset_imports={"": self.opset})

    def inside(self, name: str) -> Recorder:
        """Return a recorder for the nodes of a subgraph."""
        return Recorder(self.opset, self.names, f"{self.scope}/{name}" if self.scope else name)

    def _element_types(
        self,
        op_type: str,
        gradient: Operator | None,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any],
        count: int,
    ) -> Sequence[ir.DataType | None]:
        if op_type == "Cast":
            return [ir.DataType(attributes["to"])]
        if op_type == "SequenceEmpty":
            return [ir.DataType(attributes["dtype"])]
        if op_type in _TO_SEQUENCES or op_type in _FROM_SEQUENCES:
            return [_dtype(inputs, 0)]
        body = attributes.get("body")
        if isinstance(body, ir.Graph):
            # Loop and Scan. The first output of a Loop's body is the condition, which Loop does not return.
            return [value.dtype for value in body.outputs[-count:]]
        if gradient is not None:
            types = [parameter.type for parameter in gradient.inputs]
            return [
                _dtype(inputs, types.index(parameter.type)) if parameter.type in types else None
                for parameter in gradient.outputs
            ]
        return [
            # DataType is a subclass of int, so it is tested first.
            element if element is None or isinstance(element, ir.DataType) else _dtype(inputs, element)
            for element in _output_types(op_type, self.opset, count)
        ]


# Operators that make sequences of the element type of their first input, and tensors of that of a sequence.
_TO_SEQUENCES = frozenset(
    ["SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence"]
)
_FROM_SEQUENCES = frozenset(["ConcatFromSequence", "SequenceAt"])

_recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)


class _Arithmetic:
    """Passes arithmetic on values to the recorder that is active on this thread.

    onnx-ir has a single handler per process. This one is installed only during recording; for threads that
    do not record, it passes arithmetic to the handler that was set before.
    """

    def __init__(self) -> None:
        self._lock = make_lock()
        self._users = 0
        self._others: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._others = ir.set_value_magic_handler(self)
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                ir.set_value_magic_handler(self._others)

    def __getattr__(self, op_type: str) -> Any:
        handler = _recording.get() or self._others
        if handler is None:
            raise ValueError("there is no handler: nothing is being recorded on this thread")
        return getattr(handler, op_type)


_arithmetic: Any = _Arithmetic()


def _unknown_operator(op_type: str, opset: int) -> AttributeError:
    known = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    near = difflib.get_close_matches(op_type, known | {operator.name for operator in all_operators()}, 1)
    return AttributeError(
        f"neither opset {opset} of ONNX nor ortgrad has an operator {op_type!r}"
        + (f"; did you mean {near[0]!r}?" if near and near[0] != op_type else "")
    )


def _declared(op_type: str, domain: str) -> Operator | None:
    """Return the declared operator of a name. ONNX's operators precede those of users' domains."""
    if domain:
        return find_operator(op_type, domain)
    own = find_operator(op_type)
    return own if own or onnx.defs.has(op_type) else find_anywhere(op_type)


def _dtype(inputs: Sequence[ir.Value | None], index: int) -> ir.DataType | None:
    value = inputs[index] if index < len(inputs) else None
    return value.dtype if value is not None else None


@functools.cache
def _output_types(op_type: str, opset: int, count: int) -> Sequence[ir.DataType | int | None]:
    """Return for each output of a standard operator its type, the index of an input of that type, or None."""
    if not onnx.defs.has(op_type, opset):
        return []
    schema = onnx.defs.get_schema(op_type, opset)
    sources: dict[str, int] = {}
    for i, parameter in enumerate(schema.inputs):
        sources.setdefault(parameter.type_str, i)
    fixed: dict[str, ir.DataType | None] = {
        "tensor(int64)": ir.DataType.INT64,
        "tensor(bool)": ir.DataType.BOOL,
    }
    for constraint in schema.type_constraints:
        if len(constraint.allowed_type_strs) == 1:
            fixed[constraint.type_param_str] = fixed.get(constraint.allowed_type_strs[0])
    found = [sources.get(p.type_str, fixed.get(p.type_str)) for p in schema.outputs]
    last = schema.outputs[-1]
    if last.option == onnx.defs.OpSchema.FormalParameterOption.Variadic and last.is_homogeneous:
        found += found[-1:] * (count - len(found))
    return found
