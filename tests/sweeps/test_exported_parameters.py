"""What is trained by default is what PyTorch calls parameters, under the names that PyTorch gives them."""

from __future__ import annotations

import functools
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from support.exported_parameters import (
    WAYS,
    Comparison,
    arrays,
    compare,
    export,
    make_distinct,
    warned,
    wrong_fresh,
    wrong_gradients,
    wrong_modules,
    wrong_names,
)
from torch import Tensor, nn
from torch.nn import functional

import ortgrad
from ortgrad import training
from ortgrad.cli import main
from ortgrad.graph.matching import left_out, matched
from ortgrad.graph.origins import Origins
from ortgrad.training.lora import add_lora, lora_parameters


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


class Convolutions(nn.Module):
    """With batch normalizations that can be folded into convolutions and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.first = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, groups=2)
        self.groups = nn.GroupNorm(3, 6)
        self.act = nn.PReLU(6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.BatchNorm2d(4, affine=False)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        # The exponent of a pooling that is learned, and a scale for every channel.
        self.p = nn.Parameter(torch.full((1,), 3.0))
        self.gamma = parameter(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(functional.avg_pool2d(self.stem(x), 2))
        y = self.instance(self.last(self.up(self.act(self.groups(self.down(y))))))
        y = (y * y + 0.5).pow(self.p).mean((2, 3))
        return self.head(y * self.gamma)


class Transformer(nn.Module):
    """Layers that are equal before a training, embeddings, and a table that is not trained."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 6, 8))
        self.register_buffer("table", torch.sin(torch.arange(48.0)).reshape(1, 6, 8), persistent=False)
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3, bias=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y = torch.cat([self.cls, self.words(ids)], 1) + self.positions
        return self.head(self.frozen(self.norm(self.enc(y + 0.1 * self.table))))


class Scalars(nn.Module):
    """Learnable scalars, constants of attention, and tensors that only become integers."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        self.logit_bias = nn.Parameter(torch.tensor(-1.5))
        self.mix = nn.Parameter(torch.tensor([0.3]))
        self.q = nn.Linear(8, 8)
        self.kv = nn.Linear(8, 8)
        self.latents = nn.Parameter(torch.randn(1, 2, 3, 4))
        self.register_buffer("bins", torch.tensor([0.25, 1.75, 2.5]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, kv = (f(x).reshape(1, 5, 2, 4).transpose(1, 2) for f in (self.q, self.kv))
        y = functional.scaled_dot_product_attention(q, kv, kv) * self.mix
        z = functional.scaled_dot_product_attention(self.latents, kv, kv)
        picked = y[:, :, (self.bins * 1.5).long()]
        return picked * self.logit_scale.exp() + self.logit_bias, z


class Recurrent(nn.Module):
    """Layers whose weights both exporters put together, and an initial state that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(6, 4, batch_first=True)
        self.start = parameter(1, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0], self.start)[0]


class Tied(nn.Module):
    """Weights that are used several times, in other forms and under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.shared = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.again = nn.Linear(6, 6)
        self.again.weight = self.inner[0].weight
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        y = self.shared(torch.tanh(self.shared(self.words(ids))))
        return self.head(self.again(self.inner(y)))


class Computed(nn.Module):
    """Operands that are computed from parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.a, self.b, self.c, self.d = (parameter(4, 4) for _ in range(4))
        self.grid = parameter(1, 4, 4, 2)
        self.long = parameter(1, 9, 4)
        self.latents = parameter(4, 4)
        self.of_latents = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            self.normed(x),
            torch.add(x, self.a, alpha=2.0),
            functional.cosine_similarity(x, self.b, dim=-1),
            x @ self.c.t() + self.c,
            torch.einsum("nij,jk->nik", x, self.d),
            functional.grid_sample(x[:, None], self.grid, align_corners=True),
            x + self.long[:, :4],
            x @ self.of_latents(self.latents),
        )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "convolutions": (Convolutions, (torch.linspace(-1, 1, 2 * 2 * 14 * 14).reshape(2, 2, 14, 14),)),
    "transformer": (Transformer, (torch.tensor([[1, 4, 7, 2, 9]]),)),
    "scalars": (Scalars, (torch.linspace(-1, 1, 40).reshape(1, 5, 8),)),
    "recurrent": (Recurrent, (torch.linspace(-1, 1, 20).reshape(1, 5, 4),)),
    "tied": (Tied, (torch.tensor([[1, 4, 7]]),)),
    "computed": (Computed, (torch.linspace(-1, 1, 16).reshape(1, 4, 4),)),
}
# The older exporter does not tell parameters from buffers, such as a grid that is not trained.
LEFT_OUT = {"computed": ["grid"]}
# What it has computed from parameters has a name that tells nothing.
UNTOLD = {
    "convolutions": ["stem.0.weight", "stem.1.weight", "stem.1.bias"],
    "scalars": ["latents"],
    "computed": ["a", "long"],
}


