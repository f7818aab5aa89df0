"""Adapters folded into the weights beside which they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from ortgrad.errors import ModelError
from ortgrad.graph.loading import one_line
from ortgrad.graph.protos import FIRST_WITH_CONSTANTS, all_graphs, copy_of, keep
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.training.lora_nodes import Adapted, Adapter
from ortgrad.training.lora_sites import Site, defined, swap_last, uses
from ortgrad.training.weights import set_value

Read = Callable[[onnx.TensorProto], np.ndarray]


def merge(model: onnx.ModelProto, adapted: list[Adapted], read: Read, dequantize: bool) -> None:
    """Fold the adapters into the weights, and remove their nodes and tensors."""
    if not dequantize:
        for each in adapted:
            if each.site.quantized:
                raise ModelError(
                    f"the weight {each.site.weight!r} is quantized, so the adapter cannot be folded into it; "
                    "with dequantize=True it becomes a tensor of floating-point numbers"
                )
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    _remove_nodes(model, adapted)
    by_weight: dict[str, list[Adapted]] = {}
    for each in adapted:
        by_weight.setdefault(each.site.weight, []).append(each)
    reading, count = uses(model), defined(model)
    gone: set[str] = set()
    added: list[onnx.TensorProto] = []
    replaced: list[Site] = []
    for group in by_weight.values():
        adapter = group[0].adapter
        values = [read(tensors[name]) for name in (adapter.a, adapter.b, adapter.scale)]
        delta = _delta(adapter, *values)
        if _exclusive(group, reading) and not any(each.site.quantized for each in group):
            tensor = group[0].site.operand.tensor
            set_value(tensor, _sum(read(tensor), delta))
        else:
            apart = [each.site for each in group]
            added += _beside(model, apart, delta, read, count)
            replaced += apart
        gone |= {adapter.a, adapter.b, adapter.scale}
    _remove_tensors(model, gone)
    _remove_unread(model, replaced)
    model.graph.initializer.extend(added)
    for tensor in added if model.ir_version < FIRST_WITH_CONSTANTS else ():
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def _delta(adapter: Adapter, a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return what an adapter adds to its weight, in at least single precision."""
    dtype = np.dtype(np.float64 if a.dtype == np.float64 else np.float32)
    return adapter.product(a.astype(dtype) * scale.astype(dtype), b.astype(dtype))


def _sum(weight: np.ndarray, delta: np.ndarray) -> np.ndarray:
    return (weight.astype(delta.dtype, copy=False) + delta).astype(weight.dtype)


def _exclusive(group: list[Adapted], reading: dict[str, list[tuple[onnx.NodeProto | None, int]]]) -> bool:
    """Return whether only nodes with the adapter read the weight."""
    sites = {(id(each.site.node), each.site.place) for each in group}
    path = {name for each in group for name in each.site.names}
    for name in path:
        for node, place in reading.get(name, ()):
            if node is None or ((id(node), place) not in sites and not path.issuperset(node.output)):
                return False
    return True


def _beside(
    model: onnx.ModelProto, sites: list[Site], delta: np.ndarray, read: Read, names: dict[str, int]
) -> list[onnx.TensorProto]:
    """Let the nodes read new tensors, with the sum; returns these."""
    made: dict[str, onnx.TensorProto] = {}
    for site in sites:
        operand = site.node.input[site.place]
        if operand not in made:
            if site.node.op_type == "MatMulNBits":
                raise ModelError(f"the weight {site.weight!r} of {site.described} cannot be dequantized")
            value = _dequantized(model, site, read) if site.quantized else read(site.operand.tensor)
            total = _sum(value, delta)
            if site.operand.swapped:
                total = total.transpose(swap_last(total.ndim))
            name = f"{operand}.merged"
            while names.get(name):
                name += "_"
            names[name] = 1
            dtype = helper.tensor_dtype_to_np_dtype(site.operand.type)
            made[operand] = numpy_helper.from_array(np.ascontiguousarray(total.astype(dtype)), name)
        site.node.input[site.place] = made[operand].name
    return list(made.values())


def _dequantized(model: onnx.ModelProto, site: Site, read: Read) -> np.ndarray:
    """Return what the DequantizeLinear node of a weight computes."""
    import onnxruntime

    node, settings = site.operand.dequantizer, site.operand.quantization
    assert node is not None
    if settings is None:
        raise ModelError(f"the scale of the quantized weight {site.weight!r} is not a constant")
    inputs = [
        _renamed(tensor, f"input{i}", read) for i, tensor in enumerate((site.operand.tensor, *settings))
    ]
    output = helper.make_tensor_value_info("y", site.operand.type, None)
    one_node = helper.make_node(node.op_type, [tensor.name for tensor in inputs], ["y"])
    one_node.attribute.extend(node.attribute)
    graph = helper.make_graph([one_node], "dequantize", [], [output], inputs)
    version = max(model.ir_version, FIRST_WITH_CONSTANTS)
    one = helper.make_model(graph, opset_imports=model.opset_import, ir_version=version)
    try:
        session = onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"])
        value: np.ndarray = session.run(None, {})[0]
    except onnxruntime_errors() as error:
        raise ModelError(f"cannot dequantize the weight {site.weight!r}: {one_line(error)}") from error
    return value


def _renamed(tensor: onnx.TensorProto, name: str, read: Read) -> onnx.TensorProto:
    if uses_external_data(tensor):
        return numpy_helper.from_array(read(tensor), name)
    copy = copy_of(tensor)
    copy.name = name
    return copy


def _remove_nodes(model: onnx.ModelProto, adapted: list[Adapted]) -> None:
    """Remove the nodes of the adapters; the nodes beside them get their outputs back."""
    removed = {id(node) for each in adapted for node in each.nodes}
    names = {name for each in adapted for node in each.nodes for name in node.output}
    for each in adapted:
        names.add(each.site.node.output[0])
        each.site.node.output[0] = each.nodes[0].output[0]
        names.discard(each.site.node.output[0])
    for graph in all_graphs(model.graph):
        keep(graph.node, lambda node: id(node) not in removed)
        keep(graph.value_info, lambda value: value.name not in names)


def _remove_tensors(model: onnx.ModelProto, names: Collection[str]) -> None:
    for field in (model.graph.initializer, model.graph.input, model.graph.value_info):
        keep(field, lambda value: value.name not in names)


def _remove_unread(model: onnx.ModelProto, sites: list[Site]) -> None:
    """Remove weights that no node reads any more, and the nodes on the way from them."""
    count = Counter({name: len(readers) for name, readers in uses(model).items()})
    makers = {name: node for graph in all_graphs(model.graph) for node in graph.node for name in node.output}
    gone: set[str] = set()
    for site in sites:
        node = site.operand.dequantizer
        for name in (*reversed(site.names), *(node.input[1:] if node is not None else ())):
            if name and not count[name] and name not in gone:
                gone.add(name)
                count.subtract(makers[name].input if name in makers else ())
    for graph in all_graphs(model.graph):
        keep(graph.node, lambda node: not gone.intersection(node.output))
        keep(graph.initializer, lambda tensor: tensor.name not in gone)
        keep(graph.value_info, lambda value: value.name not in gone)
    if model.ir_version < FIRST_WITH_CONSTANTS:
        keep(model.graph.input, lambda value: value.name not in gone)
