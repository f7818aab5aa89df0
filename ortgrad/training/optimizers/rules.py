"""The optimizers of `Trainer`, each as torch.optim has it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from ortgrad.errors import ArgumentTypeError, TrainingError
from ortgrad.graph.matching import nearest
from ortgrad.keywords import checked
from ortgrad.training.optimizers import kernels
from ortgrad.training.optimizers.passes import Pass


@dataclass(frozen=True)
class Step:
    """What changes from step to step and from group to group."""

    # The number of the step, from 1 on.
    number: int
    learning_rate: float
    weight_decay: float
    threads: int


@dataclass(frozen=True)
class Optimizer(ABC):
    """An optimizer and its settings; the state is in arrays outside of it."""

    # The settings that must be less than 1.
    fractions: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float, np.number)):
                raise ArgumentTypeError(f"{field.name} is {value!r}; it must be a number")
            if not isinstance(value, bool) and not (math.isfinite(value) and value >= 0):
                raise TrainingError(f"{field.name} is {value}; it must be a number that is not negative")
        for name in self.fractions:
            if not getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be less than 1")

    @property
    def momentums(self) -> Sequence[str]:
        """The names of the arrays of state that each parameter has."""
        return tuple(f"momentum{i}" for i in range(self.passes()[0].arrays - 2))

    @property
    def initial(self) -> float:
        """The value of the state before the first step."""
        return 0.0

    @abstractmethod
    def passes(self) -> Sequence[Pass]:
        """Return the passes over parameters, gradients and state; the first takes all of these arrays."""

    @abstractmethod
    def update(self, arrays: Sequence[np.ndarray], step: Step) -> None:
        """Update a block of parameters in place; `arrays` are these, their gradients and their state."""


def update_adamw(
    arrays: Sequence[np.ndarray],
    step: Step,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    corrects_bias: bool = True,
    as_hugging_face: bool = False,
) -> None:
    """Make a step of AdamW as PyTorch's, or as Hugging Face's.

    Hugging Face's adds epsilon before the bias is corrected, and applies the weight decay after the update.
    """
    first = 1 - beta1**step.number if corrects_bias else 1.0
    second = math.sqrt(1 - beta2**step.number) if corrects_bias else 1.0
    rate, decay = step.learning_rate / first, 1 - step.learning_rate * step.weight_decay
    kernels.adamw(
        *arrays,
        threads=step.threads,
        beta1=beta1,
        rest1=1 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        epsilon=epsilon,
        root=1.0 if as_hugging_face else 1 / second,
        rate=rate * second if as_hugging_face else rate,
        before=1.0 if as_hugging_face else decay,
        after=decay if as_hugging_face else 1.0,
    )


@checked
@dataclass(frozen=True)
class _Adam(Optimizer):
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    fractions: ClassVar[Sequence[str]] = ("beta1", "beta2")

    def passes(self) -> Sequence[Pass]:
        return (kernels.adamw,)

    def update(self, arrays: Sequence[np.ndarray], step: Step) -> None:
        update_adamw(arrays, step, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)


@checked
@dataclass(frozen=True)
class AdamW(_Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW.

    >>> from ortgrad.training import AdamW
    >>> AdamW(learning_rate=3e-4)
    AdamW(learning_rate=0.0003, beta1=0.9, beta2=0.999, epsilon=1e-08, weight_decay=0.01)
    """

    weight_decay: float = 1e-2


@checked
@dataclass(frozen=True)
class Adam(_Adam):
    """Adam, as torch.optim.Adam: weight decay is added to the gradients.

    >>> from ortgrad.training import Adam
    >>> Adam(learning_rate=3e-4)
    Adam(learning_rate=0.0003, beta1=0.9, beta2=0.999, epsilon=1e-08, weight_decay=0.0)
    """

    def passes(self) -> Sequence[Pass]:
        return (kernels.adamw, kernels.add_decay)

    def update(self, arrays: Sequence[np.ndarray], step: Step) -> None:
        parameters, gradients, *_ = arrays
        if step.weight_decay:
            kernels.add_decay(parameters, gradients, threads=step.threads, decay=step.weight_decay)
        super().update(arrays, replace(step, weight_decay=0.0))


