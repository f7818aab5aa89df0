"""The models for training and evaluation, in the layout of onnxruntime-training 1.19.2."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx
from onnx import TensorProto, helper

from ortgrad.compat.versions import limit_versions
from ortgrad.dialects.training import ACCUMULATOR
from ortgrad.errors import NameNotFoundError, TrainingModelError
from ortgrad.graph.loading import load_model
from ortgrad.graph.matching import nearest
from ortgrad.operators.declaration import DOMAIN
from ortgrad.threads import forks_wait
from ortgrad.training.evaluation import in_evaluation
from ortgrad.training.parameters import Parameters

RESET = "lazy_reset_grad"
# The ends of names that begin with a parameter: the input with the sum of its gradients, and a flag.
BUFFER, FLAG = "_grad.accumulation.buffer", "_grad.accumulation.out"


def build_models(
    model: onnx.ModelProto,
    parameters: Parameters,
    requires_grad: Collection[str],
    loss: str,
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return the models for training and evaluation.

    `model` is a forward model without its parameters. Its outputs are the loss and whatever else it returns.
    """
    from ortgrad.compat.gradients import with_gradients  # onnx-ir is slow to import

    inputs = [*model.graph.input, *parameters.inputs]
    outputs = [value.name for value in model.graph.output]
    # In the order of the inputs.
    wrt = [value.name for value in inputs if value.name in requires_grad]
    missing = sorted(set(requires_grad) - set(wrt))
    if missing:
        near = nearest(missing[0], (each.name for each in (*inputs, *model.graph.initializer)))
        raise TrainingModelError(
            f"requires_grad={missing[0]!r} is neither an initializer nor an input of the model{near}"
        )
    evaluation = in_evaluation(model)
    evaluation.graph.input.extend(parameters.inputs)
    limit_versions(evaluation)
    try:
        with forks_wait():
            training = with_gradients(load_model(parameters.added_to(model)), wrt, loss)
    except NameNotFoundError as error:
        raise TrainingModelError(str(error)) from error
    _arrange(training, inputs, outputs, wrt)
    limit_versions(training)
    return training, evaluation


def _arrange(
    training: onnx.ModelProto, inputs: Iterable[onnx.ValueInfoProto], outputs: list[str], wrt: list[str]
) -> None:
    """Put inputs and outputs in the order of 1.19.2, and accumulate the gradients."""
    graph = training.graph
    inputs = list(inputs)
    values = {value.name: value for value in graph.output}
    gradients = [value.name for value in graph.output][-len(wrt) :] if wrt else []
    constants = [tensor for tensor in graph.initializer if tensor.name not in {v.name for v in inputs}]
    types = {value.name: value for value in graph.input}
    del graph.initializer[:], graph.input[:], graph.output[:]
    graph.initializer.extend(constants)
    for value in inputs:
        # Types as the file declares them.
        graph.input.append(types.get(value.name, value))
    graph.output.extend(values[name] for name in outputs)
    for number, (name, gradient) in enumerate(zip(wrt, gradients, strict=True), len(outputs)):
        buffer, flag = f"{name}{BUFFER}", f"{name}{FLAG}"
        node = helper.make_node(
            ACCUMULATOR,
            [buffer, gradient, RESET],
            [flag],
            name=f"GradientAccumulator{number}",
            domain=DOMAIN,
        )
        graph.node.append(node)
        graph.input.add(name=buffer, type=types[name].type if name in types else values[gradient].type)
        graph.output.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, [1]))
    graph.input.append(helper.make_tensor_value_info(RESET, TensorProto.BOOL, [1]))
    if all(opset.domain != DOMAIN for opset in training.opset_import):
        training.opset_import.append(helper.make_opsetid(DOMAIN, 1))
