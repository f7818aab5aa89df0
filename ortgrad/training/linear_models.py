"""LinearClassifier and LinearRegressor: their attributes as weights that can be trained.

skl2onnx writes the coefficients of linear models as attributes, which have no gradient. To train them, the
nodes are replaced by standard operators on initializers; `export` writes the values back to the attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgrad.errors import TrainingModelError
from ortgrad.graph.protos import all_nodes, copy_of, replace

ML = "ai.onnx.ml"
_TRANSFORMS = {
    "LinearClassifier": ("NONE", "LOGISTIC", "SOFTMAX"),
    "LinearRegressor": ("NONE",),
}


@dataclass(frozen=True)
class _Linear:
    """A linear model: scores = X * coefficients^T + intercepts."""

    node: onnx.NodeProto
    name: str
    # (classes or targets, features)
    coefficients: np.ndarray
    # None if there are none.
    intercepts: np.ndarray | None
    labels: list[int] | list[bytes]
    transform: str
    # The attributes have the negative of every number as well: the scores of two classes are -s and s.
    mirrored: bool

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The parameters by name."""
        found = {f"{self.name}.coefficients": self.coefficients}
        if self.intercepts is not None:
            found[f"{self.name}.intercepts"] = self.intercepts
        return found


def linear_parameters(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the coefficients and intercepts of linear models by the names that they have as parameters."""
    return {name: array for linear in _linear_models(model) for name, array in linear.arrays.items()}


def open_linear_models(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which linear models are standard operators on initializers; without any, the model."""
    if not any(True for _ in _linear_models(model)):
        return model
    made = copy_of(model)
    replaced = {linear.node.output[0]: linear for linear in _linear_models(made)}
    nodes: list[onnx.NodeProto] = []
    for node in made.graph.node:
        linear = replaced.get(node.output[0]) if node.output else None
        nodes.extend([node] if linear is None else _nodes(linear, made.graph))
    replace(made.graph.node, nodes)
    return made


def set_linear_models(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> set[str]:
    """Write parameters of linear models to their attributes, in place; returns the names of those."""
    found: set[str] = set()
    for linear in list(_linear_models(model)):
        for name, old in linear.arrays.items():
            if name not in arrays:
                continue
            if arrays[name].shape != old.shape:
                raise TrainingModelError(
                    f"parameter {name!r} is {arrays[name].dtype}{list(arrays[name].shape)}, in the model "
                    f"it is float{list(old.shape)}"
                )
            found.add(name)
            array = arrays[name].astype(np.float32)
            array = np.concatenate([-array, array]) if linear.mirrored else array
            key = name.rpartition(".")[2]
            rest = [attribute for attribute in linear.node.attribute if attribute.name != key]
            del linear.node.attribute[:]
            linear.node.attribute.extend([*rest, helper.make_attribute(key, array.reshape(-1).tolist())])
    return found


def why_none(model: onnx.ModelProto) -> str:
    """Return why a model has no parameters, and what to do, as the end of a sentence."""
    for node in model.graph.node:
        if node.domain != ML:
            continue
        for kind, reason in _UNTRAINABLE.items():
            if node.op_type.startswith(kind):
                return f": the {node.op_type} node {node.name!r} {reason}"
    return ": name them in wrt"


_UNTRAINABLE = {
    "TreeEnsemble": "has decision trees, which no gradient can train; fit them again with the library that "
    "made them, or train a model of another kind (MLPClassifier, LogisticRegression)",
    "SVM": "has support vectors, which are samples of the data that it was fitted on; fit it again with the "
    "library that made it, or train a linear model instead (LinearSVC, SGDClassifier, LogisticRegression)",
    "Linear": "is not of a kind that can be trained: its post_transform must be NONE, LOGISTIC "
    "or SOFTMAX (NONE for a regressor), with one row of coefficients for each class or target",
}


def _linear_models(model: onnx.ModelProto) -> Iterator[_Linear]:
    """Yield the linear models of the main graph that can be trained."""
    taken = {name for node in all_nodes(model.graph.node) for name in (*node.input, *node.output)}
    taken |= {value.name for value in (*model.graph.input, *model.graph.initializer)}
    for node in model.graph.node:
        if node.domain != ML or node.op_type not in _TRANSFORMS:
            continue
        base = node.name or node.output[-1]
        name, number = base, 1
        while any(f"{name}.{key}" in taken for key in ("coefficients", "intercepts")):
            number += 1
            name = f"{base}_{number}"
        linear = _read(node, name)
        if linear is not None:
            taken.update(linear.arrays)
            yield linear


def _read(node: onnx.NodeProto, name: str) -> _Linear | None:
    """Return a linear model, or None if it is not one of the usual kinds."""
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    labels = list(given.get("classlabels_ints") or given.get("classlabels_strings") or [])
    transform = given.get("post_transform", b"NONE").decode()
    flat = np.array(given.get("coefficients", []), np.float32)
    intercepts = np.array(given.get("intercepts", []), np.float32)
    rows = len(intercepts) or (len(labels) if labels else int(given.get("targets", 1)))
    if transform not in _TRANSFORMS[node.op_type] or not flat.size or flat.size % rows:
        return None
    coefficients, mirrored = flat.reshape(rows, -1), False
    if node.op_type == "LinearClassifier":
        mirrored = rows == len(labels) == 2 and transform != "SOFTMAX" and _is_mirrored(coefficients)
        mirrored = mirrored and _is_mirrored(intercepts)
        # onnxruntime has rules of its own for a single score without LOGISTIC.
        single = rows == 1 and len(labels) == 2 and transform == "LOGISTIC"
        if rows != len(labels) and not single:
            return None
    elif rows != int(given.get("targets", 1)):
        return None
    if mirrored:
        coefficients, intercepts = coefficients[1:], intercepts[1:]
    return _Linear(
        node, name, coefficients, intercepts if intercepts.size else None, labels, transform, mirrored
    )


def _is_mirrored(array: np.ndarray) -> bool:
    return bool(array.size == 0 or np.array_equal(array[0], -array[1]))


def _nodes(linear: _Linear, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return standard operators that compute what the node does; adds its weights to the graph."""
    node, name = linear.node, linear.name
    graph.initializer.extend(numpy_helper.from_array(array, key) for key, array in linear.arrays.items())
    made: list[onnx.NodeProto] = []

    def add(op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        made.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    x = add("Cast", [node.input[0]], f"{name}/x", to=TensorProto.FLOAT)
    if node.op_type == "LinearRegressor":
        add("Gemm", [x, *linear.arrays], node.output[0], transB=1)
        return made
    labels, result = node.output[0], (node.output[1] if len(node.output) > 1 else "") or f"{name}/result"
    two = linear.mirrored or len(linear.coefficients) < len(linear.labels)
    plain = linear.transform == "NONE" and not two
    scores = add("Gemm", [x, *linear.arrays], result if plain else f"{name}/scores", transB=1)
    if linear.transform == "SOFTMAX":
        add("Softmax", [scores], result, axis=1)
    elif linear.transform == "LOGISTIC" and not two:
        add("Sigmoid", [scores], result)
    elif linear.transform == "LOGISTIC":
        graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), f"{name}/one"))
        positive = add("Sigmoid", [scores], f"{name}/positive")
        negative = add("Sub", [f"{name}/one", positive], f"{name}/negative")
        add("Concat", [negative, positive], result, axis=1)
    elif two:
        add("Concat", [add("Neg", [scores], f"{name}/negative"), scores], result, axis=1)
    if labels:
        graph.initializer.append(_labels(linear.labels, f"{name}/classes"))
        best = add("ArgMax", [result], f"{name}/best", axis=1, keepdims=0)
        add("Gather", [f"{name}/classes", best], labels)
    return made


def _labels(labels: list[int] | list[bytes], name: str) -> onnx.TensorProto:
    numbers = isinstance(labels[0], int)
    return numpy_helper.from_array(np.array(labels, np.int64 if numbers else np.object_), name)
