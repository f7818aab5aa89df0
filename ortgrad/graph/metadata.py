"""What a built model says about itself in its metadata_props."""

from __future__ import annotations

import json
from collections.abc import Sequence

import onnx

VERSION, WRT, OF = "ortgrad.version", "ortgrad.wrt", "ortgrad.of"


def describe_build(wrt: Sequence[str], of: Sequence[str]) -> dict[str, str]:
    """The metadata of a model with gradients of `of` towards `wrt`."""
    from ortgrad import __version__

    return {VERSION: __version__, WRT: json.dumps(list(wrt)), OF: json.dumps(list(of))}


def is_built(model: onnx.ModelProto) -> bool:
    """Whether the model holds gradients that ortgrad built."""
    return any(entry.key == WRT for entry in model.metadata_props)


def names_in(built: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """The names of `wrt` and `of` of a built model, patterns and defaults resolved."""
    found = {entry.key: entry.value for entry in built.metadata_props}
    return json.loads(found[WRT]), json.loads(found[OF])