@checked
@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD.

    >>> from ortgrad.training import SGD
    >>> SGD(learning_rate=0.1, momentum=0.9, nesterov=True)
    SGD(learning_rate=0.1, momentum=0.9, dampening=0.0, nesterov=True, weight_decay=0.0)
    """

    learning_rate: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    fractions: ClassVar[Sequence[str]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise TrainingError("nesterov=True needs a momentum, and no dampening")

    def passes(self) -> Sequence[Pass]:
        return (kernels.momentum_sgd,) if self.momentum else (kernels.decayed_sgd,)

    def update(self, arrays: Sequence[np.ndarray], step: Step) -> None:
        numbers: dict[str, Any] = {"rate": step.learning_rate, "decay": step.weight_decay}
        if self.momentum:
            numbers |= {
                "momentum": self.momentum,
                # The first momentum is the gradient itself.
                "rest": 1.0 if step.number == 1 else 1 - self.dampening,
                "direct": 1.0 if self.nesterov else 0.0,
                "through": self.momentum if self.nesterov else 1.0,
            }
        self.passes()[0](*arrays, threads=step.threads, **numbers)


@checked
@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, as torch.optim.RMSprop.

    >>> from ortgrad.training import RMSprop
    >>> RMSprop(centered=True).momentums
    ('momentum0', 'momentum1', 'momentum2')
    """

    learning_rate: float = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0

    fractions: ClassVar[Sequence[str]] = ("alpha", "momentum")

    @property
    def _is_simple(self) -> bool:
        return not self.centered and self.momentum == 0

    def passes(self) -> Sequence[Pass]:
        return (kernels.rmsprop,) if self._is_simple else (kernels.centered_rmsprop,)

    def update(self, arrays: Sequence[np.ndarray], step: Step) -> None:
        numbers: dict[str, Any] = {"rate": step.learning_rate, "decay": step.weight_decay}
        numbers |= {"alpha": self.alpha, "rest": 1 - self.alpha, "epsilon": self.epsilon}
        if not self._is_simple:
            numbers |= {"momentum": self.momentum, "centered": float(self.centered)}
        self.passes()[0](*arrays, threads=step.threads, **numbers)


@checked
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, as torch.optim.Adagrad.

    >>> from ortgrad.training import Adagrad
    >>> Adagrad(initial_accumulator_value=0.1).learning_rate
    0.01
    """

    learning_rate: float = 1e-2
    learning_rate_decay: float = 0.0
    epsilon: float = 1e-10
    initial_accumulator_value: float = 0.0
    weight_decay: float = 0.0

    @property
    def initial(self) -> float:
        return self.initial_accumulator_value

    def passes(self) -> Sequence[Pass]:
        return (kernels.adagrad,)

    def update(self, arrays: Sequence[np.ndarray], step: Step) -> None:
        kernels.adagrad(
            *arrays,
            threads=step.threads,
            rate=step.learning_rate / (1 + (step.number - 1) * self.learning_rate_decay),
            decay=step.weight_decay,
            epsilon=self.epsilon,
        )


AnyOptimizer = Adam | AdamW | SGD | RMSprop | Adagrad
OPTIMIZERS: dict[str, type[AnyOptimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
}


def named(name: str) -> AnyOptimizer:
    """Return the optimizer of a name, with its default settings."""
    if name not in OPTIMIZERS:
        known, near = ", ".join(OPTIMIZERS), nearest(name, OPTIMIZERS)
        raise TrainingError(f"optimizer is {name!r}; it must be one of {known}{near}")
    return OPTIMIZERS[name]()
