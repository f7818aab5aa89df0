"""Training models in a form in which a session updates memory outside of it.

A training model of onnxruntime-training changes some of its inputs: accumulators add to the gradients, and
batch normalizations update the running statistics. The models made here have outputs instead, which a session
can be told to write to the memory of those very inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import onnx

from ortgrad.compat.layout import BUFFER, FLAG, RESET
from ortgrad.dialects.training import ACCUMULATOR
from ortgrad.errors import TrainingModelError
from ortgrad.graph.protos import all_nodes, copy_of, keep, replace
from ortgrad.operators.declaration import DOMAIN

# Inputs and outputs with such names belong to the gradients, not to the user.
GRADIENT_SUFFIXES = (BUFFER, "_grad", FLAG)


@dataclass
class TrainingGraph:
    """A model, and the outputs that belong to the state."""

    model: onnx.ModelProto
    user_inputs: list[str]
    user_outputs: list[str]
    # By parameter: the output with its gradient.
    gradients: dict[str, str] = field(default_factory=dict)
    # By accumulation buffer: the parameter. Empty if the gradients are not accumulated.
    buffers: dict[str, str] = field(default_factory=dict)
    # The outputs with the running statistics of batch normalizations, and the parameters that they update.
    statistics: dict[str, str] = field(default_factory=dict)


def _user_inputs(graph: onnx.GraphProto, parameters: Collection[str]) -> list[str]:
    """Return the names of the inputs that are fed by the user."""
    others = {RESET, *parameters, *(tensor.name for tensor in graph.initializer)}
    return [
        value.name
        for value in graph.input
        if value.name not in others and not value.name.endswith(GRADIENT_SUFFIXES)
    ]


def _user_outputs(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the outputs that the user gets."""
    return [value.name for value in graph.output if not value.name.endswith(GRADIENT_SUFFIXES)]


def training_graph(
    model: onnx.ModelProto, parameters: Collection[str], *, accumulates: bool
) -> TrainingGraph:
    """Return a model whose outputs are the gradients or, if it accumulates, their sums with the buffers."""
    copy = copy_of(model)
    graph = copy.graph
    made = TrainingGraph(copy, _user_inputs(graph, parameters), _user_outputs(graph))
    keep(graph.output, lambda value: value.name in made.user_outputs)
    outputs = _Outputs(graph)
    _expose_statistics(made, parameters, outputs)
    declared, buffers, kept = {value.name: value for value in graph.input}, {}, []
    for node in graph.node:
        buffer = declared.get(node.input[0]) if _is_accumulator(node) else None
        if buffer is None or accumulates:
            kept.append(node)
        if buffer is not None:
            buffers[buffer.name] = parameter = _parameter(buffer.name)
            gradient = node.input[1]
            if accumulates:
                gradient = outputs.fresh(f"{buffer.name}.out")
                node.output[:] = [node.output[0], gradient]
            made.gradients[parameter] = outputs.add(gradient, buffer)
        elif _is_accumulator(node) and len(node.output) < 2:
            raise TrainingModelError(
                f"the accumulator {node.name!r} adds to {node.input[0]!r}, not to an input"
            )
    replace(graph.node, [*kept, *outputs.copies])
    if accumulates:
        made.buffers = buffers
        return made
    keep(graph.input, lambda value: value.name != RESET and value.name not in buffers)
    return made


class _Outputs:
    """The outputs of a graph, to which others are added."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._values = graph.output
        self._inputs = {value.name for value in graph.input}
        self._results = {name for node in all_nodes(graph.node) for name in node.output}
        # Nodes that the graph needs in addition.
        self.copies: list[onnx.NodeProto] = []

    def fresh(self, name: str) -> str:
        """Return a name that no value has, for the result of a node."""
        while name in self._inputs or name in self._results:
            name += "_"
        self._results.add(name)
        return name

    def name(self, node: onnx.NodeProto, place: int, name: str) -> str:
        """Return the name of an output of a node, which gets a fresh one if it has none."""
        while len(node.output) <= place:
            node.output.append("")
        node.output[place] = node.output[place] or self.fresh(name)
        return node.output[place]

    def add(self, name: str, like: onnx.ValueInfoProto) -> str:
        """Make a value of the type of an input an output, or a copy of it if it cannot be one."""
        if name not in self._results or any(value.name == name for value in self._values):
            source, name = name, self.fresh(f"{name}.out")
            self.copies.append(onnx.helper.make_node("Identity", [source], [name]))
        self._values.add(name=name, type=like.type)
        return name


def _is_accumulator(node: onnx.NodeProto) -> bool:
    return node.op_type == ACCUMULATOR and node.domain == DOMAIN


def _parameter(buffer: str) -> str:
    """Return the name of the parameter to which an accumulation buffer belongs."""
    return next((buffer[: -len(s)] for s in GRADIENT_SUFFIXES if buffer.endswith(s)), buffer)


def _expose_statistics(made: TrainingGraph, parameters: Collection[str], outputs: _Outputs) -> None:
    """Make outputs of the running statistics that are parameters.

    A batch normalization reads a statistic and returns it updated. It may be followed by others that share
    the statistic, and by accumulators that add to it in place.
    """
    graph = made.model.graph
    declared = {value.name: value for value in graph.input}
    # The parameter of which a value is a newer version, the newest version, and what replaces older ones.
    origin = {name: name for name in declared if name in parameters}
    newest: dict[str, str] = {}
    replaced: dict[str, str] = {}
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = replaced.get(name, name)
        if _updates_statistics(node):
            for place in (1, 2):
                parameter = origin.get(node.input[place + 2])
                if parameter is not None:
                    updated = outputs.name(node, place, f"{parameter}.updated")
                    origin[updated], newest[parameter] = parameter, updated
            if len(node.output) == 2:
                outputs.name(node, 2, "running_var")
        elif _is_accumulator(node) and (source := node.input[0]) in newest.values():
            updated, parameter = outputs.name(node, 1, f"{source}.sum"), origin[source]
            origin[updated] = parameter
            newest[parameter] = replaced[source] = updated
    for parameter, name in newest.items():
        made.statistics[outputs.add(name, declared[parameter])] = parameter


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
