"""Texts of errors in the words of the command line: `--wrt` instead of `wrt=`."""

from __future__ import annotations

import re

# Arguments of functions that have another name on the command line.
_OTHERS = {
    "patterns": "--wrt",
    "requires_grad": "--wrt",
    "output": "--loss-output",
    "evaluate": "--eval",
    "straight_through=False": "--no-straight-through",
    "straight_through=True": "--straight-through",
}
_SAME = ("wrt", "of", "exclude", "feeds", "target", "axis", "kernels", "schedule", "warmup", "loss", "metric")
# Where these stand alone they can mean nothing else.
_LONG = (
    "accumulate",
    "batch_size",
    "checkpoint_every",
    "clip_norm",
    "learning_rate",
    "weight_decay",
    "per_node",
)
_QUOTED = re.compile(r"""('[^']*'|"[^"]*")""")
_WHOLE = re.compile(r"\bstraight_through=(?:True|False)")
_ASSIGNED = re.compile(rf"\b({'|'.join((*_OTHERS, *_SAME, *_LONG)).replace('=', '.')})=[ ]?")
_ALONE = re.compile(rf"(?<![\w.-])({'|'.join(_LONG)})(?![\w.=-])")
_NAMED = re.compile(r"\b(?:in|as) (wrt|requires_grad|of)\b|`(wrt|of)`")


def for_command_line(text: str) -> str:
    """Return the text of an error with options instead of keyword arguments; what is quoted stays.

    >>> from ortgrad.cli.wording import for_command_line
    >>> for_command_line("wrt='X' is not a value of the model")
    "--wrt 'X' is not a value of the model"
    """
    parts = _QUOTED.split(text)
    # What is quoted is at odd places.
    return "".join(part if i % 2 else _translated(part) for i, part in enumerate(parts)).rstrip(" ")


def _translated(text: str) -> str:
    text = _WHOLE.sub(lambda found: _OTHERS[found[0]], text)
    text = _ASSIGNED.sub(lambda found: f"{_option(found[1])} ", text)
    text = _NAMED.sub(lambda found: f"with {_option(found[1])}" if found[1] else _option(found[2]), text)
    return _ALONE.sub(lambda found: _option(found[1]), text)


def _option(name: str) -> str:
    return _OTHERS.get(name) or f"--{name.replace('_', '-')}"
