"""Signatures are explicit, and an unknown keyword is a TypeError with the nearest name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import onnx
import pytest

import ortgrad
import ortgrad.training.api
import ortgrad.training.onnxblock
from ortgrad import training
from ortgrad.errors import ArgumentTypeError, TrainingError
from ortgrad.operators.declaration import all_operators
from ortgrad.training import Trainer, artifacts, lora

PUBLIC = (
    *(ortgrad, training, training.api, artifacts, lora, training.onnxblock, training.onnxblock.blocks),
    *(training.onnxblock.loss, training.onnxblock.optim),
)
# What is a subclass's own: they take any keywords.
ANY = {"Block.build", "ForwardBlock.build", "TrainingBlock.build"}


def callables() -> dict[str, Callable[..., Any]]:
    """All public functions, constructors and methods, with the package's own names for arguments."""
    found: dict[str, Callable[..., Any]] = {}
    for module in PUBLIC:
        defined = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", defined):
            value = getattr(module, name)
            if inspect.isfunction(value) and value.__module__.startswith("ortgrad"):
                found |= {name: value} if keywords_of(value) else {}
            elif isinstance(value, type) and value.__module__.startswith("ortgrad"):
                found |= methods(value)
    return {name: f for name, f in found.items() if not name.startswith("_") and name not in ANY}


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    if issubclass(kind, (BaseException, Enum)):
        return {}
    found = {}
    for each in reversed(kind.__mro__):
        for name in vars(each) if each.__module__.startswith("ortgrad") else ():
            value = getattr(kind, name)
            public = name in ("__init__", "__call__") or not name.startswith("_")
            if public and callable(value) and keywords_of(value):
                label = kind.__name__ if name == "__init__" else f"{kind.__name__}.{name}"
                found[label] = value
    return found


def keywords_of(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.name != "self"]


CALLABLES = callables()


def misspelt(name: str) -> list[str]:
    half = len(name) // 2
    variants = [name + "s", name[:-1], name[:half] + name[half + 1 :], name.upper(), f"{name}_"]
    variants.append(name[:half] + name[half : half + 2][::-1] + name[half + 2 :])
    variants.append(name.replace("_", ""))
    return variants


@pytest.mark.parametrize("name", CALLABLES)
def test_signatures_are_explicit(name: str) -> None:
    for parameter in inspect.signature(CALLABLES[name]).parameters.values():
        assert parameter.kind is not parameter.VAR_KEYWORD
        assert parameter.name == "self" or parameter.annotation is not parameter.empty


def test_the_whole_interface_is_swept() -> None:
    expected = {"fit", "Trainer", "Trainer.save", "InferenceSession.run", "Module.train", "Optimizer"}
    expected |= {"generate_artifacts", "CrossEntropyLoss.build", "Linear", "base", "operator"}
    assert expected <= set(CALLABLES)
    assert len(CALLABLES) > 60


@pytest.mark.parametrize("name", CALLABLES)
def test_misspelt_keywords_offer_the_nearest(name: str) -> None:
    function = CALLABLES[name]
    check_keywords(function, keywords_of(function))


BUILDERS = {operator.builder_name: operator for operator in all_operators()}


@pytest.mark.parametrize("name", BUILDERS)
def test_misspelt_keywords_of_builders(name: str) -> None:
    operator = BUILDERS[name]
    known = [p.name for p in operator.inputs] + ["outputs", *operator.attributes, "name", "dtype"]
    check_keywords(getattr(ortgrad.nodes, name), known)


def check_keywords(function: Callable[..., Any], known: list[str]) -> None:
    for keyword in known:
        for variant in misspelt(keyword):
            # Short names and numbered ones have several neighbours, or none that is similar enough.
            if variant in known or len(keyword) < 5 or keyword[-1].isdigit() or not variant.isidentifier():
                continue
            with pytest.raises(TypeError) as caught:
                function(**{variant: 1})
            assert isinstance(caught.value, ArgumentTypeError)
            text = str(caught.value)
            assert f"has no argument {variant!r}" in text
            assert f"did you mean {keyword!r}?" in text
    with pytest.raises(ArgumentTypeError, match="has no argument 'zzzz_qqqq'"):
        function(zzzz_qqqq=1)


def test_fit_has_all_options_of_trainer_and_of_its_fit() -> None:
    ours = inspect.signature(training.fit).parameters
    for function in (Trainer, Trainer.fit):
        for name, parameter in inspect.signature(function).parameters.items():
            if name != "self":
                assert ours[name].default == parameter.default
                assert ours[name].annotation == parameter.annotation
    theirs = {*inspect.signature(Trainer).parameters, *inspect.signature(Trainer.fit).parameters}
    assert set(ours) == theirs - {"self"}


def test_options_of_losses_reach_them() -> None:
    options = set(inspect.signature(training.add_loss).parameters) - {"model", "name"}
    assert options <= set(inspect.signature(Trainer).parameters)


MODEL = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
    g (float[N, 2] x) => (float[N, 2] y, float loss) <float[2, 2] w = {1, 2, 3, 4}>
    { y = MatMul(x, w) loss = ReduceMean<keepdims = 0>(y) }""")
DATA = (np.ones((4, 2), np.float32),)


@pytest.mark.parametrize(
    ("wrong", "offered"),
    [
        ("epoch", "epochs"),
        ("lr", "learning_rate"),
        ("batchsize", "batch_size"),
        ("optimiser", "optimizer"),
        ("validation_data", "evaluate"),
        ("metrics", "metric"),
        ("verbose", "progress"),
    ],
)
def test_fit(wrong: str, offered: str) -> None:
    with pytest.raises(TypeError, match=rf"fit\(\) has no argument '{wrong}'; did you mean '{offered}'\?"):
        training.fit(MODEL, DATA, loss="loss", **{wrong: 1})  # type: ignore[arg-type]


OPTIONS: dict[str, Any] = {
    "reduction": "sum",
    "weight": np.ones(2, np.float32),
    "pos_weight": np.ones(2, np.float32),
    "ignore_index": 1,
    "axis": 1,
    "delta": 2.0,
    "types": {"target": (np.float32, ["N", 2])},
}
TAKEN = {
    "cross-entropy": {"reduction", "weight", "ignore_index", "axis"},
    "mse": {"reduction"},
    "l1": {"reduction"},
    "huber": {"reduction", "delta"},
    "bce": {"reduction", "weight", "pos_weight"},
    "loss": set(),
    "function": {"types"},
    "block": set(),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", TAKEN)
def test_options_of_another_loss_are_refused(kind: str, option: str) -> None:
    loss: Any = kind
    if kind == "function":
        loss = lambda op, output, target: op.ReduceMean(output - target, keepdims=0)  # noqa: E731
    elif kind == "block":
        loss = training.onnxblock.loss.MSELoss()
    given = {option: OPTIONS[option]}
    if option in TAKEN[kind]:
        Trainer(MODEL, loss=loss, target="z" if kind == "block" else None, **given)
        return
    with pytest.raises(TrainingError, match=f"{option} is for "):
        Trainer(MODEL, loss=loss, target="z" if kind == "block" else None, **given)


def test_a_warning_shows_the_line_of_the_caller() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w) y = Floor(a) }""")
    with pytest.warns(ortgrad.StoppedGradientWarning) as caught:
        ortgrad.build_gradient_model(model, wrt="w", straight_through=False)
    assert caught[0].filename == __file__
    with pytest.warns(ortgrad.StoppedGradientWarning) as caught:
        Trainer(model, loss="mse", wrt="w")
    assert caught[0].filename == __file__
