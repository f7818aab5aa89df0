"""Training models in the form in which a session updates memory outside of it.

A training model of onnxruntime-training changes some of its inputs: accumulators add to the gradients, and
batch normalizations update the running statistics. The models made here have outputs instead, which a session
can be told to write to the very memory of those inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import onnx

from ortgrad.compat.layout import RESET
from ortgrad.dialects.training import ACCUMULATOR
from ortgrad.errors import TrainingModelError
from ortgrad.graph.protos import all_nodes, copy_of
from ortgrad.operators.declaration import DOMAIN

_BUFFER = "_grad.accumulation.buffer"
# Inputs and outputs with such names belong to the gradients, not to the user.
GRADIENT_SUFFIXES = (_BUFFER, "_grad", "_grad.accumulation.out")


@dataclass
class TrainingGraph:
    """A model, and the outputs that belong to the state."""

    model: onnx.ModelProto
    # By parameter: the output with its gradient.
    gradients: dict[str, str] = field(default_factory=dict)
    # By accumulation buffer: the parameter. Empty if the gradients are not accumulated.
    buffers: dict[str, str] = field(default_factory=dict)
    # The outputs with the running statistics of batch normalizations, and the parameters that they update.
    statistics: dict[str, str] = field(default_factory=dict)
    user_inputs: list[str] = field(default_factory=list)
    user_outputs: list[str] = field(default_factory=list)


def user_inputs(graph: onnx.GraphProto, parameters: Collection[str]) -> list[str]:
    """Return the names of the inputs that are fed by the user."""
    initializers = {tensor.name for tensor in graph.initializer}
    return [
        value.name
        for value in graph.input
        if value.name not in parameters
        and value.name not in initializers
        and value.name != RESET
        and not value.name.endswith(GRADIENT_SUFFIXES)
    ]


def user_outputs(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the outputs that the user gets."""
    return [value.name for value in graph.output if not value.name.endswith(GRADIENT_SUFFIXES)]


def overwriting(model: onnx.ModelProto, parameters: Collection[str]) -> TrainingGraph:
    """Return a model without accumulators, whose outputs are the gradients themselves."""
    made = _begin(model, parameters)
    graph = made.model.graph
    declared = {value.name: value for value in graph.input}
    accumulators = [node for node in graph.node if _is_accumulator(node) and node.input[0] in declared]
    produced = {name for node in graph.node for name in node.output}
    taken = {value.name for value in graph.output}
    copies: list[onnx.NodeProto] = []
    for node in accumulators:
        gradient, buffer = node.input[1], declared[node.input[0]]
        name = gradient
        if gradient not in produced or gradient in taken:
            name = _fresh(f"{gradient}.out", produced | taken)
            copies.append(onnx.helper.make_node("Identity", [gradient], [name]))
        taken.add(name)
        output = graph.output.add()
        output.CopyFrom(buffer)
        output.name = name
        made.gradients[_parameter(buffer.name)] = name
    kept = [n for n in graph.node if not (_is_accumulator(n) and n.input[0] in declared)]
    del graph.node[:]
    graph.node.extend([*kept, *copies])
    buffers = {node.input[0] for node in accumulators}
    _remove(graph.input, lambda name: name == RESET or name in buffers)
    return made


def accumulating(model: onnx.ModelProto, parameters: Collection[str]) -> TrainingGraph:
    """Return a model whose outputs are the sums of the gradients and the accumulation buffers."""
    made = _begin(model, parameters)
    graph = made.model.graph
    declared = {value.name: value for value in graph.input}
    names = {name for node in graph.node for name in node.output}
    for node in graph.node:
        if _is_accumulator(node) and node.input[0] in declared:
            buffer = declared[node.input[0]]
            name = _fresh(f"{buffer.name}.out", names)
            names.add(name)
            node.output[:] = [node.output[0], name]
            output = graph.output.add()
            output.CopyFrom(buffer)
            output.name = name
            parameter = _parameter(buffer.name)
            made.gradients[parameter], made.buffers[buffer.name] = name, parameter
    return made


