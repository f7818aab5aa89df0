"""The parameters of a model: what a person would train."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import onnx

from ortgrad.errors import NameNotFoundError
from ortgrad.graph.loading import ModelLike, judging, load_model
from ortgrad.graph.protos import FLOATS
from ortgrad.keywords import checked
from ortgrad.training.linear_models import open_linear_models

Patterns = str | Sequence[str] | None


@checked
def parameters(model: ModelLike, patterns: Patterns = None, *, exclude: Patterns = None) -> list[str]:
    """Return the names of the parameters, in the order of the file.

    Parameters are the floating-point weights that `build_gradient_model` differentiates by default: not
    scalars, running statistics, ratios, bounds and scales of quantization. `patterns` and `exclude` are names
    or patterns as in fnmatch, one or several. The full name of a floating-point initializer also stands for
    one that is no parameter by default. A pattern that matches nothing is an error.

    >>> import onnx
    >>> from ortgrad.training import parameters
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y)
    ...     <float[2, 1] fc_weight = {1, 2}, float[1] fc_bias = {0}>
    ...     { z = MatMul(x, fc_weight) y = Add(z, fc_bias) }''')
    >>> parameters(model)
    ['fc_weight', 'fc_bias']
    >>> parameters(model, "fc_*", exclude="*_bias")
    ['fc_weight']
    """
    proto = open_linear_models(load_model(model))
    found = _default(proto)
    if patterns is not None:
        others = {t.name for t in proto.graph.initializer if t.data_type in FLOATS} - set(found)
        named = [name for name in _listed(patterns) if name in others]
        chosen = {*named, *matching("patterns", set(_listed(patterns)) - set(named), found)}
        found = [name for name in (*found, *named) if name in chosen]
    if exclude is not None:
        left_out = matching("exclude", _listed(exclude), found)
        found = [name for name in found if name not in left_out]
    return list(dict.fromkeys(found))


def matching(argument: str, patterns: Iterable[str], names: Sequence[str]) -> set[str]:
    """Return the names that match one of the patterns; raises NameNotFoundError for a pattern without any."""
    result: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            near = difflib.get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise NameNotFoundError(f"{argument}={pattern!r} matches no parameter of the model{hint}")
        result.update(found)
    return result


def _listed(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _default(proto: onnx.ModelProto) -> list[str]:
    from ortgrad.autodiff.targets import find_parameters  # onnx-ir is slow to import
    from ortgrad.graph.serialization import read
    from ortgrad.passes.attach import is_body
    from ortgrad.passes.fold_ifs import fold_ifs
    from ortgrad.passes.inline import inline
    from ortgrad.passes.resolve_sequences import resolve_sequences
    from ortgrad.passes.tidy import sort
    from ortgrad.pipelines.opening import OPENING, run

    with judging(proto):
        model = inline(read(proto), lambda function: not is_body(function))
        model = run(model, *OPENING, resolve_sequences, fold_ifs, resolve_sequences, sort)
        return find_parameters(model, proto)
