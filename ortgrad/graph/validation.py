"""Validation of models: checks everything in the ONNX format that the rest of the package relies on.

An untrusted file may contain anything that protobuf parses: tensors without data, attributes of the wrong
kind, functions that call each other endlessly. Such files are refused here, before they cause an unrelated
error elsewhere. onnxruntime refuses nearly all of them too; it accepts text that is not UTF-8, imports of
version 0, and dimensions of any size where nothing uses them.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from ortgrad.errors import ModelError, NodeError
from ortgrad.graph.protos import all_nodes, subgraphs
from ortgrad.operators.call import EMPTY_PREFIX
from ortgrad.operators.declaration import INTERNAL_DOMAIN, LIMITS, find_operator

# The nesting limit of protobuf and onnxruntime. A graph in an attribute of a node takes three levels.
DEEPEST = 100
# A model with more nodes after inlining is a mistake or an attack.
MOST_NODES = 1_000_000
# Functions that call functions make a large model of a small file.
MOST_COPIES = 10_000
LONGEST_CALL = 200
# More than any tensor of a real model has. onnx's shape inference and onnxruntime's constant folding would
# try to compute such a tensor.
MOST_ELEMENTS = 1 << 31
HIGHEST_VERSION = 2**31 - 1

Part = onnx.ModelProto | onnx.FunctionProto
Key = tuple[str, str, str]

# Operators with an input that determines the size of the result, and the index of that input.
SIZE_MAKERS = {
    "ConstantOfShape": 0,
    "Expand": 1,
    "OneHot": 1,
    "Pad": 1,
    "RandomNormal": 0,
    "RandomUniform": 0,
    "Range": 1,
    "Reshape": 1,
    "Tile": 1,
}
_LONGEST_SHAPE = 64

_RESERVED = (
    ", whose operators exist only inside of sessions and are in no valid file; "
    "build or prepare the original model again"
)

_SUB_BYTE = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}
_ELEMENTS = {number: name for name, number in TensorProto.DataType.items() if number}
_VALUES = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}
_SINGLE_MESSAGES = {"t", "g", "sparse_tensor", "tp"}
_ALL_VALUES = frozenset(_VALUES.values())


def check_fields(model: onnx.ModelProto) -> None:
    """Check each message of the model on its own: text, numbers, tensor data, attribute values."""
    waiting: list[tuple[Any, int, Any]] = [(model, 1, model)]
    while waiting:
        message, depth, owner = waiting.pop()
        if depth > DEEPEST:
            raise ModelError(
                f"the model is nested more than {DEEPEST} messages deep, as graphs in graphs are, "
                "which neither protobuf nor onnxruntime reads"
            )
        kind = type(message)
        if kind is onnx.NodeProto or kind is onnx.FunctionProto:
            owner = message
        if kind is TensorProto:
            _check_tensor(message, owner)
            continue
        fields = message.ListFields()
        if kind is AttributeProto:
            _check_attribute(message, fields, owner)
        elif kind is onnx.TensorShapeProto.Dimension and message.dim_value > MOST_ELEMENTS:
            raise ModelError(
                f"a shape in the model{_in(owner)} has a dimension of {message.dim_value:,}; "
                f"more than {MOST_ELEMENTS:,} are refused"
            )
        for field, value in fields:
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                for inner in (value,) if isinstance(value, Message) else value:
                    waiting.append((inner, depth + 1, owner))
            elif field.type == FieldDescriptor.TYPE_STRING:
                _check_text(field.name, value, message, owner)
    imported = [*model.opset_import, *(opset for f in model.functions for opset in f.opset_import)]
    for opset in imported:
        if not 1 <= opset.version <= HIGHEST_VERSION:
            raise ModelError(f"the model imports version {opset.version} of domain {opset.domain!r}")


def refuse_internal_operators(model: onnx.ModelProto) -> None:
    """Raise ModelError if a node or function is in the domain of operators that only sessions use.

    Their kernels rely on what the passes that make such nodes have made sure of.
    """
    for function in model.functions:
        if function.domain == INTERNAL_DOMAIN:
            raise ModelError(
                f"the function {function.name!r} is in the domain {INTERNAL_DOMAIN!r}{_RESERVED}"
            )
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in all_nodes(nodes):
            if node.domain == INTERNAL_DOMAIN:
                raise ModelError(f"{describe(node)} is in the domain {INTERNAL_DOMAIN!r}{_RESERVED}")


def check_graphs(model: onnx.ModelProto) -> None:
    """Check the messages against each other: names, inputs and attributes of nodes, calls of functions."""
    functions: dict[Key, onnx.FunctionProto] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise ModelError(f"the function {_called(key)} is in the model twice")
        functions[key] = function
    nodes = _Nodes(functions)
    sizes = _inlined_sizes(functions)
    for function in model.functions:
        nodes.opsets = {opset.domain: opset.version for opset in function.opset_import}
        what = f"function {function.name!r}"
        known = _once(function.input, f"the inputs of {what}")
        _check_nodes(function.node, known, nodes, what)
        _require_known(function.output, known, what)
    nodes.opsets = {opset.domain: opset.version for opset in model.opset_import}
    _check_graph(model.graph, frozenset(), nodes)
    _check_copies(model.graph, functions, sizes)
    total = sum(sizes.get(_key(node), 1) for node in all_nodes(model.graph.node))
    if total > MOST_NODES:
        raise ModelError(
            f"the model has {_count(total)} nodes when its functions are inlined; "
            f"more than {MOST_NODES:,} are refused"
        )


# Fields


def _check_text(field: str, value: Any, message: Any, owner: Any) -> None:
    for text in (value,) if isinstance(value, (str, bytes)) else value:
        # protobuf returns text that is not UTF-8 as bytes.
        if isinstance(text, bytes):
            raise ModelError(
                f"{field} of a {type(message).__name__}{_in(owner)} is not UTF-8: {text[:40]!r}; "
                "the file is damaged"
            )


def _check_tensor(tensor: TensorProto, owner: Any) -> None:
    for field in ("name", "doc_string"):
        _check_text(field, getattr(tensor, field), tensor, owner)
    for entry in (*tensor.external_data, *tensor.metadata_props):
        _check_text("external_data", [entry.key, entry.value], tensor, owner)
    what = f"tensor {tensor.name!r}{_in(owner)}"
    if tensor.data_type not in _ELEMENTS:
        raise ModelError(f"the {what} has element type {tensor.data_type}, which ONNX does not know")
    dims = list(tensor.dims)
    count = math.prod(dims)
    if any(dim < 0 for dim in dims) or count >= 2**63:
        raise ModelError(f"the {what} has dimensions {_short(dims)}, which no tensor has")
    if tensor.HasField("segment"):
        raise ModelError(f"the {what} is stored in segments, which neither onnx nor onnxruntime reads")
    external = tensor.data_location == TensorProto.EXTERNAL
    if external and not tensor.HasField("raw_data"):
        _check_external(tensor, what, count)
        return
    element = _ELEMENTS[tensor.data_type]
    if tensor.HasField("raw_data"):
        if element == "STRING":
            raise ModelError(f"the {what} is of strings but has raw data")
        found, expected, unit = len(tensor.raw_data), _bytes(tensor.data_type, count), "bytes"
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        found, expected, unit = len(getattr(tensor, field)), _stored(tensor.data_type, count), f"of {field}"
    if found != expected:
        raise ModelError(
            f"the {what} has dimensions {_short(dims)} and element type {element.lower()}: {expected} {unit} "
            f"are needed, {found} are there; the file is damaged or the tensor was written wrongly"
        )


def _check_external(tensor: TensorProto, what: str, count: int) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries.get("location"):
        raise ModelError(f"the {what} is said to be in another file, but not in which")
    for key in ("offset", "length"):
        text = entries.get(key, "0")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise ModelError(f"the external data of the {what} has {key} {text[:40]!r}, not a number")
    expected = _bytes(tensor.data_type, count)
    if "length" in entries and int(entries["length"]) != expected:
        raise ModelError(
            f"the {what} has dimensions {_short(tensor.dims)}: {expected} bytes are needed, but its external "
            f"data has a length of {entries['length']}"
        )


def _bytes(element: int, count: int) -> int:
    """Return the size in bytes of the raw data of `count` elements."""
    return -(-count * _bits(element) // 8)


@functools.cache
def _bits(element: int) -> int:
    bits = _SUB_BYTE.get(_ELEMENTS[element])
    return bits or 8 * helper.tensor_dtype_to_np_dtype(element).itemsize


def _stored(element: int, count: int) -> int:
    """Return how many numbers store `count` elements in the tensor's typed field."""
    name = _ELEMENTS[element]
    if name in _SUB_BYTE:
        return _bytes(element, count)
    return 2 * count if name.startswith("COMPLEX") else count


