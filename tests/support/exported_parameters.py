"""Compare the default parameters of exported models with those of the PyTorch modules.

The parameters of a module get elements that are all different, so that they are found by value in the tensors
of the file, whatever the exporter has done with names and axes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import nn
from torch.utils import _pytree as pytree

import ortgrad
from ortgrad import training
from ortgrad.errors import NameNotFoundError
from ortgrad.graph import matching
from ortgrad.graph.exporters import read_origins
from ortgrad.training import selection
from support.exporters import keep_tables

# Both exporters, with and without what changes parameters.
WAYS = ("dynamo", "dynamo as written", "script", "script as written")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what PyTorch says about its own exporters."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.__trace", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    sink = io.StringIO()
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export(module: nn.Module, args: tuple[Any, ...], way: str, **options: Any) -> onnx.ModelProto:
    """Return the module as a model; it is in evaluation mode unless the exporter shall keep everything."""
    module = module.eval()
    with quiet():
        if way.startswith("dynamo"):
            keep_tables()
            program = torch.onnx.export(
                module, args, dynamo=True, optimize=way == "dynamo", verbose=False, **options
            )
            return program.model_proto
        if way == "script as written":
            options |= {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
        file = io.BytesIO()
        # Exporting in training mode updates running statistics.
        torch.onnx.export(copy.deepcopy(module), args, file, dynamo=False, **options)
    return onnx.load_from_string(file.getvalue())


def make_distinct(module: nn.Module) -> nn.Module:
    """Give all elements of the parameters different values, and running statistics others than 0 and 1."""
    parameters = list(module.parameters())
    count = sum(p.numel() for p in parameters)
    rng = np.random.default_rng(0)
    # Random numbers from 2^-12 to 2^-3: those that are computed from others are rarely equal to a third.
    low, high = np.float32([2**-12, 2**-3]).view(np.int32)
    drawn = np.unique(rng.integers(low, high, count + count // 4 + 16, dtype=np.int32))
    bits = rng.permutation(drawn)[:count]
    assert bits.size == count, "too many elements"
    numbers = torch.tensor(bits.view(np.float32) * rng.choice(np.float32([-1, 1]), count))
    start = 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(numbers[start : start + p.numel()].reshape(p.shape))
            start += p.numel()
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.linspace(0.3, 0.9, buffer.numel()).reshape(buffer.shape))
    return module


def gradients(module: nn.Module, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Return the gradients of the sum of all outputs; those of parameters without influence are missing."""
    module = copy.deepcopy(module).eval()
    for p in module.parameters():
        p.requires_grad_(True)
    leaves = pytree.tree_leaves(module(*args))
    total = sum(leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    assert isinstance(total, torch.Tensor)
    total.backward()
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def all_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of every parameter by its first; tied ones have several."""
    tied: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(name)
    return {name: tied[id(p)] for name, p in module.named_parameters()}


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the floating-point initializers and constants of the main graph."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    found = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    return {name: array for name, array in found.items() if np.issubdtype(array.dtype, np.floating)}


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Yield a list to which the texts of all ParameterWarnings are added, in full."""
    texts: list[str] = []
    most, matching._MOST = matching._MOST, 10**9
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
    finally:
        matching._MOST = most
    assert {each.category for each in caught} <= {ortgrad.ParameterWarning}, [str(c.message) for c in caught]
    texts += [str(each.message) for each in caught]


class Names:
    """`training.parameters` of one model, without reading it each time."""

    def __init__(self, model: onnx.ModelProto) -> None:
        with warned() as texts:
            self.default = training.parameters(model)
        self.warning = "\n".join(texts)
        self._origins = read_origins(model)

    def names(self, name: str) -> list[str]:
        """Return the name of a tensor of the file, and those that it has in PyTorch."""
        return self._origins.names(name)

    def __call__(self, pattern: str) -> tuple[set[str], str]:
        """Return what a pattern matches, and the texts of its warnings."""
        with warned() as texts:
            found = selection.matching("patterns", [pattern], self.default, self._origins)
        return found, "\n".join(texts)


@dataclass
class Comparison:
    """What differs between the default parameters of a file and a module's."""

    chosen: Names
    # Parameters that influence an output, by the tensors of the file in which their elements are.
    places: dict[str, list[str]]
    # All names of a parameter; tied ones have several.
    aliases: dict[str, list[str]]
    # Parameters of which elements are not among the default, and tensors with elements of no parameter.
    changed: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    # Parameters that are in the file more than once.
    copied: list[str] = field(default_factory=list)
    # Tensors that are not among the default, and contain elements of parameters.
    left_out: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the default has exactly the elements of the parameters."""
        return not (self.changed or self.others or self.copied or self.left_out)

    def unexplained(self, way: str) -> list[str]:
        """Return the differences that the warning does not name; the older exporter may not know names."""
        texts = [f"{name} is left out" for name in self.left_out]
        for name in self.copied:
            # One of its tensors may be named in the place of it.
            if not any(map(self.warns, (name, *self.places[name]))):
                texts.append(f"{name}: copied")
        texts += [f"{name}: others" for name in self.others if not self.warns(name)]
        told = "folded into" in self.chosen.warning or "does not say from what" in self.chosen.warning
        if way != "script" or not told:
            texts += [f"{name}: changed" for name in self.changed if not self.warns(name)]
        return texts

    def warns(self, name: str) -> bool:
        """Return whether the warning contains one of the names."""
        names = self.aliases.get(name) or self.chosen.names(name)
        return any(f"'{each}'" in self.chosen.warning for each in names)


def compare(module: nn.Module, args: tuple[Any, ...], model: onnx.ModelProto) -> Comparison:
    """Compare the default with the parameters of a module with different elements that influence outputs."""
    reached = gradients(module, args)
    parameters = dict(module.named_parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters.values()]).numpy()
    owners = np.repeat(np.arange(len(parameters)), [p.numel() for p in parameters.values()])
    order = np.argsort(flat)
    flat, owners = flat[order], owners[order]
    assert (np.diff(flat) > 0).all(), "the elements must be different"
    chosen = Names(model)
    default = chosen.default
    result = Comparison(chosen, {name: [] for name in reached}, all_names(module))
    names = list(parameters)
    seen = np.zeros(flat.size, int)
    sizes = np.bincount(owners)
    for name, array in arrays(model).items():
        at = np.searchsorted(flat, array.reshape(-1)).clip(max=flat.size - 1)
        known = flat[at] == array.reshape(-1)
        # Few elements in a large tensor are equal by chance.
        hits = np.bincount(owners[at[known]], minlength=sizes.size)
        known &= (2 * hits >= np.minimum(sizes, array.size))[owners[at]]
        at = at[known]
        found = [names[i] for i in np.unique(owners[at]) if names[i] in reached]
        for each in found:
            result.places[each].append(name)
        if name in default:
            np.add.at(seen, at, 1)
            if not known.all():
                result.others.append(name)
        elif found and array.size > 1:
            result.left_out.append(name)
    for i, name in enumerate(names):
        if name in reached:
            counts = seen[owners == i]
            if not counts.all():
                result.changed.append(name)
            if (counts > 1).any():
                result.copied.append(name)
    return result


def wrong_names(comparison: Comparison, way: str) -> list[str]:
    """Return the parameters whose names in PyTorch do not stand for the tensors with their elements.

    A file tells at least one of the names of a tied parameter. One of the older exporter need not tell any.
    """
    wrong = []
    for name, places in comparison.places.items():
        if name in comparison.changed:
            continue
        known = 0
        for alias in comparison.aliases[name]:
            try:
                found, _ = comparison.chosen(alias)
            except NameNotFoundError:
                continue
            known += 1
            # The name of a tensor in the file stands for this one alone; of others, a warning tells.
            rest = set(places) - found
            if found - set(places) or (rest and not (found == {alias} and comparison.warns(alias))):
                wrong.append(f"{alias} stands for {found}; its elements are in {places}")
        if not known and way != "script":
            wrong.append(f"{name} is not known; its elements are in {places}")
    return wrong


def modules_of(names: Sequence[str]) -> list[str]:
    """Return all modules that contain the parameters, and those that contain these."""
    parts = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(p[:i]) for p in parts for i in range(1, len(p))))


def wrong_modules(comparison: Comparison, way: str) -> list[str]:
    """Return the modules whose pattern does not match all their parameters, with no warning that says so."""
    wrong = []
    for module in modules_of(list(comparison.places)):
        expected = {
            tensor
            for name, places in comparison.places.items()
            if name.startswith(f"{module}.")
            for tensor in places
            if tensor in comparison.chosen.default
        }
        try:
            found, text = comparison.chosen(f"{module}.*")
        except NameNotFoundError as error:
            # Tied parameters may be known by their names in other modules.
            names = [n for n in comparison.places if n.startswith(f"{module}.")]
            tied = [any(not a.startswith(f"{module}.") for a in comparison.aliases[n]) for n in names]
            if expected and not all(tied) and way != "script":
                wrong.append(f"{module}.*: {str(error)[:200]}")
            continue
        missing = expected - found
        if not all(f"'{name}'" in text for name in missing):
            wrong.append(f"{module}.* does not match {sorted(missing)}")
    return wrong


def wrong_fresh(module: nn.Module, args: tuple[Any, ...], model: onnx.ModelProto) -> list[str]:
    """Return the parameters that are not in the file, or share a tensor there, and that no warning names.

    For modules with equal parameters, which exporters merge.
    """
    reached = gradients(module, args)
    values = arrays(model)
    chosen = Names(model)
    wrong, owners = [], dict[str, str]()
    aliases = all_names(module)
    for name, parameter in module.named_parameters():
        if name not in reached or any(f"'{each}'" in chosen.warning for each in aliases[name]):
            continue
        found: set[str] = set()
        for alias in aliases[name]:
            with contextlib.suppress(NameNotFoundError):
                found |= chosen(alias)[0]
        if not found:
            wrong.append(f"{name} is not known")
            continue
        elements = np.sort(np.concatenate([values[each].ravel() for each in found]))
        if not np.array_equal(elements, np.sort(parameter.detach().numpy().ravel())):
            wrong.append(f"{name} stands for {found}, which have other elements")
        for each in found:
            if each not in chosen.default:
                wrong.append(f"{name}: {each} is not a parameter by default")
            if each in owners and owners[each] != name:
                wrong.append(f"{name} and {owners[each]} are both {each}")
            owners[each] = name
    return wrong


def _known(comparison: Comparison, name: str, places: list[str]) -> list[str]:
    try:
        comparison.chosen(name)
    except NameNotFoundError:
        return places
    return [name]


def wrong_gradients(
    module: nn.Module, args: tuple[Any, ...], model: onnx.ModelProto, comparison: Comparison
) -> list[str]:
    """Return the parameters whose gradients, of the sum of all outputs, are not those of PyTorch."""
    expected = gradients(module, args)
    outputs = [value.name for value in model.graph.output if value.type.tensor_type.elem_type == 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A file of the older exporter may not know a name.
        wrt = {
            each for name, places in comparison.places.items() for each in _known(comparison, name, places)
        }
        built = ortgrad.build_gradient_model(model, wrt=[*wrt], of=outputs)
    session = ortgrad.InferenceSession(built, kernels="onnx")
    feeds = {value.name: arg.numpy() for value, arg in zip(model.graph.input, args, strict=True)}
    values = ortgrad.InferenceSession(model.SerializeToString()).run(outputs, feeds)
    feeds |= {f"{name}_grad": np.ones_like(value) for name, value in zip(outputs, values, strict=True)}
    names = [value.name for value in session.get_inputs()]
    results = [value.name for value in session.get_outputs()]
    found = dict(zip(results, session.run(None, {n: feeds[n] for n in names if n in feeds}), strict=True))
    values_of, wrong = arrays(model), []
    for name, parameter in module.named_parameters():
        if name not in expected:
            continue
        elements = parameter.detach().numpy().ravel()
        order = np.argsort(elements)
        total = np.zeros(elements.size)
        for place in comparison.places[name]:
            array = values_of[place].ravel()
            at = order[np.searchsorted(elements[order], array).clip(max=elements.size - 1)]
            known = elements[at] == array
            np.add.at(total, at[known], found[f"{place}_grad"].ravel()[known])
        theirs = expected[name].ravel()
        if np.abs(total - theirs).max() > 1e-3 * max(float(np.abs(theirs).max()), 1e-6):
            wrong.append(f"{name}: the gradient differs")
    return wrong
