"""Names and patterns that users give, and the values of a model that they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ortgrad.graph.origins import Origins, is_generated, module_of_name

_MOST = 4  # names in a text


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern as in fnmatch."""
    return any(character in name for character in "*?[")


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a name or pattern stands for a value with these names."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def matched(pattern: str, names: Sequence[str], origins: Origins) -> list[str]:
    """Return the values that a name or pattern stands for: by their names in the file or in PyTorch.

    The full name of a value stands for this value alone.
    """
    if pattern in names:
        return [pattern]
    return [name for name in names if matches(pattern, origins.names(name))]


def left_out(pattern: str, found: Sequence[str], names: Sequence[str], origins: Origins) -> str | None:
    """Return a warning if a pattern misses weights of modules that it stands for, such as "enc.*"."""
    if not is_pattern(pattern) or not found:
        return None
    texts = []
    inside = [name for weight, names in origins.folded.items() if weight not in found for name in names]
    gone = [name for name in (*origins.removed, *inside) if fnmatchcase(name, pattern)]
    if gone:
        texts.append(f"the exporter has removed or folded {_listed(gone)}")
    if pattern.endswith("*"):
        # A weight of such a module may have a name that says nothing.
        others = [name for name in names if name not in found]
        read = [n for n in others if matches(pattern, [f"{each}." for each in origins.readers.get(n, ())])]
        if read:
            texts.append(f"nodes of this module also read {_listed(read)}, which it does not match")
        unsure = [n for n in others if n not in read and _may_belong(n, found, origins)]
        if unsure:
            texts.append(f"the file does not say to which module {_listed(unsure)} belonged")
    return f"the pattern {pattern!r} matches only {_listed(found)}: {'; '.join(texts)}" if texts else None


def _may_belong(name: str, found: Iterable[str], origins: Origins) -> bool:
    """Return whether a tensor of unknown origin is read by a module around one with some of these."""
    if name not in origins.unknown:
        return False
    inner = {module_of_name(other) for each in found for other in origins.names(each)}
    return any(
        module.startswith(f"{reader}.") for reader in origins.readers.get(name, ()) for module in inner
    )


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a question about the nearest names, for the end of an error message; "" if none is near."""
    wanted = name.strip("*")
    known = list(dict.fromkeys(n for n in names if n))
    by_case: dict[str, list[str]] = {}
    for each in known:
        by_case.setdefault(each.casefold(), []).append(each)
    near = list(by_case.get(wanted.casefold(), ()))
    for found in difflib.get_close_matches(wanted.casefold(), list(by_case), n=3, cutoff=0.4):
        near += [each for each in by_case[found] if each not in near]
    return f"; did you mean {', '.join(map(repr, near[:3]))}?" if near else ""


def not_in_file(pattern: str, origins: Origins) -> str:
    """Return the end of an error message if a pattern stands for parameters that the exporter has removed."""
    for weight, inside in origins.folded.items():
        if any(matches(pattern, [name]) for name in inside):
            return f"; the exporter has folded it into {weight!r}: {cure(origins)}"
    gone = [name for name in origins.removed if matches(pattern, [name])]
    return f"; the exporter has removed {_listed(gone)}: {cure(origins)}" if gone else ""


def cure(origins: Origins) -> str:
    """Return how to export a PyTorch module so that its parameters stay as they are."""
    if origins.exporter == "dynamo":
        return "export by torch.onnx.export(..., dynamo=True, optimize=False)"
    return (
        "export by torch.onnx.export(..., dynamo=True, optimize=False), or with dynamo=False, "
        "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False"
    )


def describe_changes(names: Iterable[str], origins: Origins) -> str | None:
    """Return a warning about parameters that are not PyTorch's, although they have its names."""
    names = [*names]
    texts = []
    # These are named in full: nothing else says which layers now train together.
    merged = [f"{', '.join(map(repr, origins.merged[n]))} (now {n!r})" for n in names if n in origins.merged]
    if merged:
        texts.append(f"equal tensors were merged into one, which has one gradient: {'; '.join(merged)}")
    copies: dict[str, list[str]] = {}
    for copy, first in origins.split.items():
        if copy in names or first in names:
            copies.setdefault(first, [first]).append(copy)
    if copies:
        split = [
            f"{' and '.join(map(repr, each))} of {_in_pytorch(n, origins)!r}" for n, each in copies.items()
        ]
        texts.append(f"copies of one tensor are now separate: {'; '.join(split)}")
    folded = [name for name in names if name in origins.folded]
    if folded:
        by = list(dict.fromkeys(inside for name in folded for inside in origins.folded[name]))
        what = f" ({_listed(by)})" if by else ""
        shown = [_in_pytorch(name, origins) for name in folded]
        texts.append(f"batch normalizations{what} were folded into {_listed(shown)}")
    computed = [f"{n!r} from {_listed(origins.computed[n])}" for n in names if n in origins.computed]
    if computed:
        shown = _shortened(computed)
        texts.append(f"parameters were replaced by what is computed from them: {'; '.join(shown)}")
    unknown = [n for n in names if n in origins.unknown]
    if unknown:
        texts.append(f"the file does not say from what {_listed(unknown)} {_was(unknown)} computed")
    modules = {module_of_name(other) for name in names for other in origins.names(name)}
    gone = [name for name in origins.removed if module_of_name(name) in modules]
    if gone:
        texts.append(f"{_listed(gone)} {_are(gone)} not in the file any more")
    if not texts:
        return None
    return (
        "some parameters of this file are not those of the PyTorch module, because its exporter has changed "
        f"them. {'. '.join(t[0].upper() + t[1:] for t in texts)}. To keep them, {cure(origins)}"
    )


def _in_pytorch(name: str, origins: Origins) -> str:
    return next((each for each in origins.names(name) if not is_generated(each)), name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(_shortened([*map(repr, names)]))


def _shortened(texts: list[str]) -> list[str]:
    if len(texts) <= _MOST + 1:
        return texts
    return [*texts[:_MOST], f"and {len(texts) - _MOST} more"]


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