def _check_attribute(attribute: AttributeProto, fields: Sequence[tuple[Any, Any]], owner: Any) -> None:
    present = {field.name for field, _ in fields} & _ALL_VALUES
    field = _VALUES.get(attribute.type)
    what = f"attribute {attribute.name!r}{_in(owner)}"
    most = LIMITS.get(attribute.name)
    if most is not None and any(abs(number) > most for number in (attribute.i, *attribute.ints)):
        found = _short(attribute.ints) if attribute.ints else attribute.i
        raise ModelError(f"the {what} is {found}; it must be between {-most} and {most}")
    if field is None:
        raise ModelError(f"the {what} is of no kind that ONNX knows")
    if attribute.ref_attr_name and not present:
        return
    if present - {field} or (field in _SINGLE_MESSAGES and not present):
        kind = AttributeProto.AttributeType.Name(attribute.type)
        raise ModelError(
            f"the {what} says that it is of kind {kind}, but has {sorted(present) or 'no value'}"
        )


# Graphs


def _check_graph(graph: onnx.GraphProto, outer: frozenset[str], nodes: _Nodes) -> None:
    what = f"graph {graph.name!r}" if outer else "the model"
    known = _once((value.name for value in graph.input), f"the inputs of {what}")
    sparse = [tensor.values.name for tensor in graph.sparse_initializer]
    known |= _once((*(tensor.name for tensor in graph.initializer), *sparse), f"the initializers of {what}")
    for tensor in graph.sparse_initializer:
        _check_sparse(tensor)
    own = set(known)
    known |= outer
    _check_sizes(graph)
    _check_nodes(graph.node, known, nodes, what, own)
    _require_known((value.name for value in graph.output), known, what)


