"""Data of all kinds: streams, lengths and schedules, and arrays of other libraries."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from ortgrad import training
from ortgrad.errors import ArgumentTypeError, OrtgradError, TrainingError
from ortgrad.training import SGD, Trainer

X = np.random.default_rng(0).standard_normal((24, 3)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 2, 24)
SIZE = 4
BATCHES = [(X[i : i + SIZE], LABELS[i : i + SIZE]) for i in range(0, 24, SIZE)]
MODEL = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
    g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, w) }""")


def trainer(**options: Any) -> Trainer:
    return Trainer(MODEL, **{"loss": "cross-entropy", "optimizer": SGD(0.1), "threads": 1, **options})


class Stream:
    """Batches again and again, without a length."""

    def __init__(self, batches: list[Any], endless: bool = False) -> None:
        self.batches, self.endless, self.given = batches, endless, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            for batch in self.batches:
                self.given += 1
                yield batch
            if not self.endless:
                return


class Samples(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from ((torch.tensor(x), int(y)) for x, y in zip(X, LABELS, strict=True))


UNSIZED: dict[str, Callable[[], Iterable[Any]]] = {
    "stream": lambda: Stream(BATCHES),
    "generator": lambda: iter(BATCHES * 4),
    "loader": lambda: torch.utils.data.DataLoader(Samples(), SIZE),
}
NEED_STEPS: list[dict[str, Any]] = [
    {"schedule": "cosine"},
    {"schedule": "linear"},
    {"warmup": 0.1},
    {"schedule": "linear", "warmup": 3},
    {"schedule": lambda step, total: 1 - step / total},
]


@pytest.mark.parametrize("kind", UNSIZED)
@pytest.mark.parametrize("options", NEED_STEPS, ids=range(len(NEED_STEPS)))
def test_schedules_that_need_the_number_of_steps(options: dict[str, Any], kind: str) -> None:
    """Without a length they are refused; with one, they are those of data that has one."""
    found = trainer(**options)
    before = found.state.parameter("w").copy()
    with pytest.raises(TrainingError, match="steps_per_epoch="):
        found.fit(UNSIZED[kind](), epochs=2)
    np.testing.assert_array_equal(found.state.parameter("w"), before)
    result = found.fit(UNSIZED[kind](), epochs=2, steps_per_epoch=6)
    expected = trainer(**options).fit(BATCHES, epochs=2)
    assert result.steps == 12
    assert result.losses == expected.losses
    assert (found.state.parameter("w") != before).any()


@pytest.mark.parametrize("options", NEED_STEPS, ids=range(len(NEED_STEPS)))
def test_a_step_needs_the_number_of_steps(options: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="total="):
        trainer(**options).step(BATCHES[0])
    trainer(**options).step(BATCHES[0], total=10)


@pytest.mark.parametrize("kind", UNSIZED)
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_constant_schedule_needs_no_length(warmup: float, kind: str) -> None:
    expected = trainer(warmup=warmup).fit(BATCHES, epochs=1)
    assert trainer(warmup=warmup).fit(UNSIZED[kind](), epochs=1).losses[:6] == expected.losses
    if warmup:
        assert expected.losses != trainer().fit(BATCHES, epochs=1).losses


def test_endless_streams() -> None:
    stream = Stream(BATCHES, endless=True)
    result = trainer().fit(stream, epochs=3, steps_per_epoch=4)
    assert result.steps == 12
    assert len(result.history) == 3
    # Nothing is read and thrown away, and the next epoch goes on where the one before has stopped.
    assert stream.given == 12
    assert result.losses == trainer().fit(BATCHES, epochs=2).losses


def test_streams_begin_anew_when_they_end() -> None:
    result = trainer().fit(Stream(BATCHES), epochs=3, steps_per_epoch=4)
    assert result.losses == trainer().fit(BATCHES, epochs=2).losses


def test_steps_of_several_batches() -> None:
    result = trainer(accumulate=2).fit(Stream(BATCHES, endless=True), epochs=2, steps_per_epoch=3)
    assert result.losses == trainer(accumulate=2).fit(BATCHES, epochs=2).losses
    # Six batches are two steps of four, the second smaller.
    whole = trainer(accumulate=4).fit(BATCHES, epochs=1, steps_per_epoch=2)
    assert whole.losses == trainer(accumulate=4).fit(BATCHES, epochs=1).losses


def test_fewer_steps_than_there_are() -> None:
    result = trainer(schedule="linear").fit((X, LABELS), batch_size=SIZE, epochs=2, steps_per_epoch=2)
    assert result.steps == 4
    batches = trainer().fit(BATCHES, steps_per_epoch=2)
    assert batches.losses == trainer().fit(BATCHES[:2]).losses


@pytest.mark.parametrize(
    ("data", "steps", "words"),
    [
        ((X, LABELS), 7, "6 batches"),
        (BATCHES, 7, "6 batches"),
        (BATCHES, 0, "at least 1"),
        (iter(BATCHES), 4, "ended after 6 batches"),
        (Stream([]), 4, "ended after 0 batches"),
    ],
)
def test_numbers_of_steps_that_do_not_fit(data: Any, steps: int, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        trainer().fit(data, batch_size=SIZE, epochs=2, steps_per_epoch=steps)


@pytest.mark.parametrize("make", [lambda: Stream(BATCHES), lambda: iter(BATCHES * 4)])
def test_a_stream_is_resumed(make: Callable[[], Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps_per_epoch": 4, "checkpoint": tmp_path / "state", "resume": True}
    expected = trainer().fit(make(), epochs=4, steps_per_epoch=4).losses
    trainer().fit(make(), epochs=2, **options)
    assert trainer().fit(make(), epochs=4, **options).losses == expected


# Arrays of other libraries


class OnlyArray:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


class OnlyDLPack:
    """As a library without NumPy would have it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def _memory_map(array: np.ndarray) -> np.ndarray:
    file = io.BytesIO(array.tobytes())
    return np.frombuffer(file.getbuffer(), array.dtype).reshape(array.shape)


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "torch": torch.tensor,
    "array": OnlyArray,
    "dlpack": OnlyDLPack,
    "ortvalue": onnxruntime.OrtValue.ortvalue_from_numpy,
    "read_only": _memory_map,
    "list_of_tensors": lambda array: [torch.tensor(row) for row in array],
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_other_libraries(kind: str) -> None:
    make = ARRAYS[kind]
    expected = trainer().fit((X, LABELS), batch_size=SIZE, shuffle=True).losses
    forms: list[Any] = [{"x": make(X), "labels": make(LABELS)}]
    if kind != "list_of_tensors":
        forms += [(make(X), make(LABELS)), [make(X), make(LABELS)], (make(X), LABELS.tolist())]
    for data in forms:
        assert trainer().fit(data, batch_size=SIZE).losses == expected
    batches = trainer().fit(BATCHES).losses
    for wrap in (tuple, list, lambda pair: {"x": pair[0], "labels": pair[1]}):
        assert trainer().fit([wrap((make(x), make(y))) for x, y in BATCHES]).losses == batches
    assert trainer().step((make(X), make(LABELS))) == trainer().step((X, LABELS))
    found = trainer().evaluate({"x": make(X), "labels": make(LABELS)}, "accuracy")
    assert found == trainer().evaluate((X, LABELS), "accuracy")


def test_memory_maps(tmp_path: Path) -> None:
    expected = trainer().fit((X, LABELS), batch_size=SIZE).losses
    for name, array in (("x", X), ("labels", LABELS)):
        np.save(tmp_path / f"{name}.npy", array)
    maps = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("x", "labels"))
    assert trainer().fit(maps, batch_size=SIZE).losses == expected


def test_two_batches_of_two_arrays_are_batches() -> None:
    """A list of lists, as `list(loader)` is: not two columns of two samples."""
    batches = [[torch.tensor(x), torch.tensor(y)] for x, y in BATCHES[:2]]
    assert trainer().fit(batches).losses == trainer().fit(BATCHES[:2]).losses


def test_tensors_are_not_copied() -> None:
    tensor = torch.tensor(X)
    array = training.data.as_array(tensor, "x")
    assert array.ctypes.data == tensor.data_ptr()
    assert training.data.as_array(OnlyDLPack(X), "x").ctypes.data == X.ctypes.data


class Elsewhere(OnlyDLPack):
    def __dlpack_device__(self) -> Any:
        return (2, 0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor(X, requires_grad=True), r"\.detach\(\)"),
        (torch.empty(24, 3, device="meta"), "cannot be read as an array"),
        (torch.tensor(X).to(torch.bfloat16), "cannot be read as an array"),
        (Elsewhere(X), "main memory"),
    ],
)
def test_tensors_that_are_refused(value: Any, words: str) -> None:
    for data in ((value, LABELS), {"x": value, "labels": LABELS}, [(value, LABELS)]):
        with pytest.raises(ArgumentTypeError, match=words) as caught:
            trainer().fit(data)
        assert "'x'" in str(caught.value)


def test_data_that_is_one_tensor() -> None:
    with pytest.raises(OrtgradError, match="tuple or a dict"):
        trainer().fit(torch.tensor(X))


# What is shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, str] = {}
    for name, stream, options in (
        ("terminal", Terminal(), {}),
        ("file", io.StringIO(), {}),
        ("forced", io.StringIO(), {"progress": True}),
        ("off", Terminal(), {"progress": False}),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        result = training.fit(MODEL, (X, LABELS), loss="cross-entropy", **options)  # type: ignore[arg-type]
        shown[name] = stream.getvalue()
    for name in ("terminal", "forced"):
        assert shown[name].count("training 1 parameter with 6 elements\n") == 1
        assert "samples/s" in shown[name]
    assert shown["file"] == shown["off"] == ""
    assert (result.parameters, result.elements) == (1, 6)
    assert "parameters=1, elements=6" in repr(result)
