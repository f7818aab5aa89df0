"""LoRA: small trainable matrices beside frozen weights.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. `add_lora` adds adapters to a model, in
which `lora_parameters` names what is trained. `save_lora` and `load_lora` store adapters alone, and
`merge_lora` folds them into the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.errors import (
    ArgumentTypeError,
    CheckpointError,
    ModelError,
    NameNotFoundError,
    ParameterWarning,
    TrainingError,
)
from ortgrad.graph.exporters import read_origins
from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.graph.matching import left_out, matches, nearest, not_in_file
from ortgrad.graph.origins import Origins
from ortgrad.graph.protos import (
    FIRST_WITH_CONSTANTS,
    all_graphs,
    copy_of,
    declared_values,
    keep,
    opset_of,
    replace,
)
from ortgrad.keywords import checked, outside
from ortgrad.training.arguments import check_count
from ortgrad.training.checkpoint import load_tensors, save_tensors
from ortgrad.training.evaluation import for_inference
from ortgrad.training.exporting import arrays_of
from ortgrad.training.lora_merging import merge
from ortgrad.training.lora_nodes import Adapted, Adapter, adapter_for, adapter_nodes, find_adapted
from ortgrad.training.lora_sites import (
    ADAPTER_SUFFIXES,
    Site,
    adapter_names,
    constants,
    defined,
    find_sites,
    readers,
)
from ortgrad.training.state import describe
from ortgrad.training.weights import LARGE, set_value, size_of

__all__ = ["add_lora", "load_lora", "lora_parameters", "merge_lora", "save_lora"]

_METADATA = "ortgrad.lora"
# Before it, Add and Mul broadcast only on request.
_OLDEST_OPSET = 7


@checked
def add_lora(
    model: ModelLike, patterns: str | Sequence[str], *, rank: int = 8, alpha: float = 16.0, seed: int = 0
) -> onnx.ModelProto:
    """Return the model with adapters beside the weights whose names match.

    `patterns` are names or patterns as in fnmatch, one or several. Adapters go on MatMul, Gemm and Conv nodes
    with a constant weight, also one that is quantized (DequantizeLinear, MatMulNBits). To the result of such
    a node (alpha / rank) * B(A(x)) is added. A has random elements, which depend on `seed` and the name of
    the weight, and B is 0, so that at first the model computes what it did before.

    The tensors are the initializers `<weight>.lora_A` and `<weight>.lora_B`, which all nodes with this weight
    share. Their shapes follow the weight: [in, out] gives [in, rank] and [rank, out], and [out, in] gives
    [rank, in] and [out, rank]. For a convolution, A is one of the same geometry with `rank` output channels
    (in every group), and B is a 1x1 convolution. Weights of more than 1 GiB with external data stay in their
    files: the result then belongs into the folder of the model.

    >>> import onnx
    >>> from ortgrad.training.lora import add_lora, lora_parameters
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 3] y)
    ...     <float[2, 3] fc_weight = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, fc_weight) }''')
    >>> adapted = add_lora(model, "fc_*", rank=1)
    >>> lora_parameters(adapted)
    ['fc_weight.lora_A', 'fc_weight.lora_B']
    >>> [node.op_type for node in adapted.graph.node]
    ['MatMul', 'MatMul', 'Mul', 'MatMul', 'Add']
    """
    listed = _listed(patterns)
    _check_numbers(rank, alpha, seed)
    made, _ = _opened(model)
    chosen = _chosen(made, listed)
    _add(made, chosen, {weight: (int(rank), float(alpha)) for weight in chosen}, int(seed))
    return made


@checked
def lora_parameters(model: ModelLike) -> list[str]:
    """Return the names of the adapters' tensors, which are to be trained; none if there are no adapters.

    >>> import onnx, ortgrad
    >>> from ortgrad.training.lora import add_lora, lora_parameters
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float loss)
    ...     <float[2, 1] w = {1, 2}> { y = MatMul(x, w) loss = ReduceSum <keepdims=0> (y) }''')
    >>> adapted = add_lora(model, "w", rank=1)
    >>> backward = ortgrad.build_gradient_model(adapted, wrt=lora_parameters(adapted))
    >>> [output.name for output in backward.graph.output]
    ['loss', 'w.lora_A_grad', 'w.lora_B_grad']
    """
    proto = load_model(model, external_data=False)
    return [
        name
        for pair in adapter_names(tensor.name for tensor in proto.graph.initializer).values()
        for name in pair
    ]


@checked
def save_lora(model_or_state: Any, path: str | os.PathLike[str], *, model: ModelLike | None = None) -> None:
    """Write the adapters alone to a safetensors file.

    They come from a model (a ModelProto, bytes or a path) or from the state of a training: a Checkpoint, a
    CheckpointState, an object with such a state, or arrays by name. A state does not know rank and alpha:
    give the model, too, if the file is to be loaded into a model without adapters. The file keeps its old
    contents until the new ones are complete.

    >>> import onnx, os, tempfile
    >>> from ortgrad.training.lora import add_lora, load_lora, lora_parameters, save_lora
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> path = os.path.join(tempfile.mkdtemp(), "adapters.safetensors")
    >>> save_lora(add_lora(model, "w", rank=1), path)
    >>> lora_parameters(load_lora(model, path))
    ['w.lora_A', 'w.lora_B']
    """
    arrays: dict[str, np.ndarray]
    source: ModelLike | None = model
    if isinstance(model_or_state, (onnx.ModelProto, bytes, str, os.PathLike)):
        if model is not None:
            raise ArgumentTypeError("model is for a state; the first argument is a model already")
        source, arrays = model_or_state, {}
    else:
        state = arrays_of(model_or_state)
        arrays = {name: state[name] for pair in adapter_names(state).values() for name in pair}
        if not arrays:
            raise TrainingError("the state has no adapters: no pair of <weight>.lora_A and <weight>.lora_B")
    metadata: dict[str, str] = {}
    if source is not None:
        proto, folder = _opened(source, copy=False)
        adapters = _adapters(proto)
        if not adapters:
            raise ModelError("the model has no adapters; add_lora adds them")
        tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
        if not arrays:
            for adapter in adapters.values():
                for name in (adapter.a, adapter.b):
                    arrays[name] = _value(tensors[name], folder)
        _check_arrays(arrays, adapters, "the state")
        alphas = _alphas(proto, adapters, folder)
        entries = {name: {"rank": a.rank, "alpha": alphas[name]} for name, a in adapters.items()}
        metadata[_METADATA] = json.dumps(entries)
    save_tensors(arrays, metadata, path)


@checked
def load_lora(model: ModelLike, path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Return the model with the adapters in a file that `save_lora` wrote.

    If the model has no adapters, they are added. If it has adapters, they must be the same as those in the
    file, with the same rank and alpha, and their values are replaced.

    >>> import numpy as np, onnx, os, tempfile
    >>> from ortgrad.training.lora import add_lora, load_lora, save_lora
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> adapted = add_lora(model, "w", rank=1)
    >>> path = os.path.join(tempfile.mkdtemp(), "adapters.safetensors")
    >>> trained = {"w.lora_A": np.float32([[3], [4]]), "w.lora_B": np.float32([[5]])}
    >>> save_lora(trained, path, model=adapted)
    >>> loaded = load_lora(model, path)
    >>> onnx.numpy_helper.to_array(loaded.graph.initializer[1]).tolist()
    [[3.0], [4.0]]
    """
    arrays, metadata = load_tensors(path)
    pairs = adapter_names(arrays)
    others = sorted(set(arrays) - {name for pair in pairs.values() for name in pair})
    if others or not arrays:
        what = f"{others[0]!r} is not part of an adapter" if others else "it has no tensors"
        raise CheckpointError(f"{path} is not a file of adapters: {what}")
    recorded = _recorded(metadata.get(_METADATA), f"the metadata of {path}")
    if recorded and recorded.keys() != pairs.keys():
        name = min(recorded.keys() ^ pairs.keys())
        raise CheckpointError(f"{path} is damaged: the weight {name!r} is in tensors or in metadata only")
    made, folder = _opened(model)
    adapters = _adapters(made)
    if not adapters:
        if not recorded:
            raise CheckpointError(
                f"{path} has neither rank nor alpha, since it was written from a state without the model, "
                "and the model has no adapters; add them by add_lora first"
            )
        chosen = _chosen(made, list(pairs), exact=str(path))
        planned = {weight: adapter_for(sites[0], recorded[weight][0]) for weight, sites in chosen.items()}
        _check_arrays(arrays, planned, str(path))
        _add(made, chosen, recorded, None)
        adapters = _adapters(made)
    alphas = _alphas(made, adapters, folder)
    _check_arrays(arrays, adapters, str(path))
    for weight, (rank, alpha) in recorded.items():
        if (rank, alpha) != (adapters[weight].rank, alphas[weight]):
            raise CheckpointError(
                f"the adapter of {weight!r} has rank {rank} and alpha {alpha} in {path}, but rank "
                f"{adapters[weight].rank} and alpha {alphas[weight]} in the model"
            )
    for tensor in made.graph.initializer:
        if tensor.name in arrays:
            set_value(tensor, arrays[tensor.name])
    return made


