"""The model of a step: gradients and running statistics are outputs, which a session writes to memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.dialects.training import ACCUMULATOR
from ortgrad.errors import NameNotFoundError, TrainingModelError
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import RANDOM, Recorder
from ortgrad.operators.declaration import DOMAIN
from ortgrad.passes.tidy import remove_unused
from ortgrad.pipelines.prepare import GradientModel
from ortgrad.threads import forks_wait
from ortgrad.training.differentiation import differentiate
from ortgrad.training.forms import unbiased_excess, use_internal_batch_norm
from ortgrad.training.parameters import Parameters


@dataclass
class StepModel:
    """The model of a step, and the names that connect it to the state of a training."""

    model: ir.Model
    # The forward model.
    source: onnx.ModelProto
    # By parameter: the output with its gradient, or with the sum of its gradients.
    gradients: dict[str, str]
    # By output: the running statistic that it updates.
    statistics: dict[str, str]
    # By input: the parameter whose gradients so far it takes. Empty if a step replaces the gradients.
    buffers: dict[str, str]
    # The input that says whether a step replaces the gradients nevertheless.
    reset: str
    # The numbers of the nodes that generate random numbers, by their first output.
    random: dict[str, int]

    def seeded(self, *numbers: int) -> GradientModel:
        """Return the model for a session, in which these numbers determine the random ones."""
        model = self.model.clone() if self.random else self.model
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            name = node.outputs[0].name or ""
            if name not in self.random or node.domain not in ("", "ai.onnx"):
                continue
            (value,) = np.random.SeedSequence([*numbers, self.random[name]]).generate_state(1)
            # Numbers up to 2^24 are exact in single precision.
            seed = int(value) >> 8
            is_integer = node.op_type == "Dropout"
            node.attributes.add(ir.AttrInt64("seed", seed) if is_integer else ir.AttrFloat32("seed", seed))
        return GradientModel(model, self.source)


def step_model(
    source: onnx.ModelProto,
    parameters: Parameters,
    trained: Collection[str],
    outputs: Sequence[str],
    *,
    untrained: Collection[str],
    accumulates: bool,
) -> StepModel:
    """Return the model that computes the gradients of the loss, the first of `outputs`.

    `source` is the forward model without its parameters. `untrained` are the outputs of batch normalizations
    in evaluation mode. If it `accumulates`, a step may add to the gradients of others.
    """
    forward = parameters.added_to(source)
    wrt = [value.name for value in forward.graph.input if value.name in trained]
    finish = (use_internal_batch_norm,)
    try:
        with forks_wait():
            model = differentiate(forward, wrt, outputs[0], untrained=untrained, finish=finish)
    except NameNotFoundError as error:
        raise TrainingModelError(str(error)) from error
    graph = model.graph
    random = {
        node.outputs[0].name or "": number
        for number, node in enumerate(ir.traversal.RecursiveGraphIterator(graph))
        if node.op_type in RANDOM
    }
    _feed(graph, [tensor.name for tensor in parameters.constants])
    values = {value.name: value for value in graph.inputs}
    made = {value.name: value for value in graph.outputs}
    gradients = dict(zip((values[name] for name in wrt), graph.outputs[-len(wrt) :], strict=True))
    for parameter, gradient in gradients.items():
        gradient.shape = parameter.shape
    op = Recorder(model.opset_imports[""], Names.of(model))
    statistics = _update_statistics(graph, op, {tensor.name for tensor in parameters.frozen})
    buffers: dict[ir.Value, ir.Value] = {}
    reset = ""
    if accumulates:
        reset, buffers = _accumulate(graph, op, gradients)
        model.opset_imports.setdefault(DOMAIN, 1)
    graph.outputs[:] = [*(made[name] for name in outputs), *statistics.values(), *gradients.values()]
    return StepModel(
        remove_unused(model),
        forward,
        _names(gradients),
        {new: old for old, new in _names(statistics).items()},
        _names(buffers),
        reset,
        random,
    )


def _names(values: Mapping[ir.Value, ir.Value]) -> dict[str, str]:
    return {key.name or "": value.name or "" for key, value in values.items()}


def _feed(graph: ir.Graph, names: Collection[str]) -> None:
    """Make inputs of initializers that were constants while the gradients were built."""
    for name in names:
        value = graph.initializers.pop(name, None)
        if value is not None:
            value.const_value = None
            graph.inputs.append(value)


def _update_statistics(graph: ir.Graph, op: Recorder, names: Collection[str]) -> dict[ir.Value, ir.Value]:
    """Return the running statistics that are inputs with these names, and what they become in a step."""
    origins = {value: value for value in graph.inputs if value.name in names}
    newest: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type != "BatchNormInternal" or node.domain != DOMAIN:
            continue
        for old, new in zip(node.inputs[3:5], node.outputs[1:3], strict=True):
            origin = origins.get(old) if old is not None else None
            if origin is None:
                continue
            updated = _unbiased(op, node) if new is node.outputs[2] else new
            updated.type, updated.shape = origin.type, origin.shape
            origins[updated], newest[origin] = origin, updated
    return newest


def _unbiased(op: Recorder, node: ir.Node) -> ir.Value:
    """Return PyTorch's running variance; further nodes of the same layer read it, too."""
    running = node.outputs[2]
    later, before = list(running.uses()), len(op.nodes)
    with op.scoped(node.name or f"{node.outputs[0].name}"):
        total: ir.Value = op.Add(running, unbiased_excess(op, node))
    for use in later:
        use.node.replace_input_with(use.idx, total)
    assert node.graph is not None
    node.graph.insert_after(node, op.nodes[before:])
    return total


def _accumulate(
    graph: ir.Graph, op: Recorder, gradients: dict[ir.Value, ir.Value]
) -> tuple[str, dict[ir.Value, ir.Value]]:
    """Replace the gradients by their sums with new inputs; returns the input that resets them, and those."""
    reset = ir.Value(name=op.names.fresh("reset"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    graph.inputs.append(reset)
    buffers: dict[ir.Value, ir.Value] = {}
    before = len(op.nodes)
    for parameter, gradient in gradients.items():
        name = op.names.fresh(f"{gradient.name}.buffer")
        buffer = ir.Value(name=name, type=gradient.type, shape=gradient.shape)
        _, total = op.add(ACCUMULATOR, [buffer, gradient, reset], outputs=2, domain=DOMAIN)
        total.type, total.shape = gradient.type, gradient.shape
        graph.inputs.append(buffer)
        buffers[buffer], gradients[parameter] = parameter, total
    graph.extend(op.nodes[before:])
    return reset.name or "", buffers
