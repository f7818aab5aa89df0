"""Models of one node, for every operator, in which something about the node is not as it should be.

The valid calls are those of test_malformed_calls and, for the operators that only sessions use, those below.
A mutation changes the attribute for the kernel (JSON), the ordinary attributes, the inputs and outputs that
the node has, or what the model declares of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import ortgrad
from ortgrad.lowering.fusion.kernel import NAMES
from ortgrad.operators.call import EMPTY_PREFIX, make_call
from ortgrad.operators.declaration import CALL_ATTRIBUTE, INTERNAL_DOMAIN, Operator, all_operators
from support.calls import CASES, make_model, numbers

Random = np.random.Generator
Arrays = dict[str, np.ndarray]
# More digits than Python converts.
MANY_DIGITS = "9" * 5000
INTEGERS = (
    *(-1, 0, 1, 2, 3, 5, 63, 64, 65, 100_000_000, -100_000_000),
    *(2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**31), -(2**63), -(2**63) - 1, 10**40),
)
FLOATS = (0.5, -1.5, 1e300, 1e-310, -0.0, float("nan"), float("inf"), -float("inf"))
TEXTS = (
    "",
    "x",
    "NOTSET",
    "SAME_UPPER",
    "SAME_LOWER",
    "VALID",
    "bidirectional",
    "sum",
    "\x00",
    "é",
    "A" * 10**6,
)
LISTS: tuple[list[Any], ...] = (
    *(
        [],
        [0],
        [-1],
        [0, 3],
        [-3, 3],
        [1],
        [1, 1],
        [2, 2, 2],
        [2**31] * 2,
        [2**63],
        [-(2**63)] * 4,
        [0.5],
        ["x"],
    ),
    *(
        [2**30, 2**30],
        [2**31 - 1],
        [[1], [2]],
        [None],
        [True, False],
        [1] * 100,
        [1] * 300_000,
        [float("nan")],
    ),
)
OTHERS: tuple[Any, ...] = (None, True, False, {}, {"a": 1})
# Numbers that fit together: windows that reach far beyond their input.
SCALES = (1, 2, 3, 7, 2**12, 2**20, 2**30, 2**31 - 1, 2**31)


@dataclass
class Subject:
    """A valid call."""

    operator: Operator | None
    model: onnx.ModelProto
    feeds: Arrays

    @property
    def internal(self) -> bool:
        return self.node.domain == INTERNAL_DOMAIN

    @property
    def node(self) -> onnx.NodeProto:
        return next(node for node in self.model.graph.node if has_call(node))


@dataclass
class Mutated:
    """What was done to a subject, and the model that came of it."""

    name: str
    changes: list[str]
    internal: bool
    model: onnx.ModelProto
    feeds: Arrays


def has_call(node: onnx.NodeProto) -> bool:
    return any(attribute.name == CALL_ATTRIBUTE for attribute in node.attribute)


# Valid calls


def internal_model(
    op_type: str, inputs: Arrays, outputs: dict[str, int], text: str, present: list[str]
) -> onnx.ModelProto:
    """A model of an internal node; the inputs that are not present are empty."""
    node = helper.make_node(
        op_type, present, list(outputs), "the node", domain=INTERNAL_DOMAIN, **{CALL_ATTRIBUTE: text}
    )
    graph = helper.make_graph(
        [node],
        "call",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in inputs.items()
        ],
        [helper.make_tensor_value_info(name, element, None) for name, element in outputs.items()],
        [
            onnx.numpy_helper.from_array(np.zeros(0, name.removeprefix(EMPTY_PREFIX)), name)
            for name in dict.fromkeys(present)
            if name.startswith(EMPTY_PREFIX)
        ],
    )
    opsets = [helper.make_opsetid(domain, 1) for domain in (INTERNAL_DOMAIN, "com.microsoft")]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), *opsets], ir_version=10)


WEIGHTS = numbers(4, 3, 3, 3)
DEPTHWISE = {"X": numbers(2, 4, 6, 5), "W": numbers(4, 1, 3, 3)}
INTERNAL: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "DepthwiseConvGrad": ({"dY": numbers(2, 4, 4, 3), **DEPTHWISE}, {"group": 4, "pads": [0] * 4}),
    "DepthwiseConv": ({**DEPTHWISE, "B": numbers(4)}, {"group": 4}),
    "DenseConv": (
        {"X": numbers(2, 3, 6, 5), "W": WEIGHTS, "B": numbers(4), "Z": numbers(2, 4, 6, 5)},
        {"pads": [1] * 4, "activation": "Clip", "alpha": 0.1, "beta": 0.5, "kernel_shape": [3, 3]},
    ),
    "WinogradConv": ({"X": numbers(2, 3, 6, 5), "W": WEIGHTS, "B": numbers(4)}, {"pads": [1] * 4}),
    "WinogradConvGrad": (
        {"dY": numbers(2, 4, 6, 5), "X": numbers(2, 3, 6, 5), "W": WEIGHTS},
        {"pads": [1] * 4, "kernel_shape": [3, 3], "strides": [1, 1]},
    ),
    "NegativeLogLikelihood": (
        {"log_prob": numbers(3, 4), "label": np.array([0, 3, 1])},
        {"reduction": "mean"},
    ),
    "MaxPoolWithIndices": ({"X": numbers(1, 2, 6, 5)}, {"kernel_shape": [2, 2], "strides": [2, 1]}),
    "Moments": ({"X": numbers(3, 4, 5)}, {"axes": [0, 2], "keepdims": 1, "epsilon": 1e-3}),
    "PointwiseConvGrad": (
        {"dY": numbers(2, 4, 3, 5), "X": numbers(2, 3, 3, 5), "W": numbers(4, 3, 1, 1)},
        {"kernel_shape": [1, 1]},
    ),
    "TransposedProduct": ({"A": numbers(3, 4), "B": numbers(3, 5)}, {}),
}
FUSED = {
    "operands": ["float row", "float one", "float row"],
    "steps": ["v3 = Mul(v0, v1)", "v4 = Add(v3, v2)", "v5 = Max(v4, 0.25)"],
    "results": [4, 5],
    "sums": ["v3 over 1 without 1 by rows"],
    "nodes": ["a", "b", "c"],
}


def internal_subjects() -> Iterator[Subject]:
    declared = {o.name: o for o in all_operators(internal=True) if o.domain == INTERNAL_DOMAIN}
    assert declared.keys() == INTERNAL.keys()
    for name, (arrays, attributes) in INTERNAL.items():
        operator = declared[name]
        there = [parameter.name in arrays for parameter in operator.inputs]
        call = make_call(operator, "the node", attributes, there, [True] * len(operator.outputs))
        inputs = [p.name if p.name in arrays else f"{EMPTY_PREFIX}float32" for p in operator.inputs]
        elements = {p.name: 7 if p.type == "int64" else 1 for p in operator.outputs}
        yield Subject(operator, internal_model(name, arrays, elements, call.to_json(), inputs), arrays)
    for element, name in NAMES.items():
        arrays = {
            name: numbers(*shape).astype(element)
            for name, shape in (("a", (3, 4)), ("b", (3, 1)), ("c", (4,)))
        }
        text = json.dumps({"node": "the node", "attributes": FUSED, "inputs": [1] * 3, "outputs": [1] * 3})
        number = helper.np_dtype_to_tensor_dtype(np.dtype(element))
        outputs = dict.fromkeys(("p", "q", "s"), number)
        yield Subject(None, internal_model(name, arrays, outputs, text, list(arrays)), arrays)


@functools.cache
def subjects() -> tuple[Subject, ...]:
    """One for every case; those of operators with few cases more than once."""
    declared = {operator.name: operator for operator in all_operators()}
    public = [
        Subject(
            declared[case.op_type], ortgrad.prepare(make_model(case, "static"), kernels="python"), case.arrays
        )
        for case in CASES
    ]
    found = [*public, *internal_subjects()]
    assert all(sum(map(has_call, subject.model.graph.node)) == 1 for subject in found)
    return tuple(found)


@functools.cache
def by_operator() -> dict[str, list[Subject]]:
    found: dict[str, list[Subject]] = {}
    for subject in subjects():
        found.setdefault(subject.node.op_type, []).append(subject)
    return found


# Mutations

Change = Callable[[Random, Subject, Mutated], str]
CHANGES: list[Change] = []


def change(function: Change) -> Change:
    CHANGES.append(function)
    return function


def pick(random: Random, choices: Any) -> Any:
    # Not random.choice, which makes an array of them.
    choices = list(choices)
    return choices[int(random.integers(len(choices)))]


def node_of(mutated: Mutated) -> onnx.NodeProto:
    return next(node for node in mutated.model.graph.node if node.name == "the node")


def attribute_of(node: onnx.NodeProto) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == CALL_ATTRIBUTE), None)


def read_call(mutated: Mutated) -> dict[str, Any] | None:
    """The call of the node, if it can still be read."""
    attribute = attribute_of(node_of(mutated))
    try:
        fields = json.loads(attribute.s) if attribute is not None else None
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("attributes"), dict) else None


def write_call(mutated: Mutated, text: str | bytes) -> None:
    node = node_of(mutated)
    attribute = attribute_of(node) or node.attribute.add(name=CALL_ATTRIBUTE, type=3)
    attribute.s = text if isinstance(text, bytes) else text.encode()


def value_like(random: Random, value: Any) -> Any:
    """Another value: of the same kind more often than of another."""
    if random.random() < 0.25:
        return pick(random, (*INTEGERS, *FLOATS, *TEXTS, *LISTS, *OTHERS))
    if isinstance(value, list):
        if value and random.random() < 0.5:
            changed = list(value)
            changed[random.integers(len(changed))] = value_like(random, changed[0])
            return changed
        if value and random.random() < 0.3:
            return pick(random, ([*value, value[0]], value[1:], value[::-1], value * 1000))
        return pick(random, LISTS)
    if isinstance(value, str):
        return pick(random, TEXTS)
    return pick(random, FLOATS if isinstance(value, float) else INTEGERS)


def kind_of(operator: Operator | None, name: str) -> Any:
    """A value of the kind that an attribute takes."""
    if operator is None or name not in operator.attributes:
        return pick(np.random.default_rng(0), OTHERS)
    attribute = operator.attributes[name]
    scalar: Any = {int: 1, float: 0.5, str: "x"}[attribute.type]
    return [scalar] if attribute.is_list else scalar


@change
def attribute_of_the_call(random: Random, subject: Subject, mutated: Mutated) -> str:
    fields = read_call(mutated)
    if fields is None:
        return ""
    attributes = fields["attributes"]
    known = subject.operator.attributes if subject.operator is not None else FUSED
    name = pick(random, [*known] * 8 + ["unknown", "axis", "ortgrad"])
    attributes[name] = value_like(random, attributes.get(name, kind_of(subject.operator, name)))
    write_call(mutated, json.dumps(fields))
    return f"attribute {name} = {str(attributes[name])[:60]}"


@change
def far_windows(random: Random, subject: Subject, mutated: Mutated) -> str:
    """Sizes, strides, dilations and pads, all of them large."""
    fields = read_call(mutated)
    if fields is None or subject.operator is None or "strides" not in subject.operator.attributes:
        return ""
    attributes = fields["attributes"]
    rank = max(subject.feeds[name].ndim for name in ("dY", "X") if name in subject.feeds) - 2
    one, two = pick(random, SCALES), pick(random, SCALES)
    for name, count in (("strides", rank), ("dilations", rank), ("pads", 2 * rank), ("kernel_shape", rank)):
        if name in subject.operator.attributes and random.random() < 0.6:
            near = int(random.integers(-1, 2))
            attributes[name] = [max(0, pick(random, (1, one, two)) + near)] * count
    write_call(mutated, json.dumps(fields))
    return f"windows {attributes}"


@change
def flags_of_the_call(random: Random, subject: Subject, mutated: Mutated) -> str:
    fields = read_call(mutated)
    if fields is None:
        return ""
    name = pick(random, ("inputs", "outputs"))
    flags = fields.get(name)
    if not isinstance(flags, list):
        return ""
    choice = random.integers(6)
    if choice < 3 and flags:
        at = random.integers(len(flags))
        flags[at] = (
            1 - flags[at] if flags[at] in (0, 1) and choice < 2 else pick(random, (2, -1, "1", None, 0.5))
        )
    elif choice == 3:
        fields[name] = [*flags, pick(random, (0, 1))] * pick(random, (1, 1, 2000))
    else:
        fields[name] = flags[:-1]
    write_call(mutated, json.dumps(fields))
    return f"{name} {str(fields[name])[:60]}"


@change
def keys_of_the_call(random: Random, subject: Subject, mutated: Mutated) -> str:
    fields = read_call(mutated)
    if fields is None:
        return ""
    name = pick(random, ("node", "attributes", "inputs", "outputs", "built", "further"))
    if random.random() < 0.4:
        fields.pop(name, None)
    else:
        fields[name] = 1 if name == "built" else pick(random, (*OTHERS, *TEXTS, *LISTS, *INTEGERS))
    write_call(mutated, json.dumps(fields))
    return f"{name} {str(fields.get(name, 'left out'))[:60]}"


@change
def text_of_the_call(random: Random, subject: Subject, mutated: Mutated) -> str:
    attribute = attribute_of(node_of(mutated))
    text = attribute.s if attribute is not None else b"{}"
    choice = random.integers(10)
    if choice == 0:
        text = text[: random.integers(len(text) + 1)]
    elif choice <= 2 and text:
        changed = bytearray(text)
        for _ in range(random.integers(1, 4)):
            changed[random.integers(len(changed))] = random.integers(256)
        text = bytes(changed)
    elif choice <= 4:
        text = pick(
            random,
            (
                b"",
                b"null",
                b"[]",
                b"1",
                b'"x"',
                b"\xff\xfe",
                b"\x00",
                b"{" * 1000,
                b"[" * 10**5,
                b'{"a":' * 10**5,
            ),
        )
    elif choice == 5:
        text = text.replace(b"1", MANY_DIGITS.encode(), 1)
    elif choice == 6:
        text = text.replace(b"[", b"[[", 1).replace(b"]", b"]]", 1)
    elif choice == 7:
        text = text.replace(b":", b": " + b" " * 10**6, 1)
    elif choice == 8:
        text = text.replace(b"1", b"1e2", 1)
    else:
        text = text.replace(b'"attributes":{', b'"attributes":{' + b'"axis":[' * 60 + b"]" * 60 + b",", 1)
    write_call(mutated, text)
    return f"text {text[:60]!r}"


@change
def ordinary_attribute(random: Random, subject: Subject, mutated: Mutated) -> str:
    """One of those that count if the node has no call."""
    if subject.operator is None:
        return ""
    node = node_of(mutated)
    name = pick(random, [*subject.operator.attributes] * 4 + ["unknown", "axis", "ortgrad_body"])
    value = value_like(random, kind_of(subject.operator, name))
    kept = [a for a in node.attribute if a.name != name and a.name != CALL_ATTRIBUTE]
    is_complete = random.random() < 0.3
    if is_complete:
        kept += [a for a in node.attribute if a.name == CALL_ATTRIBUTE]
    try:
        kept.append(helper.make_attribute(name, value))
    except (TypeError, ValueError, OverflowError):
        return ""
    copies = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(copies)
    return f"ordinary attribute {name} = {str(value)[:60]}{' beside the call' if is_complete else ''}"


@change
def no_call(random: Random, subject: Subject, mutated: Mutated) -> str:
    node = node_of(mutated)
    kept = [
        onnx.AttributeProto.FromString(a.SerializeToString())
        for a in node.attribute
        if a.name != CALL_ATTRIBUTE
    ]
    if random.random() < 0.3:
        number = pick(
            random, (helper.make_attribute(CALL_ATTRIBUTE, 1), helper.make_attribute(CALL_ATTRIBUTE, 1.5))
        )
        kept.append(number)
    del node.attribute[:]
    node.attribute.extend(kept)
    return f"no call, {[a.name for a in kept]}"


@change
def inputs_and_outputs(random: Random, subject: Subject, mutated: Mutated) -> str:
    node = node_of(mutated)
    side = "input" if random.random() < 0.6 else "output"
    names, before = getattr(node, side), list(getattr(node, side))
    choice = random.integers(6)
    if not before:
        return ""
    if choice == 0:
        del names[-1]
    elif choice == 1:
        del names[random.integers(len(before)) :]
    elif choice == 2:
        names[random.integers(len(before))] = ""
    elif choice == 3:
        more = int(pick(random, (1, 2, 45)))
        names.extend([before[0]] * more if side == "input" else [f"more{i}" for i in range(more)])
    elif side == "input":
        names[random.integers(len(before))] = pick(random, before)
    else:
        # Nobody asks for the other one.
        del mutated.model.graph.output[1 if len(mutated.model.graph.output) > 1 else 0 :]
    produced = set(node.output)
    for value in list(mutated.model.graph.output):
        if value.name not in produced and len(mutated.model.graph.output) > 1:
            mutated.model.graph.output.remove(value)
    return f"{side}s {list(names)[:12]} for {before}"


ELEMENTS = [
    *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32),
    *(TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING, TensorProto.FLOAT16, TensorProto.BFLOAT16),
]


@change
def declared_type(random: Random, subject: Subject, mutated: Mutated) -> str:
    """Another element type of an input, or of an output; what is fed has it, too."""
    graph = mutated.model.graph
    value = pick(random, [*graph.input, *graph.output] if random.random() < 0.4 else graph.input)
    if random.random() < 0.1 and value.name not in mutated.feeds:
        value.ClearField("type")
        return f"{value.name} has no type"
    element = pick(random, ELEMENTS)
    value.type.tensor_type.elem_type = element
    if value.name in mutated.feeds:
        array = mutated.feeds[value.name]
        dtype = helper.tensor_dtype_to_np_dtype(element)
        mutated.feeds[value.name] = (
            np.full(array.shape, "a string that is longer than a float", object)
            if element == TensorProto.STRING
            else array.astype(dtype)
        )
    return f"{value.name} is declared as {TensorProto.DataType.Name(element)}"


@change
def declared_shape(random: Random, subject: Subject, mutated: Mutated) -> str:
    """Another shape of an input or output; sometimes what is fed has it, too."""
    graph = mutated.model.graph
    value = pick(random, [*graph.input, *graph.output, *graph.value_info])
    shape = value.type.tensor_type.shape
    choice = random.integers(7)
    if choice == 0:
        value.type.tensor_type.ClearField("shape")
    elif choice == 1:
        shape.dim.add(dim_value=int(pick(random, (1, 2, 0))))
    elif choice == 2 and shape.dim:
        del shape.dim[-1]
    elif shape.dim:
        dim = shape.dim[random.integers(len(shape.dim))]
        if choice == 3:
            dim.dim_param = "n"
        else:
            dim.dim_value = int(pick(random, (0, 1, 2, 5, 1000, -1, 2**31, 2**62)))
    sizes = [dim.dim_value if dim.HasField("dim_value") else 2 for dim in shape.dim]
    if value.name in mutated.feeds and value.type.tensor_type.HasField("shape") and random.random() < 0.7:
        array = mutated.feeds[value.name]
        if min(sizes, default=0) >= 0 and float(np.prod(sizes, dtype=float)) < 1e5 and array.size:
            mutated.feeds[value.name] = np.resize(array, sizes)
    return f"{value.name} is declared as {sizes}"


def mutated(seed: int) -> Mutated:
    """The model with this number; the operators take turns."""
    random = np.random.default_rng(seed)
    groups = [*by_operator().values()]
    subject = pick(random, groups[seed % len(groups)])
    model = onnx.ModelProto.FromString(subject.model.SerializeToString())
    result = Mutated(subject.node.op_type, [], subject.internal, model, dict(subject.feeds))
    wanted = int(random.choice([1, 1, 1, 2, 3]))
    weights = np.array([{"attribute_of_the_call": 5, "far_windows": 3}.get(c.__name__, 1.5) for c in CHANGES])
    while len(result.changes) < wanted:
        made = CHANGES[random.choice(len(CHANGES), p=weights / weights.sum())](random, subject, result)
        if made:
            result.changes.append(made)
    return result