@checked
def merge_lora(model: ModelLike, *, dequantize: bool = False) -> onnx.ModelProto:
    """Return the model with the adapters folded into the weights: W + (alpha / rank) * A B.

    The nodes of the adapters are removed; what remains are the nodes of the model before `add_lora`. Where a
    weight is also read by other nodes, those keep it, and the merged one is a new initializer
    `<weight>.merged`. Adapters of quantized weights cannot be folded into integers. With `dequantize` weights
    behind DequantizeLinear become floating-point numbers. BatchNormalization and Dropout are in inference
    mode, as in what `export` returns.

    >>> import numpy as np, onnx
    >>> from ortgrad.training.lora import add_lora, merge_lora
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 2] x) => (float[N, 1] y) <float[2, 1] w = {1, 2}> { y = MatMul(x, w) }''')
    >>> adapted = add_lora(model, "w", rank=1, alpha=1)
    >>> for tensor, value in zip(adapted.graph.initializer[1:3], ([[1], [2]], [[10]])):
    ...     tensor.CopyFrom(onnx.numpy_helper.from_array(np.float32(value), tensor.name))
    >>> merged = merge_lora(adapted)
    >>> onnx.numpy_helper.to_array(merged.graph.initializer[0]).tolist()
    [[11.0], [22.0]]
    >>> merged.graph.node == model.graph.node
    True
    """
    made, folder = _opened(model)
    adapted = _adapted(made)
    if not adapted:
        raise ModelError("the model has no adapters; add_lora adds them")
    merge(made, adapted, lambda tensor: _value(tensor, folder), dequantize)
    keep(made.metadata_props, lambda entry: entry.key != _METADATA)
    for_inference(made)
    return made


