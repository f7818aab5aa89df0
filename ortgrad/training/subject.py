"""What is trained: the forward model as it is trained, and its parameters with their settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from ortgrad.errors import TrainingModelError
from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.training.half_precision import in_single_precision
from ortgrad.training.linear_models import linear_parameters, open_linear_models, why_none
from ortgrad.training.optimizers.rules import AnyOptimizer
from ortgrad.training.outside import with_weights_outside
from ortgrad.training.selection import Patterns, all_parameters, selected, settings_of
from ortgrad.training.statistics import separate_statistics, warn_of_merged

# Learning rate and weight decay.
Setting = tuple[float, float]


@dataclass(frozen=True)
class Subject:
    """A model to train. All names are those of parameters."""

    # The model as it was loaded.
    loaded: onnx.ModelProto
    # The same with all trained weights as initializers of single or double precision.
    model: onnx.ModelProto
    # The model into which the trained parameters are written.
    source: ModelLike
    # All parameters of the model, also those that are not trained.
    known: Sequence[str]
    # The trained parameters; those with the same settings are adjacent.
    trained: Sequence[str]
    settings: Mapping[str, Setting]


def subject_of(
    model: ModelLike,
    wrt: Patterns,
    exclude: Patterns,
    optimizer: AnyOptimizer,
    groups: Mapping[str, Mapping[str, float]],
) -> Subject:
    """Return what is to be trained; see `Trainer` for the arguments."""
    loaded = load_model(model)
    known = all_parameters(loaded)
    names = selected(loaded, known, wrt, exclude)
    if not names:
        raise TrainingModelError(f"the model has no parameters to train{why_none(loaded)}")
    settings = settings_of(loaded, names, optimizer, groups)
    places = {setting: place for place, setting in enumerate(dict.fromkeys(settings.values()))}
    linear = linear_parameters(loaded)
    outside = with_weights_outside(loaded, [name for name in names if name not in linear])
    base, added = separate_statistics(outside, names)
    warn_of_merged(loaded, names)
    return Subject(
        loaded,
        in_single_precision(open_linear_models(base)),
        # Functions are inlined, so that the weights in them can be set.
        base if loaded.functions or added else model,
        known,
        sorted(names, key=lambda name: places[settings[name]]),
        settings,
    )


class Original:
    """The model into which trained parameters are written, and what tells whether its file has changed."""

    def __init__(self, source: ModelLike) -> None:
        self.source = source
        self._version = self._present_version()

    def _present_version(self) -> tuple[int, int] | None:
        """Return what tells whether a file has changed; None if it is not a file or does not exist."""
        if not isinstance(self.source, (str, os.PathLike)):
            return None
        try:
            found = os.stat(self.source)
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    @property
    def is_changed(self) -> bool:
        """Whether the file was changed or removed."""
        return self._present_version() != self._version

    def is_at(self, path: os.PathLike[str]) -> bool:
        """Return whether a file is the one from which the model was read."""
        if not isinstance(self.source, (str, os.PathLike)):
            return False
        return os.path.exists(path) and os.path.exists(self.source) and os.path.samefile(path, self.source)
