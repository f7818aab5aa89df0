"""generate_artifacts: the files for training from a forward model."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any

import onnx

from ortgrad.compat import onnxblock
from ortgrad.errors import (
    ArgumentTypeError,
    ModelError,
    NameNotFoundError,
    NoParametersError,
    TrainingError,
    TrainingModelError,
)
from ortgrad.graph.loading import ModelLike
from ortgrad.graph.matching import nearest
from ortgrad.graph.protos import opset_of
from ortgrad.keywords import checked
from ortgrad.training import checkpoint
from ortgrad.training.protos import exists, open_to_losses
from ortgrad.training.statistics import separate_statistics, warn_of_merged
from ortgrad.training.weights import Weights, load_weights, save_model

__all__ = ["LossType", "OptimType", "generate_artifacts"]


class LossType(Enum):
    """The losses that `generate_artifacts` knows by name."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizers that `generate_artifacts` knows by name."""

    AdamW = 1
    SGD = 2


@checked
def generate_artifacts(
    model: ModelLike,
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | onnxblock.Block | None = None,
    artifact_directory: str | bytes | os.PathLike[Any] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[Any] | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
) -> None:
    """Write training_model.onnx, eval_model.onnx, checkpoint and, with an optimizer, optimizer_model.onnx.

    `model` is a forward model: a ModelProto, bytes or a path. `requires_grad` and `frozen_params` name the
    initializers that are trained and that are frozen. Together these are the parameters, which the checkpoint
    holds; other initializers stay in the models.

    `loss` is a LossType, whose input is the first output of the model and a new input `target` (`labels` for
    cross entropy), or a block, which gets the names of all outputs. `loss_input_names` replaces these names.
    Without a loss, the first output is the loss. The models return the loss and `additional_output_names`.

    The files go to `artifact_directory` (default: the working directory), which is created if it does not
    exist. Their names begin with `prefix`. `nominal_checkpoint` adds a checkpoint without values.
    `custom_op_library` must exist; `ort_format=True` is not possible, because the stock onnxruntime cannot
    write such training models.

    The files train in `ortgrad.training.api` and, up to opset 21, in onnxruntime-training 1.19.2.

    >>> import onnx, os, tempfile
    >>> from ortgrad.training import artifacts
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }''')
    >>> folder = tempfile.mkdtemp()
    >>> artifacts.generate_artifacts(
    ...     model,
    ...     requires_grad=["w"],
    ...     loss=artifacts.LossType.MSELoss,
    ...     optimizer=artifacts.OptimType.AdamW,
    ...     artifact_directory=folder,
    ... )
    >>> sorted(os.listdir(folder))
    ['checkpoint', 'eval_model.onnx', 'optimizer_model.onnx', 'training_model.onnx']
    """
    if ort_format:
        raise TrainingError(
            "ort_format=True: the stock onnxruntime cannot write training models in ORT format"
        )
    trained, frozen = _parameter_names(requires_grad, frozen_params)
    loss_block, optimizer_block = _loss_block(loss), _optimizer_block(optimizer)
    if optimizer_block is not None and not trained:
        raise NoParametersError("an optimizer needs parameters; name them in requires_grad")
    folder = Path(os.fsdecode(artifact_directory) if artifact_directory is not None else Path.cwd())
    _refuse_overwriting(model, folder, prefix)
    weights, statistics = _load(model, trained, frozen)
    block = _Artifacts(loss_block, _extra_outputs(additional_output_names))
    for name in trained:
        block.requires_grad(name)
    for name in (*frozen, *statistics):
        block.requires_grad(name, False)
    names = _loss_inputs(weights.model, loss, loss_input_names)
    with onnxblock.base(weights.model), _library(custom_op_library):
        block(*names)
    models = dict(zip(("training_model", "eval_model"), block.to_model_proto(), strict=True))
    if optimizer_block is not None:
        with onnxblock.empty_base(opset_of(weights.model)):
            optimizer_block(block.parameters())
            models["optimizer_model"] = optimizer_block.to_model_proto()  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    _save_parameters(weights, block, folder, prefix, nominal_checkpoint)
    for kind, proto in models.items():
        save_model(proto, folder / f"{prefix}{kind}.onnx")


