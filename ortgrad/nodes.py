"""Node builders: one function per gradient operator, for assembling graphs by hand.

    >>> from ortgrad import nodes
    >>> node = nodes.conv_grad("dY", "X", "W", ["dX", "dW", "dB"], pads=[1, 1, 1, 1])
    >>> model = nodes.make_model(node, shapes={"X": ["N", 3, 8, 8], "W": [4, 3, 3, 3]})
    >>> [value.name for value in model.graph.output]
    ['dX', 'dW', 'dB']

The builders are derived from the operators' declarations; nodes.pyi lists them for editors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ortgrad.errors import ArgumentTypeError, NodeError
from ortgrad.keywords import checked, offer
from ortgrad.operators.call import EMPTY_PREFIX, make_call
from ortgrad.operators.declaration import CALL_ATTRIBUTE, Operator, all_operators, find_operator
from ortgrad.pipelines.prepare import Kernels, prepare_loaded

_DEFAULT_OPSET = 21


def __getattr__(name: str) -> Any:
    for operator in all_operators():
        if operator.builder_name == name:
            return _builder(operator)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["make_model", *(operator.builder_name for operator in all_operators())])


def _builder(operator: Operator) -> Any:
    names = [parameter.name for parameter in operator.inputs]

    def build(*arguments: Any, name: str = "", dtype: Any = "float32", **keywords: Any) -> onnx.NodeProto:
        if len(arguments) > len(names) + 1:
            raise TypeError(
                f"{operator.builder_name} takes {len(names)} inputs and the outputs, "
                f"got {len(arguments)} arguments"
            )
        given = dict(zip([*names, "outputs"], arguments, strict=False))
        for key in [k for k in keywords if k in names or k == "outputs"]:
            if key in given:
                raise TypeError(f"{operator.builder_name} got {key!r} twice")
            given[key] = keywords.pop(key)
        unknown = [key for key in keywords if key not in operator.attributes]
        if unknown:
            known = [*names, "outputs", *operator.attributes, "name", "dtype"]
            raise ArgumentTypeError(
                f"{operator.builder_name}() has no argument {unknown[0]!r}{offer(unknown[0], known)}"
            )
        outputs = given.pop("outputs", [parameter.name for parameter in operator.outputs])
        return _make_node(operator, given, outputs, keywords, name, np.dtype(dtype).name)

    build.__name__ = build.__qualname__ = operator.builder_name
    build.__doc__ = (
        f"A complete {operator.name} node: {operator.doc}\n\n"
        f"Inputs: {', '.join(s.name + '?' * s.optional for s in operator.inputs)}. "
        f"Outputs: {', '.join(s.name + '?' * s.optional for s in operator.outputs)}. "
        f"Attributes: {', '.join(operator.attributes) or 'none'}."
    )
    return build


def _make_node(
    operator: Operator,
    inputs: Mapping[str, str | None],
    outputs: str | Sequence[str | None],
    attributes: Mapping[str, Any],
    name: str,
    dtype: str,
) -> onnx.NodeProto:
    results = [outputs] if isinstance(outputs, str) else list(outputs)
    if len(results) > len(operator.outputs):
        raise NodeError(
            f"{operator.name} has {len(operator.outputs)} outputs, {len(results)} names were given"
        )
    results += [None] * (len(operator.outputs) - len(results))
    for parameter, value in zip(operator.outputs, results, strict=True):
        if not (value or parameter.optional):
            raise NodeError(f"{operator.name} needs a name for its output {parameter.name}")
    if not any(results):
        raise NodeError(f"{operator.name} needs a name for at least one output")
    name = name or f"{operator.name}_{next(filter(None, results))}"
    names = []
    for parameter in operator.inputs:
        value = inputs.get(parameter.name)
        if not (value or parameter.optional):
            raise NodeError(f"{operator.name} needs its input {parameter.name}")
        empty = dtype if parameter.type == "T" else operator.types.get(parameter.type, [parameter.type])[0]
        names.append(value or EMPTY_PREFIX + empty)
    present = [bool(inputs.get(parameter.name)) for parameter in operator.inputs]
    call = make_call(operator, name, attributes, present, [bool(value) for value in results])
    return helper.make_node(
        operator.name,
        names,
        [v or f"{name}.unused.{s.name}" for s, v in zip(operator.outputs, results, strict=True)],
        name=name,
        domain=operator.domain,
        **{k: v for k, v in call.attributes.items() if v is not None},
        **{CALL_ATTRIBUTE: call.to_json()},
    )


@checked
def make_model(
    nodes: onnx.NodeProto | Sequence[onnx.NodeProto],
    *,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    dtype: Any = "float32",
    kernels: Kernels = "python",
) -> onnx.ModelProto:
    """Make a runnable model of one gradient node or several.

    Values that no node produces become graph inputs; values that no node reads become graph outputs. `shapes`
    declares shapes by name; `dtype` is the element type of all floating-point tensors.
    """
    nodes = [nodes] if isinstance(nodes, onnx.NodeProto) else list(nodes)
    # In nodes from helper.make_node, absent inputs and outputs have empty names.
    made = {name for node in nodes for name in node.output if name}
    read = {name for node in nodes for name in node.input if name}
    types = _element_types(nodes, np.dtype(dtype).name)

    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(np.dtype(types[name])), (shapes or {}).get(name)
        )

    unknown = sorted(set(shapes or {}) - made - read)
    if unknown:
        raise NodeError(f"shapes names {unknown[0]!r}, which no node reads or produces")
    graph = helper.make_graph(
        nodes,
        "gradient",
        [info(n) for n in types if n in read - made and not n.startswith(EMPTY_PREFIX)],
        [info(n) for n in types if n in made - read and ".unused." not in n],
    )
    domains = sorted({node.domain for node in nodes if node.domain})
    model = helper.make_model(
        graph,
        opset_imports=[
            helper.make_opsetid("", _DEFAULT_OPSET),
            *(helper.make_opsetid(domain, 1) for domain in domains),
        ],
        ir_version=10,
    )
    return prepare_loaded(model, kernels)


def _element_types(nodes: Sequence[onnx.NodeProto], dtype: str) -> dict[str, str]:
    types: dict[str, str] = {}
    for node in nodes:
        operator = find_operator(node.op_type, node.domain)
        if operator is None:
            raise NodeError(f"make_model takes gradient nodes only, not {node.op_type}")
        parameters = [*operator.inputs, *operator.outputs]
        for parameter, name in zip(parameters, [*node.input, *node.output], strict=True):
            floating = "float32" in operator.types.get(parameter.type, ())
            types.setdefault(
                name, dtype if floating else operator.types.get(parameter.type, [parameter.type])[0]
            )
    return types
