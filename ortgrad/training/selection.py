"""The parameters of a model, which are trained by default."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import onnx

from ortgrad.errors import NameNotFoundError, ParameterWarning, TrainingError
from ortgrad.graph.exporters import read_origins
from ortgrad.graph.loading import ModelLike, diagnosing, load_model
from ortgrad.graph.matching import left_out, matched, nearest, not_in_file
from ortgrad.graph.origins import Origins
from ortgrad.graph.protos import FLOATS
from ortgrad.keywords import checked, outside
from ortgrad.training.linear_models import open_linear_models
from ortgrad.training.lora_sites import adapter_names
from ortgrad.training.optimizers.rules import AnyOptimizer
from ortgrad.training.statistics import warn_of_merged

Patterns = str | Sequence[str] | None


@checked
def parameters(model: ModelLike, patterns: Patterns = None, *, exclude: Patterns = None) -> list[str]:
    """Return the names of the parameters, in the order of the file.

    In a file that PyTorch has exported, these are the parameters of the module, learnable scalars too, as far
    as they influence an output. In others they are the initializers with at least one dimension and the
    Constant nodes of more than one element. Running statistics, ratios, bounds, scales of quantization, and
    constants that only become integers are never among them.

    `patterns` and `exclude` are names or patterns as in fnmatch, one or several, for the names in the file
    and for those in PyTorch, where the exporter has renamed a weight and the file tells its name. The full
    name of a floating-point initializer also selects one that is not a parameter by default. A pattern that
    matches nothing is an error. A ParameterWarning says which parameters the exporter has merged or changed,
    and which a pattern for a module (`"encoder.*"`) does not match. With LoRA adapters, the default is
    these alone.

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
    proto = load_model(model)
    found = selected(proto, all_parameters(proto), patterns, exclude)
    warn_of_merged(proto, found)
    return found


def selected(
    proto: onnx.ModelProto, known: Sequence[str], patterns: Patterns = None, exclude: Patterns = None
) -> list[str]:
    """Return the parameters among `known` that are chosen; see `parameters`."""
    proto, found = open_linear_models(proto), list(known)
    if patterns is None:
        # Weights that have adapters are frozen.
        found = [name for pair in adapter_names(found).values() for name in pair] or found
    origins = read_origins(proto)
    if patterns is not None:
        others = {t.name for t in proto.graph.initializer if t.data_type in FLOATS} - set(found)
        listed = _listed(patterns)
        named = [name for name in listed if name in others]
        rest = [name for name in listed if name not in others]
        chosen = {*named, *matching("patterns", rest, found, origins)}
        found = [name for name in (*found, *named) if name in chosen]
    if exclude is not None:
        left = matching("exclude", _listed(exclude), found, origins)
        found = [name for name in found if name not in left]
    return list(dict.fromkeys(found))


def matching(argument: str, patterns: Iterable[str], names: Sequence[str], origins: Origins) -> set[str]:
    """Return the names that match one of the patterns; raises NameNotFoundError for a pattern without any."""
    result: set[str] = set()
    for pattern in patterns:
        found = matched(pattern, names, origins)
        if not found:
            known = [other for name in names for other in origins.names(name)]
            raise NameNotFoundError(
                f"{argument}={pattern!r} matches no parameter of the model{nearest(pattern, known)}"
                f"{not_in_file(pattern, origins)}"
            )
        warning = left_out(pattern, found, names, origins)
        if warning is not None:
            warnings.warn(f"{argument}: {warning}", ParameterWarning, stacklevel=outside())
        result.update(found)
    return result


def _listed(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def all_parameters(proto: onnx.ModelProto) -> list[str]:
    """Return the names of all parameters, also of those that are not trained by default."""
    from ortgrad.graph.bodies import is_body
    from ortgrad.graph.serialization import read
    from ortgrad.passes import run
    from ortgrad.passes.fold_ifs import fold_ifs
    from ortgrad.passes.inline import inline
    from ortgrad.passes.resolve_sequences import resolve_sequences
    from ortgrad.passes.tidy import sort
    from ortgrad.pipelines.opening import OPENING
    from ortgrad.pipelines.targets import find_parameters  # onnx-ir is slow to import

    proto = open_linear_models(proto)
    with diagnosing(proto):
        model = inline(read(proto), lambda function: not is_body(function))
        model = run(model, *OPENING, resolve_sequences, fold_ifs, resolve_sequences, sort)
        return find_parameters(model, proto)


def settings_of(
    proto: onnx.ModelProto,
    names: Sequence[str],
    optimizer: AnyOptimizer,
    groups: Mapping[str, Mapping[str, float]],
) -> dict[str, tuple[float, float]]:
    """Return learning rate and weight decay of every parameter; `groups` has others by pattern."""
    origins = read_origins(proto)
    chosen = {
        name: {"learning_rate": optimizer.learning_rate, "weight_decay": optimizer.weight_decay}
        for name in names
    }
    for pattern, options in groups.items():
        found = matching("groups", [pattern], names, origins)
        unknown = set(options) - {"learning_rate", "weight_decay"}
        if unknown or not all(math.isfinite(value) and value >= 0 for value in options.values()):
            raise TrainingError(
                f"groups={{{pattern!r}: {dict(options)}}}: a group has a learning_rate and a weight_decay"
            )
        for name in found:
            chosen[name].update(options)
    return {name: (each["learning_rate"], each["weight_decay"]) for name, each in chosen.items()}
