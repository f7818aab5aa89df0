"""Passes: functions that change a model, each for one purpose.

A pass takes an onnx-ir model, changes it in place and returns that same model. Settings, if it has any, are
further parameters; where passes are listed, they are bound.

The model is the only object that stays. A pass may put another graph into it, and other nodes and values into
a graph; inputs, outputs, and values that a caller named keep their names. Code that needs a graph, a node or
a value after a pass takes it from the model again. Passes that say so in their docstrings need the nodes in
topological order, or complete gradient nodes; all keep unique names unique, and leave a model that onnx
accepts.

The passes here serve several pipelines, those in `ortgrad.lowering` only sessions.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

Pass = Callable[[ir.Model], ir.Model]


def run(model: ir.Model, *passes: Pass) -> ir.Model:
    """Apply the passes in order and return the model."""
    for each in passes:
        model = each(model)
    return model