def _check_nodes(
    nodes: Sequence[onnx.NodeProto], known: set[str], calls: _Nodes, what: str, own: set[str] | None = None
) -> None:
    """Add the nodes' outputs to `known`, and check that the nodes read only names in it."""
    own = set(known) if own is None else own
    for node in nodes:
        for name in node.output:
            if name in own:
                raise ModelError(f"{describe(node)} computes {name!r}, which {what} has already")
            if name:
                own.add(name)
    known |= own
    for node in nodes:
        calls.check(node)
        for name in node.input:
            if name and name not in known and not name.startswith(EMPTY_PREFIX):
                raise ModelError(f"{describe(node)} reads {name!r}, which is nowhere in the model")
        for graph in subgraphs(node):
            _check_graph(graph, frozenset(known), calls)


def _check_sizes(graph: onnx.GraphProto) -> None:
    """Raise ModelError for nodes that would make too large a tensor, as far as constants tell."""
    constants = None
    for node in graph.node:
        if node.op_type not in SIZE_MAKERS or node.domain not in ("", "ai.onnx"):
            continue
        if constants is None:
            constants = small_constants(graph)
        count = made_elements(node, constants)
        if count is not None and count > MOST_ELEMENTS:
            raise ModelError(
                f"{describe(node)} makes a tensor of {_count(count)} elements; "
                f"more than {MOST_ELEMENTS:,} are refused"
            )


