"""Unknown keyword arguments: a TypeError that offers the name that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ortgrad.errors import ArgumentTypeError

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

# The names that other libraries use.
_ELSEWHERE = {
    "lr": "learning_rate",
    "eta": "learning_rate",
    "lr_decay": "learning_rate_decay",
    "lr_scheduler": "schedule",
    "eps": "epsilon",
    "bs": "batch_size",
    "validation_data": "evaluate",
    "val_data": "evaluate",
    "eval_data": "evaluate",
    "verbose": "progress",
    "random_state": "seed",
    "n_jobs": "threads",
    "max_norm": "clip_norm",
    "max_grad_norm": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
    "early_stopping": "patience",
    "criterion": "loss",
    "loss_fn": "loss",
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "patterns",
    "freeze": "exclude",
    "inputs": "wrt",
    "outputs": "of",
}
# Names that are this similar are offered.
_CUTOFF = 0.6


def checked(function: _Callable) -> _Callable:
    """Let a function, or the public methods of a class, offer the nearest name for an unknown keyword.

    >>> from ortgrad.keywords import checked
    >>> @checked
    ... def fit(data, *, epochs=1): ...
    >>> fit([], epoch=50)
    Traceback (most recent call last):
    ...
    ortgrad.errors.ArgumentTypeError: fit() has no argument 'epoch'; did you mean 'epochs'?
    """
    if isinstance(function, type):
        for name, member in list(vars(function).items()):
            if name in ("__init__", "__call__") or not name.startswith("_"):
                setattr(function, name, _checked_member(member))
        return function
    parameters = inspect.signature(function).parameters.values()
    known = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if not set(known) - {"self", "cls"} or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function
    accepted = frozenset(known)
    name = function.__qualname__.rpartition("<locals>.")[2]

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not accepted.issuperset(keywords):
            unknown = next(keyword for keyword in keywords if keyword not in accepted)
            made = function.__name__ == "__init__" and arguments
            label = type(arguments[0]).__name__ if made else name.removesuffix(".__init__")
            raise ArgumentTypeError(f"{label}() has no argument {unknown!r}{offer(unknown, known)}")
        return function(*arguments, **keywords)

    return call  # type: ignore[return-value]


def _checked_member(member: Any) -> Any:
    """Return a member of a class, checked if it is a method."""
    if isinstance(member, (classmethod, staticmethod)):
        return type(member)(checked(member.__func__))
    return checked(member) if inspect.isfunction(member) else member


def offer(unknown: str, known: list[str]) -> str:
    """Return the end of an error about an unknown keyword: the nearest one, or all that are known."""
    elsewhere = _ELSEWHERE.get(unknown)
    by_case = {name.lower(): name for name in known}
    near = difflib.get_close_matches(unknown.lower(), list(by_case), 1, _CUTOFF)
    best = elsewhere if elsewhere in known else by_case[near[0]] if near else None
    if best is not None:
        return f"; did you mean {best!r}?"
    return f"; it has {', '.join(name for name in known if name not in ('self', 'cls'))}"


def taken_by(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among those given that a function takes."""
    return {name: given[name] for name in inspect.signature(function).parameters if name in given}


def outside() -> int:
    """Return the `stacklevel` with which a warning of the calling function shows the user's own line."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "ortgrad":
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level
