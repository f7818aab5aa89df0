"""The entries that build_gradient_model writes to `metadata_props`."""

from __future__ import annotations

import json
from collections.abc import Sequence

import onnx

VERSION, WRT, OF = "ortgrad.version", "ortgrad.wrt", "ortgrad.of"


def describe_build(wrt: Sequence[str], of: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a model with the gradients of `of` with respect to `wrt`."""
    from ortgrad import __version__

    return {VERSION: __version__, WRT: json.dumps(list(wrt)), OF: json.dumps(list(of))}


def is_built(model: onnx.ModelProto) -> bool:
    """Return whether build_gradient_model made the model."""
    return any(entry.key == WRT for entry in model.metadata_props)


def names_in(built: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """Return the names in `wrt` and `of` of a built model, with patterns and defaults resolved."""
    found = {entry.key: entry.value for entry in built.metadata_props}
    return json.loads(found[WRT]), json.loads(found[OF])
