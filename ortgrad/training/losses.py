"""add_loss: a model with a loss of its output and a target."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

from ortgrad.errors import ArgumentTypeError, OrtgradError, TrainingError, TrainingModelError
from ortgrad.graph.loading import ModelLike, load_model, one_line
from ortgrad.graph.matching import nearest
from ortgrad.graph.protos import copy_of, keep, replace
from ortgrad.keywords import checked
from ortgrad.training import loss_nodes, protos
from ortgrad.training.linear_models import open_linear_models
from ortgrad.training.loss_nodes import CustomLoss
from ortgrad.training.scores import output_of, scores_of

if TYPE_CHECKING:
    import onnx_ir as ir

    from ortgrad.graph.recorder import Recorder

LOSSES = ("cross-entropy", "mse", "l1", "huber", "bce")
Loss = str | Callable[..., Any] | CustomLoss
# The element type and the shape of an input; None is a shape of any rank.
Declaration = tuple[Any, Sequence[int | str | None] | None]


@checked
def add_loss(
    model: ModelLike,
    loss: Loss,
    *,
    output: str | None = None,
    target: str | None = None,
    name: str = "loss",
    reduction: str | None = None,
    weight: Any = None,
    pos_weight: Any = None,
    ignore_index: int | None = None,
    axis: int | None = None,
    delta: float | None = None,
    types: Mapping[str, Declaration] | None = None,
) -> onnx.ModelProto:
    """Return a copy of the model with a further output `name`: the loss of an output and a target.

    | loss | what |
    | --- | --- |
    | "cross-entropy" | of scores and an input `labels` of int64. `weight` has a factor per class, labels equal to `ignore_index` do not count. `axis` is the dimension of the classes; by default it is found from the shapes: 1 in (N, C) and (N, C, ...), the last one in (N, S, V) |
    | "mse", "l1", "huber" | of differences from an input `target`; `delta` is Huber's (default: 1) |
    | "bce" | binary cross entropy of scores (logits) and an input `target`, with `weight` and `pos_weight` |
    | a function | `loss(op, output, target)` records nodes with `op` and returns a scalar. A parameter with the name of a value of the model is this value, and the first one is the output if it has no such name. Others become inputs of the element type and shape in `types`; without that, `fit` looks at the data, and otherwise they are like the output, or integers or booleans if an operator takes nothing else |
    | a block of onnxblock | called with the names of output and, if given, target |

    `output` is the first floating-point output unless it is named. If it has probabilities (of a Softmax or a
    Sigmoid, or in the maps of a classifier of scikit-learn), the loss is computed from their scores. `target`
    is the name of the target, which becomes an input unless the model has it. `reduction` is "mean" (the
    default), "sum" or "none". An option of another loss is an error.

    >>> import onnx
    >>> from ortgrad.training import add_loss
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }''')
    >>> with_loss = add_loss(model, "cross-entropy")
    >>> [value.name for value in with_loss.graph.input], [value.name for value in with_loss.graph.output]
    (['x', 'labels'], ['y', 'loss'])
    >>> def robust(op, output, target):
    ...     return op.ReduceMean(op.Log(1.0 + (output - target) * (output - target)), keepdims=0)
    >>> [value.name for value in add_loss(model, robust).graph.input]
    ['x', 'target']
    """  # noqa: E501 (a table)
    options = options_of(locals())
    return with_loss(load_model(model), loss, output, target, name, options)[0]


def with_loss(
    model: onnx.ModelProto,
    loss: Loss,
    output: str | None,
    target: str | None,
    name: str,
    given: Mapping[str, Any],
) -> tuple[onnx.ModelProto, str, int | None]:
    """Return a copy of the model with a loss, the name of its scores, and the dimension of the classes."""
    if not callable(loss) and not isinstance(loss, CustomLoss) and loss not in LOSSES:
        near = nearest(str(loss), [*LOSSES, *(value.name for value in model.graph.output)])
        raise TrainingError(
            f"loss={loss!r} is not a loss: it must be one of {', '.join(LOSSES)}, a function or a block{near}"
        )
    check_options(loss, given)
    options = dict(given)
    proto = protos.open_to_losses(copy_of(open_linear_models(model)))
    if protos.exists(proto, name):
        raise TrainingModelError(f"the model has a value {name!r} already: give the loss another name")
    source, axis = output_of(proto, output), options.pop("axis", None)
    if isinstance(loss, str):
        usual = target or target_name(loss)
        source, axis = scores_of(proto, loss, source, axis)
        if loss == "cross-entropy" and axis is None:
            axis = class_axis(proto, source, usual)
        nodes = _named(loss, axis, **options)
        _refuse_computed(proto, usual)
        return _with_nodes(proto, lambda made: nodes.add(made, source, usual), name), source, axis
    if isinstance(loss, CustomLoss):
        _refuse_computed(proto, target)
        names = [source] if target is None else [source, target]
        return _with_nodes(proto, lambda made: loss.add_to_model(made, *names), name), source, None
    assert callable(loss)
    proto = protos.converted(proto)
    function = _Function(loss, source, target, name)
    return _recorded(proto, function, options.get("types", {})), source, None


def target_name(loss: str) -> str:
    """Return the name of the input with the target."""
    return "labels" if loss == "cross-entropy" else "target"


# By option: the losses that have it.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "reduction": LOSSES,
    "weight": ("cross-entropy", "bce"),
    "pos_weight": ("bce",),
    "ignore_index": ("cross-entropy",),
    "axis": ("cross-entropy",),
    "delta": ("huber",),
    "types": ("a function",),
}


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of losses among arguments, as far as they are not None."""
    return {name: given[name] for name in _OPTIONS if given[name] is not None}


def check_options(loss: Loss, given: Mapping[str, Any]) -> None:
    """Raise TrainingError for an option that the loss does not have."""
    if isinstance(loss, CustomLoss):
        kind = "a block, which has options of its own"
    elif isinstance(loss, str):
        kind = loss if loss in LOSSES else f"{loss!r}, a value of the model"
    else:
        kind = "a function"
    for option in given:
        if kind not in _OPTIONS[option]:
            raise TrainingError(f"{option} is for {' and '.join(_OPTIONS[option])}, not for {kind}")


def _named(
    loss: str,
    axis: int | None,
    *,
    reduction: str = "mean",
    weight: Any = None,
    pos_weight: Any = None,
    ignore_index: int | None = None,
    delta: float = 1.0,
) -> loss_nodes.LossNodes:
    """Return the loss that has a name."""
    if loss == "cross-entropy":
        return loss_nodes.CrossEntropy(weight, reduction, ignore_index, axis)
    if loss == "bce":
        return loss_nodes.BinaryCrossEntropy(weight, reduction, pos_weight)
    if loss == "huber":
        return loss_nodes.Huber(reduction, delta)
    return loss_nodes.SquaredError(reduction) if loss == "mse" else loss_nodes.AbsoluteError(reduction)


def class_axis(model: onnx.ModelProto, source: str, labels: str) -> int | None:
    """Return the dimension of the classes, or None if existing labels tell it."""
    found = protos.find_value(model, source).type.tensor_type
    if protos.exists(model, labels) or not found.HasField("shape"):
        return None
    dims = found.shape.dim
    if len(dims) <= 2:
        return None
    fixed = [i for i in (1, len(dims) - 1) if dims[i].HasField("dim_value")]
    if len(fixed) == 1:
        # The number of classes is known, that of tokens or pixels is not.
        return fixed[0]
    if len(dims) > 3:
        return 1
    shape = [dim.dim_value or dim.dim_param or "?" for dim in dims]
    raise TrainingModelError(
        f"the scores {source!r} have the shape {shape}: say which dimension is that of the classes, "
        "axis=1 or axis=-1"
    )


def _refuse_computed(proto: onnx.ModelProto, target: str | None) -> None:
    """Raise TrainingModelError if the target is a value of the model that is not fed."""
    if target is not None and protos.exists(proto, target):
        fed = {value.name for value in proto.graph.input}
        if target not in fed:
            raise TrainingModelError(f"the model computes {target!r}: give the target another name, target=")


def _with_nodes(proto: onnx.ModelProto, add: Callable[[onnx.ModelProto], str], name: str) -> onnx.ModelProto:
    """Return the model with a loss that `add` adds in place, and whose name it returns."""
    outputs = [copy_of(value) for value in proto.graph.output]
    try:
        found = add(proto)
        protos.check(proto)
        made = protos.with_inferred(proto)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise TrainingModelError(f"the loss does not fit the model: {error}") from error
    return _finished(made, outputs, found, name)


def _finished(
    model: onnx.ModelProto, outputs: Sequence[onnx.ValueInfoProto], found: str, name: str
) -> onnx.ModelProto:
    """Name the loss, and make it the last output."""
    graph = model.graph
    kind = next((v.type for v in (*graph.value_info, *graph.output) if v.name == found), None)
    read = {n for node in graph.node for n in node.input} | {value.name for value in outputs}
    producer = next((node for node in graph.node if found in node.output), None)
    if producer is not None and found not in read:
        producer.output[list(producer.output).index(found)] = name
    else:
        graph.node.append(helper.make_node("Identity", [found], [name], name=name))
    keep(graph.value_info, lambda value: value.name != found)
    replace(graph.output, [*outputs, onnx.ValueInfoProto(name=name, type=kind)])
    return model


class Suggested(dict[str, Declaration]):
    """Declarations of inputs of which the `types` that the user gave are fixed, and the others suggested."""

    def __init__(self, types: Mapping[str, Declaration], given: Mapping[str, Declaration]) -> None:
        super().__init__({**types, **given})
        self.given = given


class _Function(NamedTuple):
    """A loss function: what it is called with, and the name of the loss."""

    loss: Callable[..., Any]
    source: str
    target: str | None
    name: str


def _recorded(
    proto: onnx.ModelProto, function: _Function, types: Mapping[str, Declaration]
) -> onnx.ModelProto:
    """Return the model with the nodes that a function of `op` records.

    Inputs whose type nobody has said are what the data suggests, else like the output, else integers or
    booleans: whichever the operators that read them take.
    """
    fixed = types.given if isinstance(types, Suggested) else types
    new = new_inputs(proto, function.loss, function.target)
    unknown = [each for each in fixed if each not in new]
    if unknown:
        known = ", ".join(new) or "it has none"
        raise TrainingError(
            f"types declares {unknown[0]!r}, which is not a new input of the loss ({known})"
            f"{nearest(unknown[0], new)}"
        )
    new = [each for each in new if each not in fixed]
    attempts = [dict(types)] if isinstance(types, Suggested) else []
    for kinds in sorted(itertools.product((None, np.int64, np.bool_), repeat=len(new)), key=_others):
        chosen = {each: (kind, None) for each, kind in zip(new, kinds, strict=True) if kind is not None}
        attempts.append({**fixed, **chosen})
    first: onnx.ModelProto | OrtgradError | None = None
    for attempt in attempts:
        made: onnx.ModelProto | OrtgradError
        try:
            made = _record(proto, function, attempt)
        except (OrtgradError, onnx.shape_inference.InferenceError) as error:
            made = error if isinstance(error, OrtgradError) else TrainingModelError(one_line(error))
        else:
            if protos.has_valid_types(made):
                return made
        first = made if first is None else first
    if isinstance(first, OrtgradError):
        raise first
    assert first is not None
    return first


def _others(kinds: Sequence[Any]) -> int:
    """Return how many types differ from that of the output."""
    return sum(kind is not None for kind in kinds)


def new_inputs(proto: onnx.ModelProto, loss: Callable[..., Any], target: str | None) -> list[str]:
    """Return the parameters of a loss function that become inputs of the model, in their order."""
    names = _parameters_of(loss)
    if len(names) > 1 and target is not None:
        names[1] = target
    return [each for i, each in enumerate(names) if i > 0 and not protos.exists(proto, each)]


def _record(proto: onnx.ModelProto, function: _Function, types: Mapping[str, Declaration]) -> onnx.ModelProto:
    """Return the model with the nodes of a loss function; its new inputs have these types."""
    import onnx_ir as ir  # slow to import

    from ortgrad.graph.names import Names
    from ortgrad.graph.recorder import Recorder
    from ortgrad.graph.serialization import read, write
    from ortgrad.graph.traversal import values_by_name
    from ortgrad.shapes.inference import infer_types

    loss, source, target, name = function
    model = read(protos.with_inferred(proto))
    infer_types(model)
    values = values_by_name(model.graph)
    op: Recorder = Recorder(model.opset_imports[""], Names.of(model), name)
    operands = []
    for i, parameter in enumerate(_parameters_of(loss)):
        if i == 1 and target is not None:
            parameter = target
        if parameter in values:
            operands.append(values[parameter])
        elif i == 0:
            operands.append(values[source])
        else:
            operands.append(_new_input(ir, model, parameter, types.get(parameter), values[source]))
    with op.arithmetic():
        result = loss(op, *operands)
    if not isinstance(result, ir.Value):
        raise ArgumentTypeError(f"the loss function returned a {type(result).__name__}, not a value of op")
    if result in model.graph.outputs:
        result = op.copy(result)
    model.graph.extend(op.nodes)
    found = result.name or ""
    outputs = [copy_of(value) for value in proto.graph.output]
    model.graph.outputs.append(result)
    return _finished(protos.with_inferred(write(model, proto)), outputs, found, name)


def _parameters_of(loss: Callable[..., Any]) -> list[str]:
    """Return the names of a function's positional parameters after `op`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [
        p.name
        for p in inspect.signature(loss).parameters.values()
        if p.kind in kinds and p.default is inspect.Parameter.empty
    ]
    if len(found) < 2:
        raise ArgumentTypeError("a loss function takes op and at least one value: loss(op, output, target)")
    return found[1:]


def _new_input(ir: Any, model: ir.Model, name: str, declared: Declaration | None, like: ir.Value) -> ir.Value:
    if declared is None:
        value = ir.Value(name=name, type=like.type, shape=like.shape)
    else:
        kind = ir.DataType.from_numpy(np.dtype(declared[0]))
        shape = None if declared[1] is None else ir.Shape(list(declared[1]))
        value = ir.Value(name=name, type=ir.TensorType(kind), shape=shape)
    model.graph.inputs.append(value)
    return value
