"""What a Trainer stores in its checkpoints to continue as if it had never stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ortgrad.errors import CheckpointError, TrainingModelError
from ortgrad.training.checkpoint import Checkpoint
from ortgrad.training.results import Epoch
from ortgrad.training.state import TrainingState, describe

GROUP = "group0"
PROPERTY = "ortgrad.trainer"
VERSION = 1


@dataclass
class Place:
    """The progress of a training; part of a checkpoint."""

    # The steps before this training began.
    start: int = 0
    epoch: int = 0
    # Batches of the epoch that are done.
    batch: int = 0
    # The sums over the epoch so far.
    loss: float = 0.0
    samples: float = 0
    # What decides which batches these are: batch_size, shuffle, and the number of batches.
    batches: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    best: float | None = None
    waited: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[Epoch] = field(default_factory=list)


def read_place(found: Checkpoint, path: Any, optimizer: str, seed: int) -> Place:
    """Return the progress of a checkpoint's training; raises CheckpointError if that is another training."""
    text = found.properties.get(PROPERTY)
    try:
        if not isinstance(text, str):
            raise KeyError(PROPERTY)
        content = json.loads(text)
        version, kind, begun = content["version"], content["optimizer"], content["seed"]
        place = Place(**content["place"])
        place.history = [Epoch(**record) for record in content["place"]["history"]]
        found.optimizer[GROUP]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not the checkpoint of a Trainer") from error
    if version != VERSION:
        raise CheckpointError(f"{path} is of version {version}; this release reads version {VERSION}")
    if kind != optimizer or begun != seed:
        raise CheckpointError(
            f"{path} was trained with the optimizer {kind} and the seed {begun}, not {optimizer} and {seed}"
        )
    return place


def matched(
    state: TrainingState, found: Checkpoint, path: Any, momentums: Sequence[str]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of an array of the state and the one in a checkpoint; raises an error if one is missing."""
    given = {**found.trainable, **found.frozen}
    trained = set(state.trainable.arrays)
    if set(given) != set(state.names) or set(found.trainable) != trained:
        different = sorted(set(found.trainable) ^ trained) or sorted(set(given) ^ set(state.names))
        raise TrainingModelError(f"{path} has other parameters than the model: {different[0]!r}")
    pairs = [(f"parameter {name!r}", state.parameter(name), given[name]) for name in state.names]
    saved = found.optimizer[GROUP].momentums
    arenas = state.group(GROUP, momentums).momentums
    for name in trained if momentums else ():
        if set(saved.get(name, {})) != set(momentums):
            raise TrainingModelError(f"{path} has other optimizer state for parameter {name!r}")
        pairs += [(f"{m} of {name!r}", arenas[m][name], saved[name][m]) for m in momentums]
    for what, ours, theirs in pairs:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise TrainingModelError(f"{what} is {describe(theirs)} in {path}, in the model {describe(ours)}")
        yield ours, theirs
