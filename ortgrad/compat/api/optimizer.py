"""Optimizer: updates the parameters with their gradients."""

from __future__ import annotations

import os

import numpy as np

from ortgrad.compat.api.module import Module
from ortgrad.compat.optimizer_nodes import read_optimizer
from ortgrad.errors import ArgumentTypeError, TrainingError
from ortgrad.keywords import checked
from ortgrad.threads import call_elsewhere
from ortgrad.training.optimizers.passes import thread_count

__all__ = ["Optimizer"]

_GROUP = "group0"


@checked
class Optimizer:
    """The optimizer of an optimizer model, on the parameters of a Module.

    A step changes parameters and optimizer state in place, on as many threads as the session options of the
    module allow. Ctrl-C does not interrupt it: KeyboardInterrupt is raised before or after the step.

    >>> import numpy as np, onnx, tempfile
    >>> from ortgrad.training import artifacts
    >>> from ortgrad.training.api import CheckpointState, Module, Optimizer
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> folder = tempfile.mkdtemp()
    >>> artifacts.generate_artifacts(
    ...     model,
    ...     requires_grad=["w"],
    ...     loss=artifacts.LossType.MSELoss,
    ...     optimizer=artifacts.OptimType.AdamW,
    ...     artifact_directory=folder,
    ... )
    >>> module = Module(
    ...     f"{folder}/training_model.onnx", CheckpointState.load_checkpoint(f"{folder}/checkpoint")
    ... )
    >>> optimizer = Optimizer(f"{folder}/optimizer_model.onnx", module)
    >>> optimizer.set_learning_rate(0.1)
    >>> x, target = np.float32([[1, 0], [0, 1], [1, 1]]), np.float32([[3], [1], [4]])
    >>> for _ in range(200):
    ...     loss = module(x, target)
    ...     optimizer.step()
    ...     module.lazy_reset_grad()
    >>> bool(loss < 1e-3)
    True
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        if not isinstance(module, Module):
            raise ArgumentTypeError(f"an Optimizer takes a Module, not {type(module)}")
        self._rule = read_optimizer(optimizer_uri)
        self._state = module._state
        self._threads = thread_count(module._session_options.intra_op_num_threads)
        self._group = self._state.group(_GROUP, () if self._state.nominal else self._rule.momentums)
        if not self._state.nominal:
            self._rule.warm_up(self._state.trainable)

    def step(self) -> None:
        """Update the parameters. The gradients stay as they are, unless the optimizer model clips them."""
        state = self._state
        if state.nominal:
            raise TrainingError(
                "a nominal checkpoint has no parameters. Please load the model parameters first."
            )
        if state.gradients_are_torn:
            raise TrainingError(
                "the last training step failed, so the gradients are incomplete: run another one first"
            )
        gradients = state.allocate_gradients()
        group = state.group(_GROUP, self._rule.momentums)

        def update() -> None:
            if self._rule.apply(state.trainable, gradients, group, self._threads):
                group.step += 1

        # On a thread that handles no signals, so that it is either completed or not begun.
        call_elsewhere(update)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate, which is initially 0.001 and is not part of a checkpoint."""
        self._group.rate = float(np.float32(learning_rate))

    def get_learning_rate(self) -> float:
        """Return the learning rate, which has single precision."""
        return float(np.float32(self._group.rate))