@functools.cache
def exported(case: str, way: str) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    module = make_distinct(CASES[case][0]().eval())
    return module, export(module, CASES[case][1], way)


@functools.cache
def compared(case: str, way: str) -> Comparison:
    module, model = exported(case, way)
    return compare(module, CASES[case][1], model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_the_default_has_the_elements_and_names_of_pytorchs_parameters(case: str, way: str) -> None:
    found = compared(case, way)
    left_out = LEFT_OUT.get(case, []) if way.startswith("script") else []
    assert found.left_out == left_out
    if way == "script":
        assert {*left_out, *UNTOLD.get(case, [])} == {*found.changed}
        found.left_out = []
        assert not found.unexplained(way)
    elif way.endswith("as written"):
        # Nothing is merged, folded or moved, and there is nothing to warn about.
        assert found.changed == left_out
        assert not (found.others or found.copied or found.chosen.warning)
    else:
        assert not found.unexplained(way)
        assert bool(found.chosen.warning) == (not found.exact)
    # In the same test, since an export takes a second: the names of PyTorch, and patterns for all modules.
    assert not wrong_names(found, way)
    assert not wrong_modules(found, way)


@pytest.mark.parametrize(
    ("case", "way"), [("transformer", "dynamo"), ("recurrent", "script"), ("scalars", "dynamo as written")]
)
def test_gradients_under_the_names_of_pytorch(case: str, way: str) -> None:
    module, model = exported(case, way)
    assert not wrong_gradients(module, CASES[case][1], model, compared(case, way))


@pytest.mark.parametrize("way", ["dynamo", "script", "script as written"])
def test_equal_parameters_are_named_where_they_are_merged(way: str) -> None:
    """Those of layers that are copies of each other, whole matrices too, before a training."""
    factory, args = CASES["transformer"]
    torch.manual_seed(0)
    module = factory().eval()
    model = export(module, args, way)
    assert not wrong_fresh(module, args, model)
    with warned() as texts:
        training.parameters(model)
    matrix = "'enc.layers.0.linear1.weight', 'enc.layers.1.linear1.weight'"
    assert (matrix in "".join(texts)) == (not way.endswith("as written"))


def test_the_cure() -> None:
    """What a warning advises gives a file without a warning, by the exporter that has written this one."""
    text = compared("convolutions", "dynamo").chosen.warning
    assert text.endswith("To keep them, export by torch.onnx.export(..., dynamo=True, optimize=False)")
    text = compared("convolutions", "script").chosen.warning
    assert "dynamo=False, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False" in text
    for way in ("dynamo as written", "script as written"):
        assert not compared("convolutions", way).chosen.warning


def test_what_was_folded_is_named() -> None:
    """A convolution that contains a batch normalization has PyTorch's name, but not PyTorch's weight."""
    _, model = exported("convolutions", "dynamo")
    folded = r"normalizations \('stem\.1\.weight', 'stem\.1\.bias'\) were folded into 'stem\.0\.weight'"
    with pytest.warns(ortgrad.ParameterWarning, match=folded):
        ortgrad.build_gradient_model(model, wrt="stem.0.weight")
    with pytest.raises(
        ortgrad.OrtgradError, match=r"folded it into 'stem\.0\.weight': export by .*optimize=False"
    ):
        training.parameters(model, "stem.1.weight")
    with warned() as texts:
        assert training.parameters(model, "*[p1].bias") == ["up.bias"]
    assert "'*[p1].bias' matches only 'up.bias': the exporter has removed or folded 'stem.1.bias'" in texts[0]


def changed_by_groups(model: onnx.ModelProto, pattern: str) -> set[str]:
    """Return the parameters that a step changes if only the group of the pattern has a learning rate."""
    groups = {pattern: {"learning_rate": 0.5, "weight_decay": 0.1}}
    trainer = training.Trainer(model, loss="mse", optimizer=training.SGD(0.0), groups=groups)
    before = {name: array.copy() for name, array in trainer.state.trainable.arrays.items()}
    (source,), (output,) = model.graph.input, model.graph.output
    shapes = [[d.dim_value or 2 for d in v.type.tensor_type.shape.dim] for v in (source, output)]
    trainer.step((np.ones(shapes[0], np.int64), np.ones(shapes[1], np.float32)))
    after = trainer.state.trainable.arrays
    return {name for name, array in before.items() if not np.array_equal(array, after[name])}


def names_everywhere(model: onnx.ModelProto, pattern: str, folder: Path) -> dict[str, set[str]]:
    """Return what a pattern stands for in all places that take one."""
    built = ortgrad.build_gradient_model(model, wrt=pattern)
    trainer = training.Trainer(model, loss="mse", wrt=pattern)
    file, backward = folder / "model.onnx", folder / "backward.onnx"
    onnx.save(model, file)
    assert main(["grad", str(file), "--wrt", pattern, "-o", str(backward)]) == 0
    outputs = {value.name for value in model.graph.output}
    gradients = [{v.name for v in each.graph.output} - outputs for each in (built, onnx.load(backward))]
    assert main(["artifacts", str(file), "--wrt", pattern, "--loss", "mse", "-o", str(folder)]) == 0
    trained = onnx.load(folder / "training_model.onnx").graph.input
    suffix = "_grad.accumulation.buffer"
    return {
        "parameters": {*training.parameters(model, pattern)},
        "exclude": {*training.parameters(model)} - {*training.parameters(model, exclude=pattern)},
        "wrt": {name.removesuffix("_grad") for name in gradients[0]},
        "grad": {name.removesuffix("_grad") for name in gradients[1]},
        "Trainer": {*trainer.state.trainable.arrays},
        "artifacts": {v.name.removesuffix(suffix) for v in trained if v.name.endswith(suffix)},
        "groups": changed_by_groups(model, pattern),
    }


@pytest.mark.filterwarnings("ignore::ortgrad.ParameterWarning")
def test_a_pattern_means_the_same_everywhere(tmp_path: Path) -> None:
    module, model = exported("transformer", "dynamo")
    pattern = "enc.layers.1.*"
    expected = np.sort(np.concatenate([p.detach().ravel() for p in module.enc.layers[1].parameters()]))
    values = arrays(model)
    for place, names in names_everywhere(model, pattern, tmp_path).items():
        found = np.sort(np.concatenate([values[name].ravel() for name in names]))
        np.testing.assert_array_equal(found, expected, place)


@pytest.mark.parametrize("way", ["dynamo", "script"])
def test_adapters_by_the_names_of_pytorch(way: str) -> None:
    _, model = exported("transformer", way)
    adapted = add_lora(model, ["enc.*.linear?.weight"], rank=2)
    places = compared("transformer", way).places
    names = [f"enc.layers.{i}.linear{j}.weight" for i in (0, 1) for j in (1, 2)]
    expected = {f"{places[name][0]}.lora_{part}" for name in names for part in "AB"}
    assert {*lora_parameters(adapted)} == expected
    assert expected <= {*training.parameters(adapted)}
    with pytest.raises(ortgrad.OrtgradError, match=r"did you mean 'enc\.layers\.0\.linear1\.weight'"):
        add_lora(model, ["enc.layers.0.linear1.weigth"], rank=2)


PATTERNS = ["enc.*", "enc*", "*.layers.1.*", "enc.layers.1.*", "*layers.[01].linear?*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_for_a_module_that_misses_a_weight(pattern: str) -> None:
    names = [
        "enc.layers.0.linear1.weight",
        "enc.layers.1.linear1.weight",
        "enc.layers.1.linear1.bias",
        "other",
    ]
    origins = Origins("dynamo", readers={name: [name.rpartition(".")[0]] for name in names[:-1]})
    origins.readers["other"] = ["dec", "enc.layers.1.linear2"]
    found = matched(pattern, names, origins)
    assert found == (names[:-1] if "0" in pattern or "1" not in pattern else names[1:-1])
    text = left_out(pattern, found, names, origins)
    assert text is not None
    assert re.search(
        rf"{re.escape(repr(pattern))} matches only 'enc\.\S*, .*also read 'other', which it does not", text
    )
    # With the name that the module has for it, nothing is missing.
    origins.aliases["other"] = ["enc.layers.1.linear2.weight"]
    found = matched(pattern, names, origins)
    assert "other" in found
    assert left_out(pattern, found, names, origins) is None
    # These do not stand for the module.
    for each in ("enc.*.bias", "*.weight", "enc.layers.1.linear1.*", "enc.layers.1.linear1.weight"):
        assert left_out(each, matched(each, names[:-1], origins), names, origins) is None


def test_a_tensor_that_may_belong_to_a_module() -> None:
    """An operand of an Add in the module around `proj`: its bias in another form, or anything else."""
    names = ["mixer.proj.weight", "onnx::Add_42"]
    origins = Origins("torchscript", unknown=names[1:], readers={names[1]: ["mixer"]})
    text = left_out("mixer.proj.*", names[:1], names, origins)
    assert text is not None
    assert text.endswith(
        "matches only 'mixer.proj.weight': the file does not say to which module 'onnx::Add_42' belonged"
    )
    assert left_out("mixer.proj.weight", names[:1], names, origins) is None


def test_a_name_that_stands_for_one_of_two_copies() -> None:
    _, model = exported("tied", "dynamo")
    for name, count in (("head.weight", 1), ("words.weight", 2), ("words.*", 2)):
        with warned() as texts:
            found = training.parameters(model, name)
        assert len(found) == count
        assert re.search(r"now separate: 'head\.weight' and 'val_\d+' of 'head\.weight'", texts[0])


def test_constants_that_become_integers() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x) => (float[M, 3] y)
        <float[2] rows = {0, 1}, float[2] also = {1, 0}, float[3] w = {1, 2, 3}>
        {
            half = Constant <value = float[2] {0.5, 1.5}> ()
            i = Cast<to = 7>(rows) j = CastLike(also, i) f = Floor(half) k = Cast<to = 7>(f)
            n = Add(i, j) m = Add(n, k)
            z = Mul(x, w) a = Gather(z, m) b = Gather(z, i) y = Add(a, b)
        }"""
    )
    assert training.parameters(model) == ["w"]
    built = ortgrad.build_gradient_model(model)
    assert [value.name for value in built.graph.output] == ["y", "w_grad"]


@pytest.mark.parametrize("show", [True, None])
def test_fit_says_how_much_it_trains(show: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 40] x) => (float[N, 30] y)
        { z = MatMul(x, w) y = Add(z, b) }"""
    )
    for name, shape in (("w", (40, 30)), ("b", (30,))):
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
    stream = io.StringIO() if show else Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    data = (np.zeros((1, 40), np.float32), np.zeros((1, 30), np.float32))
    result = training.fit(model, data, loss="mse", progress=show)
    assert "training 2 parameters with 1,230 elements\n" in stream.getvalue()
    assert (result.parameters, result.elements) == (2, 1230)
