"""The exceptions and warnings of ortgrad; all exceptions derive from OrtgradError."""

from __future__ import annotations


class OrtgradError(Exception):
    """Base class of all errors that ortgrad raises."""


class ModelError(OrtgradError, ValueError):
    """A model cannot be read, or cannot be brought into a form that runs."""


class NodeError(ModelError):
    """A node is invalid: unknown or missing attribute, missing input, unknown rank or type."""


class NameNotFoundError(ModelError, KeyError):
    """A name in `wrt` or `of` is not in the model."""

    __str__ = Exception.__str__  # KeyError would show the text in quotes


class UnsupportedGradientError(OrtgradError, NotImplementedError):
    """Nodes between `wrt` and `of` cannot be differentiated; the message lists all of them."""


class StoppedGradientWarning(UserWarning):
    """A gradient is zero because every path from `wrt` to `of` contains an operator that has no gradient."""


class ParameterWarning(UserWarning):
    """Parameters are not what their names say: the exporter has merged, folded or left out some of them."""


class WrongGradientError(OrtgradError, AssertionError):
    """Gradients disagree with finite differences; the message shows by how much."""


class RegistrationError(OrtgradError, ValueError):
    """An operator is declared twice, or after a session has made further declarations unsafe."""


class KernelError(OrtgradError, RuntimeError):
    """A Python kernel failed while a session ran; `__cause__` is the kernel's own exception."""

    def __init__(self, node: str, operator: str, inputs: str, reason: str) -> None:
        self.node = node
        self.operator = operator
        self.inputs = inputs
        self.reason = reason
        super().__init__(f"{operator} node {node!r} failed on inputs {inputs}: {reason}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.node, self.operator, self.inputs, self.reason)


class MissingPackageError(OrtgradError, ImportError):
    """An optional package is needed but not installed; the message says how to install it."""


class TrainingError(OrtgradError, RuntimeError):
    """A training step, or its preparation, is not possible."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be read or written: damaged, of another version, or of another kind."""


class TrainingFileError(OSError, TrainingError):
    """A file cannot be opened, read or written; `errno` says why."""

    def __str__(self) -> str:
        return str(self.strerror)


class CheckpointFileError(TrainingFileError, CheckpointError):
    """A checkpoint file cannot be opened, read or written; `errno` says why."""


class TrainingModelError(TrainingError, ModelError):
    """A model cannot be trained as asked: a wrong name, a loss that is not a scalar, an invalid graph."""


class NoParametersError(TrainingError, IndexError):
    """An optimizer is requested, but there is no parameter to train."""


class ParameterNotFoundError(OrtgradError, KeyError):
    """There is no parameter or property of this name."""

    __str__ = Exception.__str__


class ArgumentTypeError(OrtgradError, TypeError):
    """An argument has a type that is not accepted."""


def unknown_rank(what: str) -> str:
    """Return the text of an error about a value whose number of dimensions is needed, but not known."""
    return (
        f"the number of dimensions of {what} is not known: declare its shape (symbolic dimensions are "
        "enough), or give build_gradient_model feeds (on the command line: --feeds), for a run that shows it"
    )