def small_constants(graph: onnx.GraphProto) -> dict[str, list[float]]:
    """Return the elements of initializers and Constant nodes that are small enough to be shapes, by name."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, list[float]] = {}
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    tensors[node.output[0]] = attribute.t
                elif attribute.type in (AttributeProto.INT, AttributeProto.INTS):
                    found[node.output[0]] = [*attribute.ints] or [attribute.i]
    for name, tensor in tensors.items():
        inside = tensor.data_location != TensorProto.EXTERNAL and tensor.data_type != TensorProto.STRING
        if inside and len(tensor.dims) <= 1 and math.prod(tensor.dims) <= _LONGEST_SHAPE:
            found[name] = numpy_helper.to_array(tensor).reshape(-1).astype(float).tolist()
    return found


def made_elements(node: onnx.NodeProto, constants: Mapping[str, Sequence[float]]) -> float | None:
    """Return a lower bound of the elements that a node of SIZE_MAKERS makes; None if it is unknown."""
    if node.op_type in ("RandomNormal", "RandomUniform"):
        shape = next((a.ints for a in node.attribute if a.name == "shape"), ())
        return math.prod(map(float, shape))
    given = [constants.get(name) for name in node.input]
    if node.op_type == "Range":
        numbers = [value[0] for value in given if value]
        if len(numbers) < 3 or not numbers[2]:
            return None
        return max(0.0, (numbers[1] - numbers[0]) / numbers[2])
    value = given[SIZE_MAKERS[node.op_type]] if len(given) > SIZE_MAKERS[node.op_type] else None
    if value is None:
        return None
    if node.op_type == "Pad":
        return sum(max(0.0, number) for number in value)
    # In a shape, 0 and -1 stand for a length that is determined by another operand.
    return math.prod(number for number in value if number > 0)


def _require_known(outputs: Iterable[str], known: set[str], what: str) -> None:
    for name in outputs:
        if name not in known:
            where = "the model" if what == "the model" else f"the {what}"
            raise ModelError(f"the output {name!r} is computed nowhere in {where}")


def _once(names: Iterable[str], what: str) -> set[str]:
    found: set[str] = set()
    for name in names:
        if name in found:
            raise ModelError(f"{name!r} is among {what} twice")
        found.add(name)
    return found


def _check_sparse(sparse: onnx.SparseTensorProto) -> None:
    what = f"sparse initializer {sparse.values.name!r}"
    dims, places = list(sparse.dims), list(sparse.indices.dims)
    count = math.prod(sparse.values.dims)
    if any(dim <= 0 for dim in dims) or math.prod(dims) >= 2**63:
        raise ModelError(f"the {what} has dimensions {_short(dims)}, which no tensor has")
    if sparse.indices.data_type != TensorProto.INT64 or places not in ([count], [count, len(dims)]):
        raise ModelError(f"the {what} has {count} values, but its indices have the shape {places}")


class _Nodes:
    """Checks nodes against the schemas of their operators."""

    def __init__(self, functions: dict[Key, onnx.FunctionProto]) -> None:
        self.opsets: dict[str, int] = {}
        self._functions = functions

    def check(self, node: onnx.NodeProto) -> None:
        if not node.op_type:
            raise NodeError(f"the node {_label(node)!r} does not say which operator it is of")
        domain = "" if node.domain == "ai.onnx" else node.domain
        if _key(node) in self._functions or find_operator(node.op_type, domain):
            return
        schema = _schema(node.op_type, self.opsets.get(domain, 1), domain)
        if schema is None:
            return
        self._check_counts(node, schema)
        kinds, required = _attributes(schema)
        given = set()
        for attribute in node.attribute:
            given.add(attribute.name)
            expected = kinds.get(attribute.name)
            if expected is not None and expected != attribute.type:
                raise NodeError(
                    f"attribute {attribute.name!r} of {describe(node)} is of kind "
                    f"{AttributeProto.AttributeType.Name(attribute.type)}; the operator takes "
                    f"{AttributeProto.AttributeType.Name(expected)}"
                )
            if attribute.type in (AttributeProto.STRING, AttributeProto.STRINGS) and expected is not None:
                for text in (attribute.s, *attribute.strings):
                    _require_text(text, attribute.name, node)
        for name in required:
            if name not in given:
                raise NodeError(f"{describe(node)} has no attribute {name!r}, which the operator needs")

    def _check_counts(self, node: onnx.NodeProto, schema: Any) -> None:
        for what, count, least, most in (
            ("inputs", len(node.input), schema.min_input, schema.max_input),
            ("outputs", len(node.output), schema.min_output, schema.max_output),
        ):
            if not least <= count <= most:
                allowed = f"{least}" if least == most else f"{least} to {most}"
                raise NodeError(f"{describe(node)} has {count} {what}; the operator has {allowed}")


def _require_text(text: bytes, name: str, node: onnx.NodeProto) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise NodeError(f"attribute {name!r} of {describe(node)} is not UTF-8: {text[:40]!r}") from error


@functools.lru_cache(maxsize=4096)
def _schema(op_type: str, version: int, domain: str) -> Any:
    return onnx.defs.get_schema(op_type, version, domain) if onnx.defs.has(op_type, version, domain) else None


@functools.lru_cache(maxsize=4096)
def _attributes(schema: Any) -> tuple[dict[str, int], list[str]]:
    """The kinds of the schema's attributes, and which of them are required."""
    kinds = {name: int(attribute.type.value) for name, attribute in schema.attributes.items()}
    return kinds, [name for name, attribute in schema.attributes.items() if attribute.required]


