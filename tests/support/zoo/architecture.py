"""What an architecture of the zoo is: a PyTorch module, and what its inputs look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

# Dimensions that are symbolic in the exported model: their sizes there, and in the test.
EXPORTED = {"N": 2, "T": 6, "E": 7}
TESTED = {"N": 3, "T": 9, "E": 11}
TORCHSCRIPT, DYNAMO, TEXT = EXPORTERS = ("torchscript", "dynamo", "text")

Draw = Callable[[torch.Generator, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Input:
    """Random values; dimensions with a name are symbolic."""

    shape: tuple[int | str, ...]
    draw: Draw

    def __call__(self, generator: torch.Generator, sizes: Mapping[str, int]) -> Tensor:
        return self.draw(generator, tuple(sizes[d] if isinstance(d, str) else d for d in self.shape))

    @property
    def axes(self) -> dict[int, str]:
        return {i: d for i, d in enumerate(self.shape) if isinstance(d, str)}


def normal(*shape: int | str, scale: float = 1.0) -> Input:
    return Input(shape, lambda generator, size: scale * torch.randn(size, generator=generator))


def integers(end: int, *shape: int | str) -> Input:
    return Input(shape, lambda generator, size: torch.randint(end, size, generator=generator))


def mask(*shape: int | str) -> Input:
    """Ones at the beginning of each row, zeros behind them."""

    def draw(generator: torch.Generator, size: tuple[int, ...]) -> Tensor:
        lengths = torch.randint(1, size[-1] + 1, (*size[:-1], 1), generator=generator)
        return (torch.arange(size[-1]) < lengths).long()

    return Input(shape, draw)


def constant(value: int) -> Input:
    return Input((), lambda generator, size: torch.tensor(value))


@dataclass(frozen=True)
class Architecture:
    """A module in evaluation mode unless `training`, its inputs, and the names of its outputs.

    `without` says why an exporter cannot export it. With `script` the TorchScript exporter gets the
    scripted module, which keeps its control flow. Without `fold` the exporters fold no constants: they would
    fold what the module computes from its parameters. `text` is the same in ONNX text.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Input]
    outputs: tuple[str, ...] = ("y",)
    training: bool = False
    script: bool = False
    fold: bool = True
    text: str | None = None
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def exporters(self) -> list[str]:
        given = EXPORTERS if self.text is not None else EXPORTERS[:2]
        return [exporter for exporter in given if exporter not in self.without]

    def module(self) -> nn.Module:
        """The module, with values of its parameters that occur nowhere else in it."""
        torch.manual_seed(0)
        module = self.make().train(self.training)
        scatter(module)
        return module

    def feeds(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {name: draw(generator, sizes) for name, draw in self.inputs.items()}


@torch.no_grad()
def scatter(module: nn.Module) -> None:
    """Move constant parameters and statistics off their values, and make all parameters different numbers.

    Exporters rename, transpose and concatenate parameters; their elements are found again by their values.
    """
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith(("running_mean", "running_var")) or (
            isinstance(value, nn.Parameter) and bool((value == value.flatten()[0]).all())
        ):
            value.add_(0.2 * torch.rand_like(value))
    parameters = list(module.parameters())
    flat = torch.cat([p.flatten() for p in parameters])
    seen = torch.unique(flat, return_counts=True)
    while seen[1].max() > 1 or bool((seen[0] == 0).any()):
        again = torch.isin(flat, seen[0][seen[1] > 1]) | (flat == 0)
        flat = torch.where(again, flat * (1 + 0.01 * torch.rand_like(flat)) + 1e-4 * again, flat)
        seen = torch.unique(flat, return_counts=True)
    for p, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.copy_(values.view_as(p))
