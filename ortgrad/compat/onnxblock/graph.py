"""The outputs of the models that blocks build."""

from __future__ import annotations

import onnx

from ortgrad.errors import NameNotFoundError
from ortgrad.graph.matching import nearest


def register_outputs(model: onnx.ModelProto, names: str | tuple[str, ...] | list[str]) -> None:
    """Make the named values the outputs of the graph, in this order; `model` has inferred types."""
    graph = model.graph
    known = {value.name: value for value in (*graph.value_info, *graph.output)}
    outputs = []
    for name in [names] if isinstance(names, str) else names:
        if name not in known:
            raise NameNotFoundError(
                f"{name!r} cannot be an output: there is no such value, or its type is not known"
                f"{nearest(name, known)}"
            )
        outputs.append(onnx.ValueInfoProto.FromString(known[name].SerializeToString()))
    del graph.output[:]
    graph.output.extend(outputs)


def first(output: str | tuple[str, ...] | list[str]) -> str:
    """Return the first of the names that a block's build method returned."""
    return output if isinstance(output, str) else output[0]