def _begin(model: onnx.ModelProto, parameters: Collection[str]) -> TrainingGraph:
    copy = copy_of(model)
    made = TrainingGraph(
        copy, user_inputs=user_inputs(copy.graph, parameters), user_outputs=user_outputs(copy.graph)
    )
    _remove(copy.graph.output, lambda name: name not in made.user_outputs)
    _expose_statistics(made, parameters)
    inputs = {value.name for value in copy.graph.input}
    for node in copy.graph.node:
        if _is_accumulator(node) and node.input[0] not in inputs and len(node.output) < 2:
            raise TrainingModelError(
                f"the accumulator {node.name!r} adds to {node.input[0]!r}, not to an input"
            )
    return made


def _is_accumulator(node: onnx.NodeProto) -> bool:
    return node.op_type == ACCUMULATOR and node.domain == DOMAIN


def _parameter(buffer: str) -> str:
    """Return the name of the parameter to which an accumulation buffer belongs."""
    return next((buffer[: -len(s)] for s in GRADIENT_SUFFIXES if buffer.endswith(s)), buffer)


def _expose_statistics(made: TrainingGraph, parameters: Collection[str]) -> None:
    """Make outputs of the running statistics that are parameters.

    A batch normalization reads a statistic and returns it updated. Further ones may follow that share it, and
    accumulators that add to it in place.
    """
    graph = made.model.graph
    declared = {value.name: value for value in graph.input}
    names = {name for node in all_nodes(graph.node) for name in node.output} | set(declared)
    # The parameter that a value is a newer version of, the newest version, and what replaces older ones.
    origin = {name: name for name in declared if name in parameters}
    newest: dict[str, str] = {}
    replaced: dict[str, str] = {}
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = replaced.get(name, name)
        if _updates_statistics(node):
            for place in (1, 2):
                source = node.input[place + 2]
                if source in origin:
                    _add_output(node, place, f"{origin[source]}.updated", names)
                    origin[node.output[place]] = origin[source]
                    newest[origin[source]] = node.output[place]
            if len(node.output) == 2:
                _add_output(node, 2, "running_var", names)
        elif _is_accumulator(node) and node.input[0] in newest.values():
            source = node.input[0]
            _add_output(node, 1, f"{source}.sum", names)
            origin[node.output[1]] = origin[source]
            newest[origin[source]] = replaced[source] = node.output[1]
    taken = {value.name for value in graph.output}
    for parameter, name in newest.items():
        output = name
        if name in taken:
            output = _fresh(f"{parameter}.updated", names)
            names.add(output)
            graph.node.append(onnx.helper.make_node("Identity", [name], [output]))
        value = graph.output.add()
        value.CopyFrom(declared[parameter])
        value.name = output
        made.statistics[output] = parameter


def _add_output(node: onnx.NodeProto, place: int, name: str, names: set[str]) -> None:
    """Give an output a name, unless it has one."""
    while len(node.output) <= place:
        node.output.append("")
    if not node.output[place]:
        node.output[place] = _fresh(name, names)
        names.add(node.output[place])


def _updates_statistics(node: onnx.NodeProto) -> bool:
    if (node.op_type, node.domain) not in {
        ("BatchNormInternal", DOMAIN),
        ("BatchNormalization", ""),
        ("BatchNormalization", "ai.onnx"),
    }:
        return False
    default = int(node.op_type == "BatchNormInternal")
    mode = next((a.i for a in node.attribute if a.name == "training_mode"), default)
    return bool(mode) and len(node.input) >= 5


def _fresh(name: str, names: Collection[str]) -> str:
    while name in names:
        name += "_"
    return name


def _remove(values: Any, unwanted: Callable[[str], bool]) -> None:
    """Remove the values with such names from a field of inputs or outputs."""
    kept = [value for value in values if not unwanted(value.name)]
    del values[:]
    values.extend(kept)