def _opened(model: ModelLike, *, copy: bool = True) -> tuple[onnx.ModelProto, str]:
    """Return a model that may be changed, and the folder of its external data.

    Weights of more than LARGE bytes stay in the files in which they are.
    """
    proto = load_model(model, external_data=False)
    if not isinstance(model, (str, os.PathLike)):
        return (copy_of(proto) if copy and proto is model else proto), ""
    if sum(size_of(tensor) for tensor in proto.graph.initializer) <= LARGE:
        proto = load_model(model)
    return proto, str(Path(model).parent)


def _listed(patterns: str | Sequence[str]) -> list[str]:
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, Sequence) or not all(isinstance(pattern, str) for pattern in listed):
        raise ArgumentTypeError(f"patterns is a name or a list of names, not {patterns!r}")
    if not listed:
        raise NameNotFoundError("patterns is empty; name the weights that get adapters")
    return list(listed)


def _check_numbers(rank: Any, alpha: Any, seed: Any) -> None:
    check_count("rank", rank, 1)
    check_count("seed", seed, 0)
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real):
        raise ArgumentTypeError(f"alpha is {alpha!r}; it must be a number")
    if not math.isfinite(alpha) or alpha <= 0:
        raise TrainingError(f"alpha is {alpha}; it must be a finite number above 0")


