"""What RNN, GRU and LSTM have in common: attributes, operands and their shapes, layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ortgrad.errors import NodeError
from ortgrad.operators.declaration import Choice, Operand, Shape
from ortgrad.ops.recurrent._activations import Activation, parse_activations

if TYPE_CHECKING:
    from ortgrad.autodiff.rules import ForwardNode

T = TypeVar("T")
C = TypeVar("C", bound="Cell")

ATTRIBUTES = {
    "activations": list[str],
    "activation_alpha": list[float],
    "activation_beta": list[float],
    "clip": float,
    "direction": Choice("forward", "reverse", "bidirectional"),
    "hidden_size": int,
    "layout": 0,
}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}

# The axes of each kind of operand in layout 0: time T, batch N, inputs I, directions D, hidden size H,
# gates G (all of them side by side, each of the hidden size). In layout 1, the batch comes first.
AXES = {
    "X": ["T", "N", "I"],
    "W": ["D", "G", "I"],
    "R": ["D", "G", "H"],
    "B": ["D", "2G"],
    "P": ["D", "3H"],
    "SL": ["N"],
    "state": ["D", "N", "H"],
    "states": ["T", "D", "N", "H"],
    "gates": ["T", "D", "N", "G"],
}
# The operands that have the same name everywhere; R comes first of those that the hidden size is read from.
SHARED_KINDS = {name: name for name in ("X", "R", "W", "B", "SL")}


def _axes(kind: str, batch_first: int) -> list[str]:
    return sorted(AXES[kind], key=lambda axis: axis != "N") if batch_first else AXES[kind]


@dataclass(frozen=True)
class Operands(Generic[T]):
    """What a recurrent operator reads, as arrays or as values of a graph."""

    x: T
    w: T
    r: T
    b: T | None
    lengths: T | None
    initial: Sequence[T | None]  # of each state
    peepholes: T | None = None


@dataclass(frozen=True)
class Saved(Generic[T]):
    """What the gradient of a recurrent operator reads besides: results of the forward pass, and gradients."""

    states: Sequence[T]  # each state after all steps
    gates: T  # after the activations
    d_states: T | None  # the gradient of the first state after all steps
    d_finals: Sequence[T | None]  # the gradient of each final state


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent operator with its attributes; each kind adds those that only it has."""

    gate_count: ClassVar[int]
    default_activations: ClassVar[Sequence[str]]  # of one direction
    # The kinds of the outputs of the operator that saves what the gradient needs.
    training_outputs: ClassVar[Sequence[str]] = ()

    reverse: tuple[bool, ...]  # for each direction
    activations: Sequence[Sequence[Activation]]  # of each direction
    clip: float | None
    hidden_size: int | None
    batch_first: bool

    @classmethod
    def read(cls: type[C], *, gradient: bool, **attributes: Any) -> C:
        """The cell of a node with these attributes; for its `gradient`, the activations must have one."""
        given = {name: attributes.pop(name) for name in ATTRIBUTES}
        clip, layout, names = given["clip"], given["layout"], given["activations"]
        if clip is not None and not clip > 0:
            raise NodeError(f"clip is {clip}; it must be positive")
        if layout not in (0, 1):
            raise NodeError(f"layout is {layout}; it must be 0 or 1")
        reverse, count = _DIRECTIONS[given["direction"]], len(cls.default_activations)
        default = [*cls.default_activations] * len(reverse)
        names = names or default
        if len(names) != len(default):
            raise NodeError(f"activations has {len(names)} names; there must be {len(default)}")
        functions = parse_activations(
            names, given["activation_alpha"], given["activation_beta"], gradient=gradient
        )
        by_direction = [functions[i : i + count] for i in range(0, len(functions), count)]
        return cls(reverse, by_direction, clip, given["hidden_size"], layout == 1, **attributes)

    def axes(self, kind: str) -> list[str]:
        """The axes of a kind of operand in the layout of the node."""
        return _axes(kind, self.batch_first)

    @classmethod
    def patterns(cls, kinds: Mapping[str, str]) -> Callable[..., dict[str, str]]:
        """For `dims` of an operator: a function of the attributes, from the kinds of its inputs by name."""

        def dims(*, direction: str, hidden_size: int | None, layout: int, **_: Any) -> dict[str, str]:
            if hidden_size is not None and hidden_size < 0:
                raise ValueError(f"hidden_size is {hidden_size}; it must not be negative")

            def multiple(factor: int) -> str:
                if hidden_size is not None:
                    return str(factor * hidden_size)
                return "H" if factor == 1 else f"{factor}*H"

            named = {axis: multiple(factor) for axis, factor in cls._multiples().items()}
            named["D"] = str(len(_DIRECTIONS[direction]))
            return {
                name: " ".join(named.get(axis, axis) for axis in _axes(kind, layout))
                for name, kind in kinds.items()
            }

        return dims

    @classmethod
    def shapes(cls, kinds: Sequence[str]) -> Callable[..., Sequence[Shape | None]]:
        """For `shapes` of an operator that reads X, W and R first: a function, from the outputs' kinds."""

        def shapes(*operands: Operand | None, **attributes: Any) -> Sequence[Shape | None]:
            given = {n: o.shape if o else None for n, o in zip("XWR", operands, strict=False)}
            x, r, layout = given["X"], given["R"], attributes["layout"]
            known: dict[str, Any] = {"D": len(_DIRECTIONS[attributes["direction"]])}
            if x and len(x) == 3:
                known |= zip(_axes("X", layout), x, strict=True)
            hidden = attributes["hidden_size"] or (r[-1] if r else None)
            for axis, factor in cls._multiples().items():
                # A symbol cannot be multiplied.
                known[axis] = hidden if factor == 1 else factor * hidden if isinstance(hidden, int) else None
            return [
                given[kind] if kind in given else tuple(known.get(axis) for axis in _axes(kind, layout))
                for kind in kinds
            ]

        return shapes

    @classmethod
    def _multiples(cls) -> dict[str, int]:
        """The axes whose size is a multiple of the hidden size."""
        return {"H": 1, "3H": 3, "G": cls.gate_count, "2G": 2 * cls.gate_count}


def attributes_of(node: ForwardNode, *own: str) -> dict[str, Any]:
    """The attributes of a forward node; `own` are the names of those that only its kind has."""
    found = {name: node.attribute(name) for name in (*ATTRIBUTES, *own)}
    if "activations" not in node.forward.attributes:
        # RNN's schema has a default that is too long for one direction.
        found["activations"] = None
    return found