class _Artifacts(onnxblock.TrainingBlock):
    """The loss, and further outputs."""

    def __init__(self, loss: onnxblock.Block, extra: Sequence[str]) -> None:
        super().__init__()
        self._loss = loss
        self._extra = tuple(extra)

    def build(self, *names: str) -> tuple[str, ...]:
        output = self._loss(*names)
        return (*([output] if isinstance(output, str) else output), *self._extra)


_FILES = (
    "training_model.onnx",
    "eval_model.onnx",
    "optimizer_model.onnx",
    "checkpoint",
    "nominal_checkpoint",
)


def _refuse_overwriting(model: ModelLike, folder: Path, prefix: str) -> None:
    """Raise TrainingError if one of the files to write is the model."""
    if not isinstance(model, (str, os.PathLike)) or not Path(model).exists():
        return
    for path in (folder / f"{prefix}{name}" for name in _FILES):
        if path.exists() and path.samefile(model):
            raise TrainingError(f"{str(path)!r} would overwrite the model: choose another folder or prefix")


def _loss_block(loss: LossType | onnxblock.Block | None) -> onnxblock.Block:
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        block: onnxblock.Block = getattr(onnxblock.loss, loss.name)()
        return block
    if not isinstance(loss, onnxblock.Block):
        raise TrainingError(f"loss is a {type(loss).__name__}; it must be a LossType or an onnxblock.Block")
    return loss


def _optimizer_block(optimizer: OptimType | onnxblock.Block | None) -> onnxblock.Block | None:
    if isinstance(optimizer, OptimType):
        block: onnxblock.Block = getattr(onnxblock.optim, optimizer.name)()
        return block
    if optimizer is not None and not isinstance(optimizer, onnxblock.Block):
        raise ArgumentTypeError(
            f"optimizer is a {type(optimizer).__name__}; it must be an OptimType or an onnxblock.Block"
        )
    return optimizer


def _parameter_names(*given: str | Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the names of the trained and of the frozen parameters."""
    trained, frozen = ([names] if isinstance(names, str) else list(names or ()) for names in given)
    both = sorted(set(trained) & set(frozen))
    if both:
        raise TrainingError(
            f"{', '.join(both)}: a parameter is in requires_grad or in frozen_params, not both"
        )
    return trained, frozen


def _extra_outputs(names: Any) -> list[str]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Sequence | None):
        raise TrainingError(
            f"additional_output_names is a {type(names).__name__}; it must be a list of names"
        )
    return list(names or ())


def _load(model: ModelLike, trained: list[str], frozen: list[str]) -> tuple[Weights, Collection[str]]:
    """Return the model, with copies of the statistics that it shares with parameters, and their names."""
    try:
        weights = load_weights(model, {*trained, *frozen})
    except ModelError as error:
        raise TrainingModelError(str(error)) from error
    weights.model, added = separate_statistics(weights.model, {*trained, *frozen})
    weights.values.update({own: weights.values[n] for own, n in added.items() if n in weights.values})
    warn_of_merged(weights.model, trained)
    weights.model = open_to_losses(weights.model)
    return weights, added


def _loss_inputs(
    model: onnx.ModelProto, loss: LossType | onnxblock.Block | None, given: Sequence[str] | None
) -> list[str]:
    """Return the names with which the loss is called: those that are given, else outputs of the model."""
    if given:
        if isinstance(loss, LossType) and not exists(model, given[0]):
            near = nearest(given[0], (name for node in model.graph.node for name in node.output))
            raise NameNotFoundError(f"loss_input_names={given[0]!r} is not a value of the model{near}")
        return list(given)
    outputs = [value.name for value in model.graph.output]
    # The second input of a loss known by name is the target.
    return outputs[:1] if isinstance(loss, LossType) else outputs


def _library(path: str | bytes | os.PathLike[Any] | None) -> AbstractContextManager[object]:
    return nullcontext() if path is None else onnxblock.custom_op_library(os.fsdecode(path))


def _save_parameters(
    weights: Weights, block: onnxblock.TrainingBlock, folder: Path, prefix: str, nominal: bool
) -> None:
    trainable, frozen = ({t.name: weights.array(t) for t in tensors} for tensors in block.parameters())
    state = checkpoint.Checkpoint(trainable=trainable, frozen=frozen)
    checkpoint.save(state, folder / f"{prefix}checkpoint")
    if nominal:
        state.nominal = True
        checkpoint.save(state, folder / f"{prefix}nominal_checkpoint")