def _chosen(model: onnx.ModelProto, patterns: list[str], exact: str = "") -> dict[str, list[Site]]:
    """Return the nodes that get an adapter, by weight.

    If `exact` is not empty, the patterns are the weights that the file of this name has.
    """
    present = adapter_names(tensor.name for tensor in model.graph.initializer)
    own = {name for pair in present.values() for name in pair}
    sites = [site for site in find_sites(model) if site.weight not in own]
    origins = Origins() if exact else read_origins(model)
    chosen: dict[str, list[Site]] = {}
    for pattern in patterns:
        found = {s.weight for s in sites if pattern == s.weight}
        if not found and not exact:
            found = {s.weight for s in sites if matches(pattern, (*s.names, *origins.names(s.weight)))}
        if not found:
            raise NameNotFoundError(_no_match(model, pattern, sites, exact, origins))
        warning = left_out(pattern, [*found], list(dict.fromkeys(s.weight for s in sites)), origins)
        if warning is not None:
            warnings.warn(f"patterns: {warning}", ParameterWarning, stacklevel=outside())
        for site in sites:
            if site.weight in found and site.weight not in chosen:
                chosen[site.weight] = [s for s in sites if s.weight == site.weight]
    count = defined(model)
    for weight, nodes in chosen.items():
        if weight in present:
            raise ModelError(f"the weight {weight!r} has an adapter already")
        if count[weight] > 1:
            raise ModelError(f"{count[weight]} values of the model have the name {weight!r}; rename them")
        for suffix in (*ADAPTER_SUFFIXES, ".lora_scale"):
            if count[weight + suffix]:
                raise ModelError(
                    f"the model has a value {weight + suffix!r}, the name of an adapter's tensor"
                )
        _check_sites(model, nodes, [site for site in sites if site.weight in {*chosen, *present}])
    return chosen


def _no_match(model: onnx.ModelProto, pattern: str, sites: list[Site], exact: str, origins: Origins) -> str:
    candidates = [name for site in sites for name in (*site.names, *origins.names(site.weight))]
    others = [n for n in constants(model) if matches(pattern, [n]) and not n.endswith(ADAPTER_SUFFIXES)]
    if others:
        kinds = readers(others[:1], model)
        what = f"the weight {pattern!r} of {exact}"
        if not exact:
            what = f"patterns={pattern!r} matches {others[0]!r}, which"
        by = f"is read by {', '.join(kinds)}" if kinds else "is read by no node"
        text = f"{what} {by}; adapters go on MatMul, Gemm and Conv nodes with a floating-point weight"
        if {function.name for function in model.functions}.intersection(kinds):
            text += "; inline the functions first (onnx.inliner.inline_local_functions)"
    elif exact:
        text = f"the weight {pattern!r} of {exact} is not in the model"
    else:
        text = f"patterns={pattern!r} matches no weight of a MatMul, Gemm or Conv node"
    return text + nearest(pattern, candidates) + not_in_file(pattern, origins)


def _check_sites(model: onnx.ModelProto, sites: list[Site], adapted: list[Site]) -> None:
    """Raise ModelError if the nodes of a weight cannot share an adapter.

    `adapted` are all nodes that will have one.
    """
    adapters = {}
    for site in sites:
        adapter = adapter_for(site, 1)
        adapters[adapter.type, adapter.group, len(adapter.dims)] = site
        other = next((s for s in adapted if s.node is site.node and s.place != site.place), None)
        if other is not None:
            raise ModelError(
                f"both inputs of {site.described}, {site.weight!r} and {other.weight!r}, would get an "
                "adapter, and their sum is not the product of two adapted weights; choose one of them"
            )
        if len(site.dims) > 2 and not site.is_conv:
            _check_rank(model, site)
    if len(adapters) > 1:
        first, second, *_ = adapters.values()
        raise ModelError(
            f"{first.described} and {second.described} use the weight {first.weight!r} with different types, "
            "groups or numbers of dimensions, so they cannot share an adapter"
        )


