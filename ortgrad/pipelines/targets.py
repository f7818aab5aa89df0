"""Resolution of the names and patterns in `wrt` and `of` to values of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.autodiff.rules import find_rule
from ortgrad.errors import ModelError, NameNotFoundError
from ortgrad.graph.exporters import read_origins
from ortgrad.graph.matching import is_pattern, left_out, matches, nearest, not_in_file
from ortgrad.graph.metadata import OF
from ortgrad.graph.names import Names
from ortgrad.graph.origins import Origins, is_generated, is_lifted
from ortgrad.graph.protos import all_graphs
from ortgrad.graph.traversal import (
    FLOAT_TYPES,
    all_nodes,
    dependencies,
    is_float_tensor,
    subgraphs,
    values_by_name,
)
from ortgrad.operators.call import EMPTY_PREFIX
from ortgrad.shapes.inference import infer_types

# Operands that are differentiable, also by onnx's schema, but are not trained as parameters.
_NO_PARAMETERS = {
    "BatchNormalization": (3, 4),
    "Pow": (1,),
    "RoiAlign": (1,),
    "RotaryEmbedding": (1, 2),
}
# Operators with operands that are settings if they are constants, but often parameters: exponents, states.
_LEARNED_OPERANDS = ("Pow", "GRU", "LSTM", "RNN")


def find_outputs(graph: ir.Graph, of: Sequence[str] | None) -> list[ir.Value]:
    """Return the values that `of` names; if it is None, the first output with a floating-point type."""
    if of is None:
        found = [value for value in graph.outputs if is_float_tensor(value)]
        if not found:
            near = _floats_behind(graph.outputs)
            advice = f", such as {near[0]!r}" if near else ""
            raise ModelError(
                f"the model has no floating-point output to differentiate; name a value in of{advice}"
            )
        return found[:1]
    values = values_by_name(graph)
    for name in of:
        if name not in values:
            raise NameNotFoundError(f"of={name!r} is not a value of the model{_where(name, graph, values)}")
        _require_float("of", values[name])
    return [values[name] for name in of]


def refuse_integers(model: ir.Model, of: Sequence[str] | None) -> None:
    """Raise the error of `find_outputs` early if the file declares outputs that are not floating-point."""
    declared = [v.dtype for v in model.graph.outputs if of is None or v.name in of]
    integers = [dtype is not None and dtype not in FLOAT_TYPES for dtype in declared]
    if all(integers) if of is None else any(integers):
        # Only for the error message, which suggests floating-point values.
        infer_types(model)
        find_outputs(model.graph, of)


def find_targets(
    model: ir.Model, wrt: Sequence[str] | None, source: onnx.ModelProto, outputs: Sequence[ir.Value] = ()
) -> tuple[list[ir.Value], list[str]]:
    """Return the values that `wrt` names; if it is None, the parameters of the model.

    A name in the model stands for that value. Any other name is one that PyTorch has for a weight, or, with
    *, ? or [, an fnmatch pattern for either kind of names: it stands for the inputs and parameters that it
    matches; if there are none, for other constants; if there are none either, for intermediate values.
    Weights in the result that are Constant nodes or inside a subgraph become initializers of the main graph,
    so that they can be fed. The second result has warnings about patterns that match a part of a module.
    """
    graph = model.graph
    origins = read_origins(source)
    hidden = _weights_in_subgraphs(graph, _defined(source.graph))
    parameters = _parameters(model, hidden, source, outputs, origins)
    partial: list[str] = []
    if wrt is None:
        if not parameters:
            raise ModelError(
                "the model has no parameters (scalars, statistics, constants, integers and their scales do "
                "not count); "
                "name what you want in wrt"
            )
        found = parameters
    else:
        values = values_by_name(graph)
        found = []
        for name in wrt:
            if name in values or name in hidden:
                found.append(values.get(name) or hidden[name])
                _require_float("wrt", found[-1])
            elif is_pattern(name) or name in origins.all_aliases():
                chosen = _matching(name, graph, parameters, origins)
                found += chosen
                warning = left_out(name, _names(chosen), _names(parameters), origins)
                partial += [warning] if warning else []
            else:
                near = _where(name, graph, (*values, *hidden, *origins.all_aliases()))
                raise NameNotFoundError(
                    f"wrt={name!r} is not a value of the model{near}{not_in_file(name, origins)}"
                )
    names = Names.of(model)
    return [_made_feedable(graph, value, names) for value in dict.fromkeys(found)], partial


def find_parameters(model: ir.Model, source: onnx.ModelProto) -> list[str]:
    """Return the names of the parameters of a model, which `source` is the file of."""
    if any(node.op_type == "CastLike" for node in all_nodes(model.graph)):
        infer_types(model)
    hidden = _weights_in_subgraphs(model.graph, _defined(source.graph))
    return _names(_parameters(model, hidden, source, (), read_origins(source)))


def scalar_parameters(source: onnx.ModelProto) -> list[str]:
    """Return the names of initializers without dimensions that the exporter calls parameters."""
    known = read_origins(source).parameters
    return [t.name for t in source.graph.initializer if not t.dims and known.get(t.name)]


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


def _parameters(
    model: ir.Model,
    hidden: dict[str, ir.Value],
    source: onnx.ModelProto,
    outputs: Sequence[ir.Value],
    origins: Origins,
) -> list[ir.Value]:
    """Return the floating-point weights that a gradient can reach, in the order of the file.

    Where PyTorch's exporters tell which tensors are parameters, those are meant, scalars too. Otherwise
    initializers with dimensions are, and Constant nodes of more than one element.
    """
    graph = model.graph
    reached, computed, settings = {*graph.outputs, *outputs}, {*graph.outputs, *outputs}, set[ir.Value]()
    _reach(graph, reached, model.opset_imports, origins, settings)
    # A bound or an initial state that the model computes has a gradient; one that is a constant is a setting.
    _reach(graph, computed, model.opset_imports, origins, None)
    reached |= computed - settings
    # In a built model, Constant nodes belong to the backward graph and weights are initializers.
    built = OF in model.metadata_props
    constants = [] if built else [n.outputs[0] for n in graph if n.op_type == "Constant" and not n.domain]
    found = [value for value in graph.initializers.values() if _is_weight(value, 0, origins)]
    found += [value for value in (*constants, *hidden.values()) if _is_weight(value, 1, origins)]
    # Shape inference does not keep the order of initializers.
    order = {tensor.name: i for i, tensor in enumerate(source.graph.initializer)}
    found.sort(key=lambda value: order.get(value.name or "", len(order)))
    return [value for value in found if value in reached]


def _is_weight(value: ir.Value, more_than: int, origins: Origins) -> bool:
    tensor, name = ir.convenience.get_const_tensor(value), value.name or ""
    if tensor is None or tensor.dtype not in FLOAT_TYPES or name.startswith(EMPTY_PREFIX):
        return False
    told = origins.parameters.get(name)
    generated = is_generated(name)
    if told is not None and (origins.exporter == "dynamo" or not told or not generated):
        return told and tensor.size > 0
    if is_lifted(name) or len(tensor.shape) == 0 or tensor.size <= max(more_than, int(generated)):
        return False
    return not (generated and _is_mask(tensor))


def _is_mask(tensor: ir.TensorProtocol) -> bool:
    """Return whether elements are minus infinity, or the lowest number, as in masks that are added."""
    array = tensor.numpy()
    lowest = array.min()
    least = ml_dtypes.finfo(array.dtype).min  # type: ignore[no-untyped-call]
    return bool(np.isneginf(lowest) or lowest == least)


def _reach(
    graph: ir.Graph,
    reached: set[ir.Value],
    opsets: dict[str, int],
    origins: Origins,
    settings: set[ir.Value] | None,
) -> None:
    """Add to `reached` the values that a gradient may reach from those in it.

    Operands that are not trained are not followed, and settings among them are added to `settings`; if that
    is None, the operands are followed unless they are settings.
    """
    for node in reversed(graph):
        rule = find_rule(node.op_type, node.domain)
        if not any(v in reached for v in node.outputs) or (rule is not None and rule.function is None):
            continue
        if _makes_integers(node):
            continue
        fixed = _fixed_operands(node, opsets)
        for i, value in enumerate(node.inputs):
            if value is None:
                continue
            if i not in fixed:
                reached.add(value)
            elif not _is_setting(_original(value), origins):
                if settings is None:
                    reached.add(value)
            elif settings is not None:
                settings.add(_original(value))
        for inner in subgraphs(node):
            reached.update(inner.outputs)
            _reach(inner, reached, opsets, origins, settings)


def _is_setting(value: ir.Value, origins: Origins) -> bool:
    """Return whether an operand such as a bound or an exponent is a constant, and no parameter."""
    name = value.name or ""
    if ir.convenience.get_const_tensor(value) is None:
        return False
    if not origins.parameters.get(name):
        return True
    if origins.exporter == "dynamo":
        return False
    # The older exporter does not tell parameters from buffers. Bounds and grids are rarely parameters.
    return is_generated(name) or any(use.node.op_type not in _LEARNED_OPERANDS for use in value.uses())


def _makes_integers(node: ir.Node) -> bool:
    """Return whether a node casts to a type without gradients."""
    if node.domain or node.op_type not in ("Cast", "CastLike"):
        return False
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int()) not in FLOAT_TYPES
    like = node.inputs[1]
    dtype = node.outputs[0].dtype or (None if like is None else like.dtype)
    return dtype is not None and dtype not in FLOAT_TYPES


def _original(value: ir.Value) -> ir.Value:
    """Return the value of which this one is a copy; exporters write copies of constants that are equal."""
    node = value.producer()
    while node is not None and node.op_type in ("Identity", "Cast") and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def decides_shapes(value: ir.Value, opsets: dict[str, int]) -> bool:
    """Return whether a floating-point value may determine the shape of an output, as in Resize."""
    return any(use.idx in _fixed_operands(use.node, opsets) for use in value.uses())


def _fixed_operands(node: ir.Node, opsets: dict[str, int]) -> Collection[int]:
    """Return the operands that are not trained: statistics, and what the schema calls not differentiable."""
    rule = find_rule(node.op_type, node.domain)
    if rule is not None and rule.scales is not None:
        # onnx calls operands of operators on integers not differentiable.
        return set(rule.scales_of(len(node.inputs)).values())
    version = opsets.get(node.domain, 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return ()
    declared = onnx.defs.get_schema(node.op_type, version, node.domain).inputs
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    fixed = [i for i, parameter in enumerate(declared) if parameter.differentiation_category == never]
    return {*fixed, *(_NO_PARAMETERS.get(node.op_type, ()) if not node.domain else ())}


def _weights_in_subgraphs(graph: ir.Graph, defined: Counter[str]) -> dict[str, ir.Value]:
    """Return the floating-point constants inside subgraphs by name, if the name is unique in the model."""
    found = {}
    for inner in graph.subgraphs():
        constants = [node.outputs[0] for node in inner if node.op_type == "Constant" and not node.domain]
        for value in (*inner.initializers.values(), *constants):
            tensor = ir.convenience.get_const_tensor(value)
            if tensor is not None and tensor.dtype in FLOAT_TYPES and defined[value.name or ""] == 1:
                found[value.name or ""] = value
    return found


def _defined(graph: onnx.GraphProto) -> Counter[str]:
    """Count how many values of a graph and its subgraphs have each name."""
    found: Counter[str] = Counter()
    for inner in all_graphs(graph):
        found.update({value.name for value in (*inner.input, *inner.initializer)})
        found.update(name for node in inner.node for name in node.output)
    return found


def _matching(
    pattern: str, graph: ir.Graph, parameters: Sequence[ir.Value], origins: Origins
) -> list[ir.Value]:
    for group in _groups(graph, parameters):
        found = [v for v in group if is_float_tensor(v) and matches(pattern, origins.names(v.name or ""))]
        if found:
            return found
    names = [other for name in values_by_name(graph) for other in origins.names(name)]
    raise NameNotFoundError(
        f"wrt={pattern!r} matches no floating-point value of the model{nearest(pattern, names)}"
        f"{not_in_file(pattern, origins)}"
    )


def _groups(graph: ir.Graph, parameters: Sequence[ir.Value]) -> Iterator[list[ir.Value]]:
    """Yield the groups of values that a pattern is matched against, in order of precedence."""
    yield [*(value for value in graph.inputs if not value.is_initializer()), *parameters]
    yield [value for value in values_by_name(graph).values() if ir.convenience.get_const_tensor(value)]
    yield [value for node in graph for value in node.outputs if value.name]


def _made_feedable(graph: ir.Graph, value: ir.Value, names: Names) -> ir.Value:
    """Return the value; a weight that cannot be fed is replaced by an initializer of the main graph."""
    tensor = ir.convenience.get_const_tensor(value)
    outside = value.graph is not graph
    if tensor is None or (value.is_initializer() and not outside) or value in graph.outputs:
        return value
    name = value.name
    weight = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    weight.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    node = value.producer()
    if value.is_graph_output():
        # An output of a subgraph must be computed by a node in it.
        copy = ir.node("Identity", [weight], name=names.fresh(f"{name}/copy"))
        copy.outputs[0].name, copy.outputs[0].type = copy.name, weight.type
        inner = value.graph
        assert isinstance(inner, ir.Graph)
        inner.append(copy)
        for i, output in enumerate(inner.outputs):
            if output is value:
                inner.outputs[i] = copy.outputs[0]
    ir.convenience.replace_all_uses_with(value, weight)
    if node is not None and node.graph is not None:
        node.graph.remove(node, safe=True)
    elif value.graph is not None:
        value.graph.initializers.pop(name or "")
    graph.register_initializer(weight)
    return weight


def _require_float(argument: str, value: ir.Value) -> None:
    # The outputs of an unknown operator may have no known type; a target may lack one, a seed may not.
    if is_float_tensor(value) or (argument == "wrt" and value.dtype is None):
        return
    quantized = _instead_of_integers(value) if argument == "wrt" and value.dtype is not None else []
    if quantized:
        assert value.dtype is not None
        raise ModelError(
            f"wrt={value.name!r} is a quantized tensor, whose {value.dtype.name.lower()} elements cannot "
            f"be trained; name {' or '.join(quantized)} instead"
        )
    near = _floats_behind([value]) if argument == "of" else []
    producer = value.producer()
    by = f"the {producer.op_type} node computes it" if producer is not None else "it is computed"
    advice = f"; differentiate {near[0]!r}, from which {by}" if near else ""
    if isinstance(value.type, ir.SequenceType | ir.OptionalType):
        kind = "a sequence" if isinstance(value.type, ir.SequenceType) else "an optional value"
        raise ModelError(f"{argument}={value.name!r} is {kind}; name tensors that are in it{advice}")
    if value.dtype is not None or value.producer() is None:
        type_ = "unknown" if value.dtype is None else value.dtype.name.lower()
        raise ModelError(f"{argument}={value.name!r} has element type {type_}, which has no gradient{advice}")
    raise ModelError(
        f"{argument}={value.name!r} is not known to be a tensor of numbers, so it has no gradient{advice}"
    )


def _instead_of_integers(value: ir.Value) -> list[str]:
    """Describe what can be trained in the place of a quantized tensor; nothing if it is not used as one."""
    found: dict[str, None] = {}
    producer = value.producer()
    rule = None if producer is None else find_rule(producer.op_type, producer.domain)
    if producer is not None and rule is not None and rule.straight_through:
        source = producer.inputs[0]
        if source is not None and source.dtype in FLOAT_TYPES:
            found[f"{source.name!r}, from which it is quantized,"] = None
    for user, i in value.uses():
        rule = find_rule(user.op_type, user.domain)
        if rule is None or rule.scales is None:
            continue
        scales = rule.scales_of(len(user.inputs))
        scale = user.inputs[scales[i]] if i in scales else None
        if scale is not None:
            found[f"its scale {scale.name!r}"] = None
        elif not found:
            found["a floating-point tensor that is quantized in the model"] = None
    return list(found)


def _floats_behind(values: Iterable[ir.Value]) -> list[str]:
    """Return the names of the nearest floating-point values from which the values are computed."""
    seen: set[ir.Value] = set()
    level = list(values)
    while level:
        nodes = dict.fromkeys(node for value in level if (node := value.producer()) is not None)
        level = list(dict.fromkeys(v for node in nodes for v in dependencies(node) if v not in seen))
        seen.update(level)
        found = [v for v in level if is_float_tensor(v) and v.producer() is not None]
        found = [v for v in found if ir.convenience.get_const_tensor(v) is None]
        if found:
            return [value.name or "" for value in found]
    return []


def _where(name: str, graph: ir.Graph, names: Iterable[str]) -> str:
    if any(name in values_by_name(inner) for inner in graph.subgraphs()):
        return ": it is inside a subgraph, and not a weight with a unique name; make it an output of the node"
    return nearest(name, names)
