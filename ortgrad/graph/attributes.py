"""The attributes of a node as Python data."""

from __future__ import annotations

import functools
from typing import Any

import onnx
import onnx_ir as ir

from ortgrad.operators.declaration import find_operator


def attributes_of(node: ir.Node, opset: int) -> dict[str, Any]:
    """Return the node's attributes as Python data, including the schema's defaults."""
    found = dict(_default_attributes(node.op_type, node.domain, opset))
    for attribute in node.attributes.values():
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = value.numpy()
        found[attribute.name] = list(value) if isinstance(value, tuple) else value
    return found


@functools.cache
def _default_attributes(op_type: str, domain: str, opset: int) -> dict[str, Any]:
    operator = find_operator(op_type, domain)
    if operator is not None:
        return {name: a.default for name, a in operator.attributes.items() if a.default is not None}
    version = opset if domain in ("", "ai.onnx") else 1
    if not onnx.defs.has(op_type, version, domain):
        return {}
    defaults = {}
    for name, attribute in onnx.defs.get_schema(op_type, version, domain).attributes.items():
        if attribute.default_value.type:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            defaults[name] = _decoded(value)
    return defaults


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


def content(attribute: ir.Attr) -> str:
    """Return a key that is equal for equal attributes without graphs."""
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return f"{tensor.dtype}{tensor.shape}{tensor.tobytes()!r}"
    return repr(attribute.value)
