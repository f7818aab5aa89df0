"""What a loss is computed from: the scores behind a model's probabilities, and the labels of its classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.errors import NameNotFoundError, TrainingModelError
from ortgrad.graph.matching import nearest
from ortgrad.graph.protos import FLOATS, copy_of, dependencies
from ortgrad.training import protos
from ortgrad.training.linear_models import ML

_COPIES = ("Identity", "Cast")
# Operators that keep all elements and their order, and others whose results are elements of their input, or
# between two of them.
_RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_CHOICES = ("Clip", "Dropout", "Gather", "GatherElements", "GatherND", "Slice", "Split", "Transpose")
_PROBABILITIES = ("HardSigmoid", "Sigmoid", "Softmax")


def output_of(model: onnx.ModelProto, output: str | None) -> str:
    """Return the name of the value that a loss is computed from; for the maps of a ZipMap, its tensor."""
    producers = _producers(model)
    if output is not None:
        if not protos.exists(model, output):
            outputs = [value.name for value in model.graph.output]
            inner = (name for node in model.graph.node for name in node.output)
            near = nearest(output, [*outputs, *inner])
            raise NameNotFoundError(
                f"output={output!r} is not a value of the model (its outputs: {', '.join(outputs)}){near}"
            )
        return _before_map(producers, output)
    sliced = _before_columns(model, producers)
    if sliced is not None:
        return sliced
    for value in model.graph.output:
        source = _before_map(producers, value.name)
        if value.type.tensor_type.elem_type in FLOATS or source != value.name:
            return source
    raise TrainingModelError("the model has no floating-point output for a loss: name a value as output=")


def _before_map(producers: Mapping[str, onnx.NodeProto], name: str) -> str:
    node = producers.get(name)
    return node.input[0] if node is not None and (node.domain, node.op_type) == (ML, "ZipMap") else name


def _before_columns(model: onnx.ModelProto, producers: Mapping[str, onnx.NodeProto]) -> str | None:
    """Return the probabilities whose columns are the outputs, as skl2onnx writes them on request."""
    floats = [v for v in model.graph.output if v.type.tensor_type.elem_type in FLOATS]
    if model.producer_name != "skl2onnx" or len(floats) < 2:
        return None
    vectors = [producers.get(value.name) for value in floats]
    slices = [
        producers.get(node.input[0]) for node in vectors if node is not None and node.op_type == "Reshape"
    ]
    sources = {node.input[0] if node is not None and node.op_type == "Slice" else "" for node in slices}
    return sources.pop() if len(slices) == len(floats) and len(sources) == 1 and "" not in sources else None


def scores_of(model: onnx.ModelProto, loss: str, source: str, axis: int | None) -> tuple[str, int | None]:
    """Return the scores behind the probabilities `source`, or `source` if it has scores itself.

    Also returns the dimension of the classes, if `axis` gives it or a Softmax shows it. The scores
    may need a few nodes, which are added to the model. A loss that does not fit the probabilities is
    refused: it would train, but badly.
    """
    producers = _producers(model)
    if loss in ("cross-entropy", "bce"):
        _refuse_computed_probabilities(model, producers, source)
        source, axis = _behind_reshapes(model, producers, loss, source, axis)
        producers = _producers(model)
    node, name = _behind_copies(producers, source)
    if node is None:
        return source, axis
    kind = node.op_type if node.domain in ("", "ai.onnx", ML) else ""
    if kind == "Normalizer":
        inner, inner_name = _behind_copies(producers, node.input[0])
        if inner is not None and inner.op_type == "Softmax":
            # What a Softmax returns has a norm of 1 already.
            node, name, kind = inner, inner_name, "Softmax"
    positive = _positive(model, producers, node) if kind == "Concat" else None
    if loss == "cross-entropy":
        if kind == "Softmax":
            return _before_softmax(model, node, source, axis)
        if kind == "Sigmoid":
            raise TrainingModelError(
                f"{source!r} is the result of a Sigmoid, a probability of its own for every column: the loss "
                "of such models is 'bce', with a target of the same shape"
            )
        if positive is not None:
            return _two_scores(model, positive), axis
        if kind == "Normalizer" or (kind == "Div" and _is_mapped(model, source)):
            # They add up to 1, so that their logarithms are scores. Those of a Sigmoid do not underflow.
            single = _before_sigmoid(producers, node.input[0])
            if single is None:
                return _add(model, "Log", [name]), axis
            minus = _add(model, "Neg", [single])
            return _add(model, "Neg", [_add(model, "Softplus", [minus])]), axis
        if _is_column(model, source):
            classes = classes_of(model)
            if classes is None or len(classes) != 2:
                raise TrainingModelError(
                    f"{source!r} has one column, and cross-entropy needs one for each class: the loss of a "
                    "single score for two classes is 'bce'"
                )
            return _two_scores(model, source), axis
    elif loss == "bce":
        if kind == "Sigmoid":
            return node.input[0], axis
        if positive is not None:
            return positive, axis
        if kind in ("Softmax", "Normalizer"):
            raise TrainingModelError(
                f"{source!r} has the probabilities of a {kind}, which add up to 1: their loss is "
                "'cross-entropy', with the classes as labels"
            )
    if loss in ("cross-entropy", "bce") and _is_mapped(model, source) and kind not in _SCORES:
        raise TrainingModelError(
            f"{source!r} is computed by the {node.op_type} node {node.name!r}, and may be scores or "
            "probabilities: name the scores as output=, or write the loss as a function of the output"
        )
    return source, axis


def _refuse_computed_probabilities(
    model: onnx.ModelProto, producers: Mapping[str, onnx.NodeProto], source: str
) -> None:
    """Raise TrainingModelError for probabilities that are not the result of a Softmax or Sigmoid node."""
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    chain = _chain(producers, source)
    node = chain[-1] if chain else None
    if node is None or not node.input or node.domain not in ("", "ai.onnx"):
        return
    first, *others = (_chain(producers, name)[-1:] for name in node.input)
    inner = first[0].op_type if first else ""
    if node.op_type == "Exp":
        found = inner == "LogSoftmax"
    elif node.op_type == "Div":
        total = others[0][0] if others and others[0] else None
        found = inner == "Exp" and total is not None and total.op_type == "ReduceSum"
        found = found and total is not None and total.input[0] == node.input[0]
    else:
        # Moved or scaled by a constant, which smooths them.
        factors = [name for name in node.input if name not in constants]
        chosen = _chain(producers, factors[0])[-1:] if len(factors) == 1 else []
        found = node.op_type in ("Add", "Sub", "Mul", "Div", "Max", "Min") and bool(chosen)
        found = found and chosen[0].op_type in _PROBABILITIES and not _is_bias(model, node)
    if found:
        raise TrainingModelError(
            f"{source!r} seems to have probabilities, computed by the {node.op_type} node {node.name!r}, and "
            "the loss takes scores: name these as output=, or write the loss as a function"
        )


def _is_bias(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
    """Return whether a node adds or multiplies by a constant of several elements, as layers do."""
    sizes = {t.name: int(np.prod(t.dims)) for t in model.graph.initializer}
    return any(sizes.get(name, 1) > 1 for name in node.input)


def _behind_reshapes(
    model: onnx.ModelProto, producers: Mapping[str, onnx.NodeProto], loss: str, source: str, axis: int | None
) -> tuple[str, int | None]:
    """Return scores where probabilities are reshaped: the same nodes are added behind the scores.

    Raises an error where elements of probabilities are chosen, limited or moved.
    """
    chain = _chain(producers, source)
    node = chain[-1] if chain else None
    reshapes = [each for each in chain if each.op_type in (*_RESHAPES, *_CHOICES)]
    if node is None or node.op_type not in _PROBABILITIES or not reshapes:
        return source, axis
    rank = len(_dims(model, source))
    other = next((each for each in reshapes if each.op_type in _CHOICES), None)
    kept = rank == 2 and _dims(model, source)[1:] == _class_sizes(model, node)
    fits = node.op_type == "Sigmoid" if loss == "bce" else node.op_type == "Softmax" and kept
    if other is not None or not fits:
        through = " and ".join(dict.fromkeys(each.op_type for each in reversed(reshapes)))
        raise TrainingModelError(
            f"{source!r} has probabilities, of the {node.op_type} node {node.name!r} through {through}, and "
            f"{loss} takes scores: name them as output= (they are computed from {node.input[0]!r}), or write "
            "the loss as a function of the output"
        )
    scores = node.input[0]
    for each in reversed(chain[:-1]):
        copy = copy_of(each)
        copy.name = protos.generate_graph_name(model, each.op_type)
        copy.input[0], copy.output[0] = scores, copy.name
        model.graph.node.append(copy)
        scores = copy.name
    return scores, axis


def _chain(producers: Mapping[str, onnx.NodeProto], name: str) -> list[onnx.NodeProto]:
    """Return the nodes that copy, reshape or choose elements, from a value back to what computes them."""
    chain: list[onnx.NodeProto] = []
    while (node := producers.get(name)) is not None:
        chain.append(node)
        if node.op_type not in (*_COPIES, *_RESHAPES, *_CHOICES):
            break
        name = node.input[0]
    return chain


def _dims(model: onnx.ModelProto, name: str) -> list[int | str]:
    try:
        shape = protos.find_value(model, name).type.tensor_type.shape
    except NameNotFoundError:
        return []
    return [dim.dim_value or dim.dim_param for dim in shape.dim]


def _class_sizes(model: onnx.ModelProto, node: onnx.NodeProto) -> list[int | str]:
    """Return the size of the axis of a Softmax as a list of one element; an empty one if it is not known."""
    dims = _dims(model, node.input[0])
    own = next((int(a.i) for a in node.attribute if a.name == "axis"), -1)
    return [dims[own]] if -len(dims) <= own < len(dims) and isinstance(dims[own], int) else []


def is_probability(model: onnx.ModelProto, name: str) -> bool:
    """Return whether a value has probabilities of two classes each, not scores."""
    chain = _chain(_producers(model), name)
    return bool(chain) and chain[-1].op_type in ("HardSigmoid", "Sigmoid")


def _before_softmax(
    model: onnx.ModelProto, node: onnx.NodeProto, source: str, axis: int | None
) -> tuple[str, int | None]:
    """Return the scores that a Softmax makes probabilities of, and the dimension of the classes."""
    scores = node.input[0]
    rank = len(protos.find_value(model, scores).type.tensor_type.shape.dim)
    own = next((int(a.i) for a in node.attribute if a.name == "axis"), -1)
    if axis is not None and rank and (axis - own) % rank:
        raise TrainingModelError(
            f"{source!r} is the result of a Softmax along axis {own}, which is not that of the classes, "
            f"axis={axis}: if the classes are there, name its input, output={scores!r}"
        )
    return scores, axis if axis is not None or rank <= 2 else own % rank


# Operators that compute scores, not probabilities, in front of a ZipMap.
_SCORES = ("Add", "Gemm", "MatMul", "LogSoftmax")


def _is_column(model: onnx.ModelProto, name: str) -> bool:
    try:
        dims = protos.find_value(model, name).type.tensor_type.shape.dim
    except NameNotFoundError:
        return False
    return len(dims) == 2 and dims[1].dim_value == 1


def _before_sigmoid(producers: Mapping[str, onnx.NodeProto], name: str) -> str | None:
    """Return s if a value is Sigmoid(s), which skl2onnx also writes as 1 / (1 + exp(-s)) + 0."""
    node = producers.get(name)
    if node is not None and node.op_type == "Sigmoid":
        return node.input[0]
    for op_type in ("Add", "Reciprocal", "Add", "Exp", "Mul"):
        if node is None or node.op_type != op_type:
            return None
        name = node.input[0]
        node = producers.get(name)
    return name


def _is_mapped(model: onnx.ModelProto, name: str) -> bool:
    return any(node.op_type == "ZipMap" and name in node.input for node in model.graph.node)


def _positive(
    model: onnx.ModelProto, producers: Mapping[str, onnx.NodeProto], node: onnx.NodeProto
) -> str | None:
    """Return the score s of a Concat of two columns: 1 - p and p = Sigmoid(s), or -s and s."""
    if len(node.input) != 2:
        return None
    first, positive = producers.get(node.input[0]), node.input[1]
    if first is None:
        return None
    if first.op_type == "Neg" and first.input[0] == positive:
        return positive
    constants = {t.name: t for t in model.graph.initializer}
    if first.op_type == "Mul" and positive in first.input:
        factor = next((name for name in first.input if name != positive), "")
        return positive if _is_number(constants.get(factor), -1) else None
    if first.op_type == "Sub" and first.input[1] == positive and _is_number(constants.get(first.input[0]), 1):
        sigmoid, _ = _behind_copies(producers, positive)
        return sigmoid.input[0] if sigmoid is not None and sigmoid.op_type == "Sigmoid" else None
    return None


def _is_number(tensor: onnx.TensorProto | None, number: float) -> bool:
    return tensor is not None and bool(np.all(numpy_helper.to_array(tensor) == number))


def _two_scores(model: onnx.ModelProto, positive: str) -> str:
    """Return [0, s], whose Softmax is [1 - p, p] with p = Sigmoid(s)."""
    zero = _add(model, "Sub", [positive, positive])
    return _add(model, "Concat", [zero, positive], axis=1)


def _add(model: onnx.ModelProto, op_type: str, inputs: list[str], **attributes: Any) -> str:
    """Add a node behind those that it reads and return the name of its output."""
    name = protos.generate_graph_name(model, op_type)
    model.graph.node.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
    return name


def _producers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output if name}


def _behind_copies(producers: Mapping[str, onnx.NodeProto], name: str) -> tuple[onnx.NodeProto | None, str]:
    """Return the node that computes a value, and the value, behind nodes that only copy it."""
    node = producers.get(name)
    while node is not None and node.op_type in _COPIES:
        name = node.input[0]
        node = producers.get(name)
    return node, name


def classes_of(model: onnx.ModelProto) -> np.ndarray | None:
    """Return the labels of the classes if the model says them: numbers or strings."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = _producers(model)
    for node in reversed(model.graph.node):
        if node.op_type in ("ArrayFeatureExtractor", "Gather") and node.input[0] in constants:
            index, _ = _behind_copies(producers, node.input[1])
            if index is not None and index.op_type == "ArgMax":
                return _labels(numpy_helper.to_array(constants[node.input[0]]).reshape(-1))
        for attribute in node.attribute if node.domain == ML else ():
            if attribute.name.startswith("classlabels_"):
                return _labels(np.array(helper.get_attribute_value(attribute)))
    return None


def are_numbers(classes: np.ndarray) -> bool:
    """Return whether the classes are 0, 1, 2, ..., as a loss takes them."""
    return classes.dtype.kind in "iu" and bool(np.array_equal(classes, np.arange(len(classes))))


def _labels(found: np.ndarray) -> np.ndarray:
    if found.dtype.kind in "iu":
        return found
    return np.array([text.decode() if isinstance(text, bytes) else str(text) for text in found.tolist()])


def influencing(model: onnx.ModelProto, name: str) -> set[str]:
    """Return the values that a value depends on."""
    found = {name}
    for node in reversed(model.graph.node):
        if found.intersection(node.output):
            found.update(dependencies(node))
    return found
