"""The call of a node: the data for its Python kernel, stored as JSON in a single string attribute.

onnxruntime-extensions passes attributes only as int, float (with 6 digits) or string, and every
input and output must be named. One string therefore holds the exact attributes, and flags for the
optional inputs that are present and the outputs that are used.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortgrad.errors import NodeError
from ortgrad.operators.contract import Contract
from ortgrad.operators.declaration import Operator
from ortgrad.threads import lazy

# An absent optional input is an empty tensor whose name is this prefix and its element type.
EMPTY_PREFIX = "ortgrad.empty."


@dataclass(frozen=True)
class Call:
    """The contents of the attribute, checked against the operator's declaration."""

    operator: Operator
    node: str
    attributes: dict[str, Any]
    present: tuple[bool, ...]
    wanted: tuple[bool, ...]
    # Whether build_gradient_model made the node; its shapes are then correct by construction.
    built: bool = False

    @lazy
    def contract(self) -> Contract:
        return self.operator.contract(self.attributes)

    def to_json(self) -> str:
        fields: dict[str, Any] = {
            "node": self.node,
            "attributes": {k: v for k, v in self.attributes.items() if v is not None},
            "inputs": [int(flag) for flag in self.present],
            "outputs": [int(flag) for flag in self.wanted],
        }
        if self.built:
            fields["built"] = 1
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


def make_call(
    operator: Operator,
    node: str,
    attributes: Mapping[str, Any],
    present: Sequence[bool],
    wanted: Sequence[bool],
    *,
    built: bool = False,
) -> Call:
    """Return the call of a node; trailing inputs and outputs that are not given are absent.

    Raises NodeError if a required input or output is missing, or if there are too many.
    """
    if len(present) > len(operator.inputs) or len(wanted) > len(operator.outputs):
        raise NodeError(
            f"it has {len(present)} inputs and {len(wanted)} outputs; the operator "
            f"has at most {len(operator.inputs)} and {len(operator.outputs)}"
        )
    present = (*present, *[False] * (len(operator.inputs) - len(present)))
    wanted = (*wanted, *[False] * (len(operator.outputs) - len(wanted)))
    for what, parameters, flags in (
        ("input", operator.inputs, present),
        ("output", operator.outputs, wanted),
    ):
        for parameter, flag in zip(parameters, flags, strict=True):
            if not (flag or parameter.optional):
                raise NodeError(f"{what} {parameter.name} is missing")
    return Call(operator, node, operator.with_defaults(attributes), present, wanted, built)


@functools.lru_cache(maxsize=4096)
def parse_call(operator: Operator, text: str | bytes) -> Call:
    """Parse the attribute's text; raises NodeError if `to_json` did not write it."""
    try:
        fields = json.loads(text.decode() if isinstance(text, bytes) else text)
        node, attributes = _field(fields, "node", str), _field(fields, "attributes", dict)
        present, wanted = (
            tuple(_flag(item) for item in _field(fields, name, list)) for name in ("inputs", "outputs")
        )
        if len(present) != len(operator.inputs) or len(wanted) != len(operator.outputs):
            raise ValueError(
                f"it lists {len(present)} inputs and {len(wanted)} outputs; "
                f"the operator has {len(operator.inputs)} and {len(operator.outputs)}"
            )
        return make_call(operator, node, attributes, present, wanted, built=_flag(fields.get("built", 0)))
    except (ValueError, OverflowError, RecursionError) as error:
        raise NodeError(
            f"the attribute 'ortgrad' of a {operator.name} node cannot be read ({error}); "
            "delete it and run the model through ortgrad.prepare again"
        ) from error


def _field(fields: Any, name: str, type_: type) -> Any:
    if not isinstance(fields, dict) or not isinstance(fields.get(name), type_):
        raise ValueError(f"it has no {type_.__name__} {name!r}")
    return fields[name]


def _flag(item: Any) -> bool:
    if item not in (0, 1) or not isinstance(item, int):
        raise ValueError(f"{item!r} is neither 0 nor 1")
    return bool(item)