# Functions


def _inlined_sizes(functions: dict[Key, onnx.FunctionProto]) -> dict[Key, int]:
    """Return by function the number of nodes that a call of it becomes when everything is inlined."""
    calls = {key: [_key(node) for node in all_nodes(f.node)] for key, f in functions.items()}
    sizes: dict[Key, int] = {}
    depths: dict[Key, int] = {}
    for start in functions:
        path = [start]
        entered = {start}
        while path:
            key = path[-1]
            waiting = [c for c in dict.fromkeys(calls[key]) if c in functions and c not in sizes]
            if waiting:
                if waiting[0] in entered:
                    raise ModelError(f"the function {_called(waiting[0])} calls itself: it cannot be inlined")
                entered.add(waiting[0])
                path.append(waiting[0])
                continue
            sizes[key] = sum(sizes.get(c, 1) for c in calls[key])
            depths[key] = 1 + max((depths.get(c, 0) for c in calls[key]), default=0)
            if depths[key] > LONGEST_CALL:
                raise ModelError(
                    f"functions call functions more than {LONGEST_CALL} deep, as {_called(key)} does"
                )
            entered.discard(path.pop())
    return sizes


def _check_copies(
    graph: onnx.GraphProto, functions: dict[Key, onnx.FunctionProto], sizes: Iterable[Key]
) -> None:
    """Raise ModelError for functions that other functions call too often.

    In `sizes`, callees precede their callers. What the graph itself calls is no more than the file holds, as
    the gradient nodes of a large model.
    """
    copies = collections.Counter(_key(node) for node in all_nodes(graph.node))
    written = copies.copy()
    for key in reversed(list(sizes)):
        if copies[key] - written[key] > MOST_COPIES:
            raise ModelError(
                f"the model calls the function {_called(key)} {_count(copies[key])} times when all functions "
                f"are inlined; more than {MOST_COPIES:,} times by other functions are refused"
            )
        for node in all_nodes(functions[key].node):
            copies[_key(node)] += copies[key]


def _key(node: onnx.NodeProto) -> Key:
    return node.domain, node.op_type, node.overload


# Texts


def describe(node: onnx.NodeProto) -> str:
    """Return the operator and name of a node, for error messages."""
    return f"{node.op_type} node {_label(node)!r}"


def _label(node: onnx.NodeProto) -> str:
    return str(node.name or next((name for name in node.output if name), ""))[:200]


def _in(owner: Any) -> str:
    if isinstance(owner, onnx.NodeProto):
        return f" of {describe(owner)}"
    return f" in function {owner.name!r}" if isinstance(owner, onnx.FunctionProto) else ""


def _called(key: Key) -> str:
    return f"{key[0] or 'ai.onnx'}::{key[1]}"


def _short(dims: Iterable[int]) -> str:
    shown = list(dims)
    return f"[{', '.join(map(str, shown[:8]))}{', ...' if len(shown) > 8 else ''}]"


def _count(number: float) -> str:
    return f"{int(number):,}" if number < 1e15 else f"about {float(number):.0e}"