def _check_rank(model: onnx.ModelProto, site: Site) -> None:
    """Raise ModelError unless what is multiplied by a batch of matrices is known to be no vector."""
    x = site.node.input[1 - site.place]
    ranks = {
        len(value.type.tensor_type.shape.dim)
        for graph in all_graphs(model.graph)
        for value in declared_values(graph)
        if value.name == x and value.type.tensor_type.HasField("shape")
    }
    ranks |= {len(t.dims) for graph in all_graphs(model.graph) for t in graph.initializer if t.name == x}
    if len(ranks) != 1 or min(ranks) < 2:
        known = "is a vector" if ranks == {1} else "has no known number of dimensions"
        raise ModelError(
            f"{site.described} multiplies {x!r}, which {known}, by the {len(site.dims)}-dimensional weight "
            f"{site.weight!r}; an adapter needs at least two dimensions (onnx.shape_inference can tell)"
        )


def _add(
    model: onnx.ModelProto,
    chosen: Mapping[str, list[Site]],
    settings: Mapping[str, tuple[int, float]],
    seed: int | None,
) -> None:
    """Add adapters to the model, with zeros as A if `seed` is None."""
    opset = opset_of(model)
    if opset < _OLDEST_OPSET:
        raise ModelError(
            f"the model has opset {opset}; adapters need at least {_OLDEST_OPSET} (onnx.version_converter)"
        )
    taken = set(defined(model)) | {node.name for graph in all_graphs(model.graph) for node in graph.node}
    after: dict[int, list[onnx.NodeProto]] = {}
    changed: dict[int, onnx.GraphProto] = {}
    entries = dict(_recorded_in(model))
    for weight, sites in chosen.items():
        rank, alpha = settings[weight]
        adapter = adapter_for(sites[0], rank)
        for site in sites:
            output = site.node.output[0]
            name = _naming(output, taken)
            site.node.output[0] = name("lora_base")
            nodes = adapter_nodes(adapter, site, site.node.output[0], name, opset)
            nodes[-1].output[0] = output
            nodes[-1].name = name("lora")
            after[id(site.node)] = nodes
            changed[id(site.graph)] = site.graph
        _add_tensors(model, adapter, alpha / rank, seed)
        entries[weight] = (rank, alpha)
    # The inner graphs first: a node that is put back is a copy, with its subgraphs.
    for graph in reversed(list(all_graphs(model.graph))):
        if id(graph) in changed:
            replace(graph.node, [new for node in graph.node for new in (node, *after.get(id(node), ()))])
    _record(model, entries)


def _naming(output: str, taken: set[str]) -> Callable[[str], str]:
    def name(suffix: str) -> str:
        free, number = f"{output}.{suffix}", 1
        while free in taken:
            number += 1
            free = f"{output}.{suffix}_{number}"
        taken.add(free)
        return free

    return name


def _add_tensors(model: onnx.ModelProto, adapter: Adapter, scale: float, seed: int | None) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(adapter.type)
    a_shape, b_shape = adapter.shapes
    a = np.zeros(a_shape, dtype) if seed is None else _kaiming(adapter, seed).astype(dtype)
    arrays = {adapter.a: a, adapter.b: np.zeros(b_shape, dtype), adapter.scale: _rounded(scale, dtype)}
    if not math.isfinite(arrays[adapter.scale]) or arrays[adapter.scale] == 0:
        raise TrainingError(
            f"alpha / rank is {scale}, which is out of the range of {dtype} ({adapter.weight!r})"
        )
    for name, array in arrays.items():
        set_value(model.graph.initializer.add(name=name, data_type=adapter.type, dims=array.shape), array)
        if model.ir_version < FIRST_WITH_CONSTANTS:
            model.graph.input.append(helper.make_tensor_value_info(name, adapter.type, array.shape))


