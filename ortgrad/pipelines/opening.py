"""The opening passes of every pipeline, which convert a model to complete nodes and a supported opset."""

from __future__ import annotations

from ortgrad.dialects.gradient_operator import expand_gradient_operator
from ortgrad.dialects.training_nodes import adopt_training_nodes
from ortgrad.dialects.translate import translate_training_operators
from ortgrad.passes import Pass
from ortgrad.passes.absent_inputs import drop_empty_inputs
from ortgrad.passes.complete import complete
from ortgrad.passes.opset import at_minimum_opset

OPENING: tuple[Pass, ...] = (
    adopt_training_nodes,
    complete,
    at_minimum_opset,
    drop_empty_inputs,
    translate_training_operators,
    expand_gradient_operator,
)
