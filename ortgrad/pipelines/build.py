"""build_gradient_model: adds the backward graph to a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from ortgrad.errors import NameNotFoundError, ParameterWarning
from ortgrad.graph.exporters import read_origins
from ortgrad.graph.feeds import checked_feeds
from ortgrad.graph.loading import ModelLike, diagnosing, load_model
from ortgrad.graph.matching import describe_changes
from ortgrad.graph.metadata import is_built, names_in
from ortgrad.keywords import checked, outside
from ortgrad.pipelines.stops import warn_about_stops
from ortgrad.threads import forks_wait


@checked
def build_gradient_model(
    model: ModelLike,
    *,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    straight_through: bool = True,
    feeds: Mapping[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """Return a model with the same outputs and, for every name in `wrt`, the gradient `<name>_grad`.

    `wrt` names inputs, initializers or intermediate values. A name that is not in the model may be the one
    that a weight has in PyTorch, where the file tells it, or a pattern for names of both kinds (`"layer4.*"`,
    see fnmatch): it stands for the inputs and parameters that it matches, else for other constants, else for
    intermediate values. The default is all parameters. Those are the parameters of the module, if PyTorch's
    exporter has written the file, and otherwise the floating-point weights (initializers and Constant nodes,
    also inside subgraphs) without scalars. The statistics of BatchNormalization and settings of operators
    (scales, ratios, bounds, exponents) are not among them. Weights in `wrt` become inputs with default
    values, so that they can be fed. A ParameterWarning says which of them the exporter has merged or changed.

    `of` names outputs or intermediate values (default: the first floating-point output). A single scalar is
    seeded with 1; otherwise the model gets an input `<name>_grad` for each. Where a name is taken, `_2` is
    appended. A value that does not influence `of` has a gradient of zeros. So has a value if every path to
    `of` contains an operator without a gradient, and a StoppedGradientWarning is issued.

    Quantized models have straight-through gradients: rounding counts as the identity, and what is outside of
    the range has a gradient of 0. With `straight_through=False`, nodes that need them are refused.

    Some gradients need the number of dimensions of a value. Where the model does not tell it, it is that in a
    run of the model on `feeds`, arrays for all inputs by name. The built model checks it in every run.

    The `metadata_props` record what was built: `ortgrad.version`, and `ortgrad.wrt` and `ortgrad.of` as JSON
    lists of names. Raises UnsupportedGradientError, which lists all nodes that cannot be differentiated.

    >>> import onnx, ortgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x, float[3, 2] w) => (float loss)
    ...     { y = MatMul(x, w) loss = ReduceMean<keepdims = 0>(y) }''')
    >>> backward = ortgrad.build_gradient_model(model, wrt=["x", "w"], of="loss")
    >>> [value.name for value in backward.graph.output]
    ['loss', 'x_grad', 'w_grad']
    """
    with forks_wait():
        from ortgrad.pipelines.backward_graph import build  # onnx-ir is slow to import

    proto = load_model(model)
    given = None if feeds is None else checked_feeds(proto, feeds)
    with forks_wait(), diagnosing(proto):
        built, stopped, partial = build(
            proto, names_of("wrt", wrt), names_of("of", of), straight_through, given
        )
    warn_about_stops(stopped)
    changed = None if is_built(proto) else describe_changes(names_in(built)[0], read_origins(proto))
    for text in (*partial, *([changed] if changed else [])):
        warnings.warn(text, ParameterWarning, stacklevel=outside())
    return built


def names_of(argument: str, names: str | Sequence[str] | None) -> list[str] | None:
    """Return `wrt` or `of` as a list of names; None if it is None."""
    if names is None:
        return None
    # Without duplicates, in the order given.
    listed = list(dict.fromkeys([names] if isinstance(names, str) else names))
    if not listed:
        raise NameNotFoundError(f"{argument} names nothing: name at least one value, or leave {argument} out")
    return listed