def _rounded(scale: float, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.array(scale, dtype)


def _kaiming(adapter: Adapter, seed: int) -> np.ndarray:
    """Return A as PyTorch initializes linear layers: Kaiming uniform with a = sqrt(5)."""
    digest = hashlib.sha256(adapter.weight.encode()).digest()
    generator = np.random.default_rng([seed, *np.frombuffer(digest, "<u4").tolist()])
    bound = 1 / math.sqrt(max(adapter.fan_in, 1))
    return generator.uniform(-bound, bound, adapter.shapes[0])


def _value(tensor: onnx.TensorProto, folder: str) -> np.ndarray:
    try:
        value: np.ndarray = numpy_helper.to_array(tensor, folder)
    except (OSError, ValueError, TypeError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"cannot read the tensor {tensor.name!r}: {error} (give the path of a model with external data)"
        ) from error
    return value


def _adapted(model: onnx.ModelProto) -> list[Adapted]:
    """Return the nodes with adapters; raises ModelError for tensors that no node uses as an adapter."""
    pairs = adapter_names(tensor.name for tensor in model.graph.initializer)
    adapted = find_adapted(find_sites(model), model, opset_of(model)) if pairs else []
    found = {each.adapter.weight for each in adapted}
    for weight, (a, b) in pairs.items():
        if weight not in found:
            raise ModelError(
                f"{a!r} and {b!r} are not an adapter as add_lora writes it; the nodes around them differ"
            )
    return adapted


def _adapters(model: onnx.ModelProto) -> dict[str, Adapter]:
    """Return the adapters of a model by weight, in the order of their tensors."""
    found = {each.adapter.weight: each.adapter for each in _adapted(model)}
    return {
        weight: found[weight] for weight in adapter_names(tensor.name for tensor in model.graph.initializer)
    }


def _alphas(model: onnx.ModelProto, adapters: Mapping[str, Adapter], folder: str) -> dict[str, float]:
    """Return alpha by weight: as recorded, unless the scale in the model is another one."""
    recorded = _recorded_in(model)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found = {}
    for weight, adapter in adapters.items():
        scale = _value(tensors[adapter.scale], folder)
        rank, alpha = recorded.get(weight, (adapter.rank, math.nan))
        same = rank == adapter.rank and _rounded(alpha / rank, scale.dtype) == scale
        found[weight] = alpha if same else float(scale) * adapter.rank
    return found


def _record(model: onnx.ModelProto, entries: Mapping[str, tuple[int, float]]) -> None:
    text = json.dumps({weight: {"rank": rank, "alpha": alpha} for weight, (rank, alpha) in entries.items()})
    entry = next((e for e in model.metadata_props if e.key == _METADATA), None)
    if entry is None:
        entry = model.metadata_props.add(key=_METADATA)
    entry.value = text


def _recorded_in(model: onnx.ModelProto) -> dict[str, tuple[int, float]]:
    text = next((entry.value for entry in model.metadata_props if entry.key == _METADATA), None)
    return _recorded(text, "metadata_props of the model")


def _recorded(text: str | None, where: str) -> dict[str, tuple[int, float]]:
    """Return rank and alpha by weight; nothing if there is no text."""
    if text is None:
        return {}
    try:
        found = {weight: (entry["rank"], entry["alpha"]) for weight, entry in json.loads(text).items()}
        for rank, alpha in found.values():
            _check_numbers(rank, alpha, 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TrainingError) as error:
        raise CheckpointError(f"{_METADATA} in {where} is damaged: {error}") from error
    return {weight: (rank, float(alpha)) for weight, (rank, alpha) in found.items()}


def _check_arrays(arrays: Mapping[str, np.ndarray], adapters: Mapping[str, Adapter], where: str) -> None:
    """Raise CheckpointError unless the arrays are those of the adapters."""
    wanted: dict[str, tuple[tuple[int, ...], int]] = {}
    for adapter in adapters.values():
        wanted.update(zip((adapter.a, adapter.b), ((s, adapter.type) for s in adapter.shapes), strict=True))
    missing = [name for name in wanted if name not in arrays]
    superfluous = [name for name in arrays if name not in wanted]
    if missing or superfluous:
        parts = [f"{len(missing)} are missing, such as {missing[0]!r}"] if missing else []
        parts += (
            [f"{len(superfluous)} are not in the model, such as {superfluous[0]!r}"] if superfluous else []
        )
        raise CheckpointError(
            f"the tensors of {where} are not the adapters of the model: {', and '.join(parts)}"
        )
    for name, (shape, kind) in wanted.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != helper.tensor_dtype_to_np_dtype(kind):
            expected = describe(np.empty(0, helper.tensor_dtype_to_np_dtype(kind)))[:-3]
            raise CheckpointError(
                f"{name!r} is {describe(array)} in {where}, but {expected}{list(shape)} in the model"
            )
