"""Names and patterns that users give, and the values of a model that they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ortgrad.graph.origins import Origins, module_of_name

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
    """Return a warning if a pattern that looks like a module matches only some of the module's weights."""
    module = pattern[:-2]
    if pattern[-2:] not in (".*", "/*") or not module or is_pattern(module) or not found:
        return None
    module = module.replace("/", ".").lstrip(".")
    read = [name for name in names if name not in found and _inside(module, origins.readers.get(name, ()))]
    gone = [name for name in origins.removed if name.startswith(f"{module}.")]
    texts = []
    if read:
        texts.append(f"nodes of this module also read {_listed(read)}, which it does not match")
    if gone:
        texts.append(f"{_listed(gone)} {_are(gone)} not in the file: the exporter has removed {_them(gone)}")
    if not texts:
        return None
    return f"the pattern {pattern!r} matches {len(found)} of the weights of a module: {'; '.join(texts)}"


def _inside(module: str, readers: Iterable[str]) -> bool:
    return any(reader == module or reader.startswith(f"{module}.") for reader in readers)


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
    """Return how to export a PyTorch module whose parameters shall stay as they are."""
    if origins.exporter == "dynamo":
        return "export by torch.onnx.export(..., dynamo=True, optimize=False)"
    return (
        "export by torch.onnx.export(..., dynamo=True, optimize=False), or with dynamo=False, "
        "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False"
    )


def describe_changes(names: Iterable[str], origins: Origins) -> str | None:
    """Return a warning about those of the parameters that are not PyTorch's, though named like them."""
    names = [*names]
    texts = []
    # These are named in full: which layers now train together is told nowhere else.
    merged = [f"{_listed(origins.merged[n], None)} (now {n!r})" for n in names if n in origins.merged]
    if merged:
        texts.append(f"equal tensors were merged into one, which has one gradient: {'; '.join(merged)}")
    split = [f"{origins.split[n]!r} (and {n!r})" for n in names if n in origins.split]
    if split:
        texts.append(f"copies of one tensor are now separate: {'; '.join(split)}")
    folded = [name for name in names if name in origins.folded]
    if folded:
        by = list(dict.fromkeys(inside for name in folded for inside in origins.folded[name]))
        what = f" ({_listed(by)})" if by else ""
        shown = [(origins.aliases.get(name) or [name])[0] if not by else name for name in folded]
        texts.append(f"batch normalizations{what} were folded into {_listed(shown)}")
    computed = [f"{n!r} from {_listed(origins.computed[n])}" for n in names if n in origins.computed]
    if computed:
        shown = _shortened(computed)
        texts.append(f"parameters were replaced by what is computed from them: {'; '.join(shown)}")
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


def _listed(names: Sequence[str], most: int | None = _MOST) -> str:
    return ", ".join(_shortened([*map(repr, names)], most))


def _shortened(texts: list[str], most: int | None = _MOST) -> list[str]:
    if most is None or len(texts) <= most + 1:
        return texts
    return [*texts[:most], f"and {len(texts) - most} more"]


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"
