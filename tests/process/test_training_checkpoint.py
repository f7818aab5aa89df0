"""Checkpoints: formats, damaged files, and files that are replaced as a whole."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from support import GOLDEN

import ortgrad
from ortgrad.errors import CheckpointError, CheckpointFileError
from ortgrad.training import files
from ortgrad.training.checkpoint import (
    Checkpoint,
    OptimizerGroup,
    load,
    load_tensors,
    ortcheckpoint,
    save,
    save_tensors,
)

FORMATS = ["checkpoint", "checkpoint.safetensors"]
TYPES = [
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.bool_, np.int8, np.uint8),
    *(np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
]


def small() -> Checkpoint:
    """A checkpoint with a bit of everything."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    return Checkpoint(
        trainable={"w": w, "b": np.float32([1, 2])},
        frozen={"mean": np.array(0.5), "ids": np.int64([[3]]), "none": np.zeros((0, 2), np.float32)},
        optimizer={"group0": OptimizerGroup(7, 0.25, {"w": {"momentum0": w + 1, "momentum1": w * w}})},
        properties={"epoch": -3, "loss": 0.5, "name": "größe", "text": ""},
    )


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    for x, y in [(a.trainable, b.trainable), (a.frozen, b.frozen)]:
        assert_same_arrays(x, y)
    assert a.properties == b.properties
    assert a.nominal == b.nominal
    assert list(a.optimizer) == list(b.optimizer)
    for name, group in a.optimizer.items():
        other = b.optimizer[name]
        assert (group.step, group.initial_learning_rate) == (other.step, other.initial_learning_rate)
        assert list(group.momentums) == list(other.momentums)
        for parameter, momentums in group.momentums.items():
            assert_same_arrays(momentums, other.momentums[parameter])


def assert_same_arrays(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert list(a) == list(b)
    for name, array in a.items():
        assert array.dtype == b[name].dtype
        assert array.shape == b[name].shape
        assert array.tobytes() == b[name].tobytes()


@pytest.fixture
def external(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checkpoints are large ones."""
    monkeypatch.setattr(ortcheckpoint, "EXTERNAL_FROM", 0)
    monkeypatch.setattr(ortcheckpoint, "SMALLEST_EXTERNAL", 4)


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    save(small(), tmp_path / name)
    assert_same(load(str(tmp_path / name)), small())
    assert sorted(os.listdir(tmp_path)) == [name]


def test_round_trip_with_external_data(external: None, tmp_path: Path) -> None:
    save(small(), tmp_path / "c")
    assert_same(load(tmp_path / "c"), small())
    assert sorted(os.listdir(tmp_path)) == ["c", "c.data"]
    assert (tmp_path / "c.data").stat().st_size > 3 * 24


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype: Any, name: str, tmp_path: Path) -> None:
    values = np.array([[0, 1, 1], [1, 0, 3]]).astype(dtype)
    arrays = {"rows": values, "columns": values.T, "step": values[:, ::2], "one": np.array(1).astype(dtype)}
    save(Checkpoint(trainable=arrays), tmp_path / name)
    found = load(tmp_path / name).trainable
    for key, array in arrays.items():
        assert found[key].dtype == dtype
        assert found[key].flags.c_contiguous and found[key].flags.writeable and found[key].flags.aligned
        assert np.array_equal(found[key], array)


@pytest.mark.parametrize("name", FORMATS)
def test_byte_order_is_part_of_the_format(name: str, tmp_path: Path) -> None:
    values = np.arange(5, dtype=">f4")
    save(Checkpoint(trainable={"w": values}), tmp_path / name)
    assert load(tmp_path / name).trainable["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", FORMATS)
def test_nominal(name: str, tmp_path: Path) -> None:
    save(Checkpoint(trainable={"w": np.ones((3, 4), np.float32)}, nominal=True), tmp_path / name)
    found = load(tmp_path / name)
    assert found.nominal
    assert found.trainable["w"].size == 0
    assert found.trainable["w"].dtype == np.float32


@pytest.mark.parametrize("name", FORMATS)
def test_sorted(name: str, tmp_path: Path) -> None:
    state = Checkpoint(trainable={k: np.zeros(1, np.float32) for k in "zay"}, properties={"q": 1, "b": 2})
    save(state, tmp_path / name)
    assert list(load(tmp_path / name).trainable) == ["z", "a", "y"]
    save(state, tmp_path / name, sort=True)
    assert list(load(tmp_path / name).trainable) == ["a", "y", "z"]
    assert list(load(tmp_path / name).properties) == ["b", "q"]


def test_checkpoint_of_onnxruntime_training() -> None:
    found = load(GOLDEN / "cnn" / "checkpoint")
    initializers = onnx.load(GOLDEN / "cnn" / "forward.onnx").graph.initializer
    expected = {i.name: onnx.numpy_helper.to_array(i) for i in initializers}
    assert list(found.trainable) == list(expected)
    for name, array in expected.items():
        assert np.array_equal(found.trainable[name], array)
    assert not found.frozen and not found.optimizer and not found.properties and not found.nominal


def test_flatbuffer_is_readable_by_the_generated_classes(tmp_path: Path) -> None:
    """onnxruntime ships readers that flatc generated from the schema."""
    import onnxruntime.tools.ort_format_model  # noqa: F401  (makes ort_flatbuffers_py importable)
    from ort_flatbuffers_py.fbs.Checkpoint import Checkpoint as Generated

    save(small(), tmp_path / "c")
    data = (tmp_path / "c").read_bytes()
    assert Generated.CheckpointBufferHasIdentifier(data, 0)
    root = Generated.GetRootAs(data)
    module = root.ModuleState()
    assert root.Version() == 2
    assert [module.RequiresGradParams(i).Name() for i in range(2)] == [b"w", b"b"]
    w = module.RequiresGradParams(0)
    assert w.DimsAsNumpy().tolist() == [2, 3]
    assert w.RawDataAsNumpy().view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert w.ExternalDataOffset() == -1
    assert [module.FrozenParams(i).DataType() for i in range(3)] == [11, 7, 1]
    group = root.OptimizerGroups(0)
    assert (group.GroupName(), group.Step(), group.InitialLearningRate()) == (b"group0", 7, 0.25)
    assert group.OptimizerStates(0).Momentums(1).Name() == b"momentum1"
    bag = root.PropertyBag()
    assert (bag.Ints(0).Name(), bag.Ints(0).Value(), bag.Floats(0).Value()) == (b"epoch", -3, 0.5)
    assert bag.Strings(0).Value().decode() == "größe"


def test_safetensors_as_specified(tmp_path: Path) -> None:
    """Read back by the words of the format alone."""
    save(small(), tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert all(isinstance(v, str) for v in header["__metadata__"].values())
    entry = header["w"]
    assert (entry["dtype"], entry["shape"]) == ("F32", [2, 3])
    begin, end = entry["data_offsets"]
    assert np.frombuffer(data[8 + length :][begin:end], np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert "optimizer.group0.w.momentum0" in header


def test_safetensors_of_others(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = struct.pack("<Q", len(header)) + header + np.float32([1, 2]).tobytes()
    (tmp_path / "c.safetensors").write_bytes(data)
    assert load(tmp_path / "c.safetensors").trainable["w"].tolist() == [1, 2]


def test_names_of_momentums_give_way_to_those_of_parameters(tmp_path: Path) -> None:
    name = "optimizer.group0.w.momentum0"
    state = Checkpoint(trainable={"w": np.ones(2, np.float32), name: np.zeros(3, np.float32)})
    state.optimizer["group0"] = OptimizerGroup(1, 0.1, {"w": {"momentum0": np.full(2, 9, np.float32)}})
    save(state, tmp_path / "c.safetensors")
    assert_same(load(tmp_path / "c.safetensors"), state)


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_at_every_byte(name: str, tmp_path: Path) -> None:
    save(small(), tmp_path / name)
    data = (tmp_path / name).read_bytes()
    for size in range(len(data)):
        (tmp_path / name).write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            load(tmp_path / name)


def test_truncated_external_data(external: None, tmp_path: Path) -> None:
    save(small(), tmp_path / "c")
    data = (tmp_path / "c.data").read_bytes()
    for size in range(len(data)):
        (tmp_path / "c.data").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="external data"):
            load(tmp_path / "c")
    (tmp_path / "c.data").unlink()
    with pytest.raises(CheckpointError, match=r"c\.data, is not beside it"):
        load(tmp_path / "c")


def sealed(contents: bytes) -> bytes:
    """A changed checkpoint with a checksum that fits."""
    return contents[:-32] + hashlib.sha256(contents[:-40]).digest()


@pytest.mark.parametrize("name", ["c", "large", "large.data", "c.safetensors", "adapter.safetensors"])
def test_damaged_files(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every flipped bit or run of bytes in a file of ours is an error that names the checkpoint."""
    if name.startswith("large"):
        request.getfixturevalue("external")
    place, damaged = tmp_path / name.replace(".data", ""), tmp_path / name
    if name.startswith("adapter"):
        save_tensors({"a": np.arange(90.0)}, {"format": "pt"}, place)
    else:
        save(small(), place)
    data = damaged.read_bytes()
    numbers = np.random.default_rng(0)
    changes = [(bit // 8, 1 << bit % 8, 1) for bit in range(0, 8 * len(data), 3)]
    runs = numbers.integers([0, 1, 2], [len(data), 256, 17], (300, 3))
    changes += [(int(start), int(mask), int(count)) for start, mask, count in runs]
    for start, mask, count in changes:
        changed = np.frombuffer(data, np.uint8).copy()
        changed[start : start + count] ^= np.uint8(mask)
        damaged.write_bytes(changed.tobytes())
        with pytest.raises(CheckpointError, match=re.escape(place.name)):
            load_tensors(place) if name.startswith("adapter") else load(place)


def test_files_without_a_checksum_load(tmp_path: Path) -> None:
    """Those of onnxruntime-training, of other writers of safetensors, and of earlier releases."""
    content = (GOLDEN / "batch_norm" / "checkpoint").read_bytes()
    numbers, outcomes = np.random.default_rng(1), []
    for bit in numbers.integers(0, 8 * len(content), 300):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "c").write_bytes(changed)
        try:
            load(tmp_path / "c")
            outcomes.append(True)
        except CheckpointError as error:
            outcomes.append(False)
            assert "the checksum" not in str(error)
    assert any(outcomes)


def test_safetensors_that_another_program_changed(tmp_path: Path) -> None:
    """It keeps the metadata, but not the bytes: the error says which of them it must remove."""
    save(small(), tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    for names in ([], ["ortgrad.sha256"], ["ortgrad.checksum"], ["ortgrad.sha256", "ortgrad.checksum"]):
        for name in names:
            header["__metadata__"].pop(name, None)
        text = json.dumps(header, separators=(",", ":")).encode()
        (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        if len(names) < 2:
            with pytest.raises(CheckpointError, match=r"'ortgrad\.checksum' and 'ortgrad\.sha256'"):
                load(tmp_path / "c.safetensors")
            header = json.loads(data[8 : 8 + length])
    assert_same(load(tmp_path / "c.safetensors"), small())


def test_data_of_another_checkpoint(external: None, tmp_path: Path) -> None:
    """The two files of a large checkpoint are loaded only together."""
    states = [Checkpoint(trainable={"w": np.full(40, i, np.float32)}) for i in range(2)]
    for state, name in zip(states, "ab", strict=True):
        save(state, tmp_path / name)
    os.replace(tmp_path / "b.data", tmp_path / "a.data")
    with pytest.raises(CheckpointError, match=r"a\.data, is damaged or belongs to another checkpoint"):
        load(tmp_path / "a")


def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    """Processes that write the same large checkpoint: at any time, what is read is what one of them wrote."""
    script = """
import sys, numpy as np
from ortgrad.training.checkpoint import Checkpoint, save, ortcheckpoint
ortcheckpoint.EXTERNAL_FROM = 0
for i in range(150):
    array = np.full(64, i, np.float32)
    save(Checkpoint(trainable={"w": array, "v": array}, properties={"i": i, "who": sys.argv[2]}), sys.argv[1])
"""
    place = tmp_path / "c"
    writers = [subprocess.Popen([sys.executable, "-c", script, place, who]) for who in "ab"]
    seen = 0
    while any(writer.poll() is None for writer in writers) or not seen:
        if place.exists():
            state = load(place)
            seen += 1
            for array in state.trainable.values():
                assert (array == state.properties["i"]).all()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert (load(place).trainable["w"] == 149).all()
    assert sorted(os.listdir(tmp_path)) == ["c", "c.data"]


@pytest.mark.parametrize("name", FORMATS)
def test_impossible_shapes_without_elements(name: str, tmp_path: Path) -> None:
    """NumPy cannot make such arrays, although they have no elements."""
    save(Checkpoint(trainable={"w": np.zeros((0, 1 << 40), np.float32)}), tmp_path / name)
    assert load(tmp_path / name).trainable["w"].shape == (0, 1 << 40)
    if name == "checkpoint":
        data = (tmp_path / name).read_bytes()
        changed = sealed(data.replace(struct.pack("<q", 1 << 40), struct.pack("<q", 1 << 62)))
    else:
        text = json.dumps({"w": {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}).encode()
        changed = struct.pack("<Q", len(text)) + text
    (tmp_path / name).write_bytes(changed)
    with pytest.raises(CheckpointError, match="shape"):
        load(tmp_path / name)


def test_random_bytes_after_the_identifier(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    for size in range(0, 600, 3):
        body = numbers.integers(0, 256, size, np.uint8).tobytes()
        for head in (b"\x08\0\0\0ODTC", b"\x10\0\0\0ODTC"):
            (tmp_path / "c").write_bytes(head + body)
            with pytest.raises(CheckpointError):
                load(tmp_path / "c")


def test_many_references_to_one_place(tmp_path: Path) -> None:
    """A small file must not become large in memory, nor take long."""
    count, size = 20000, 1 << 16
    state = Checkpoint(trainable={"a": np.zeros(size, np.uint8)})
    for i in range(count):
        state.trainable[f"{i}"] = np.zeros(0, np.uint8)
    save(state, tmp_path / "c")
    data = bytearray((tmp_path / "c").read_bytes())
    # All tensors get the shape and the bytes of the first.
    import onnxruntime.tools.ort_format_model  # noqa: F401
    from ort_flatbuffers_py.fbs.Checkpoint import Checkpoint as Generated

    module = Generated.GetRootAs(bytes(data)).ModuleState()
    first = module.RequiresGradParams(0)._tab
    for i in range(1, count):
        table = module.RequiresGradParams(i)._tab
        for field in (8, 12):
            target = first.Indirect(first.Pos + first.Offset(field))
            place = table.Pos + table.Offset(field)
            if target > place:
                struct.pack_into("<I", data, place, target - place)
    (tmp_path / "c").write_bytes(sealed(bytes(data)))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="damaged"):
        load(tmp_path / "c")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}, "but 8 bytes"),
        ({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, "of 8 bytes"),
        ({"w": {"dtype": "F32", "shape": [1 << 63, 0], "data_offsets": [0, 0]}}, "but 0 bytes"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "is at 4 to 12"),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "is invalid"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "is invalid"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "4 bytes belong to no tensor"),
        ({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, "the type 'F4'"),
        ({"w": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "the type"),
        ({"w": 5}, "incomplete"),
        ({"__metadata__": {"a": 1}, "w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}, "strings"),
        ([], "not a JSON object"),
    ],
)
def test_hostile_safetensors(header: Any, reason: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path / "c.safetensors")


@pytest.mark.parametrize(
    "text",
    ["[" * 100000, '{"a": 1, "a": 2}', '{"a": nul}', "\xff", "{}  "],
    ids=["deep", "twice", "bad", "utf8", "spaces"],
)
def test_hostile_json(text: str, tmp_path: Path) -> None:
    data = text.encode("latin-1")
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    if text == "{}  ":
        assert load(tmp_path / "c.safetensors").trainable == {}
        return
    with pytest.raises(CheckpointError, match="JSON"):
        load(tmp_path / "c.safetensors")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"ortgrad": "2"}, "version '2'"),
        ({"ortgrad": "1"}, "metadata"),
        (
            {
                "ortgrad": "1",
                "ortgrad.frozen": '["x"]',
                "ortgrad.properties": "{}",
                "ortgrad.optimizer": "{}",
            },
            "'x'",
        ),
        (
            {
                "ortgrad": "1",
                "ortgrad.frozen": "[]",
                "ortgrad.properties": '{"a": []}',
                "ortgrad.optimizer": "{}",
            },
            "'a'",
        ),
        (
            {"ortgrad": "1", "ortgrad.frozen": "[]", "ortgrad.properties": "{}", "ortgrad.optimizer": "[]"},
            "metadata",
        ),
        (
            {
                "ortgrad": "1",
                "ortgrad.frozen": "[]",
                "ortgrad.properties": "{}",
                "ortgrad.optimizer": '{"g": {}}',
            },
            "metadata",
        ),
    ],
)
def test_metadata_that_do_not_fit(metadata: dict[str, str], reason: str, tmp_path: Path) -> None:
    text = json.dumps({"__metadata__": metadata}).encode()
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path / "c.safetensors")


def test_other_versions_are_named(tmp_path: Path) -> None:
    import onnxruntime.tools.ort_format_model  # noqa: F401
    from ort_flatbuffers_py.fbs.Checkpoint import Checkpoint as Generated

    save(Checkpoint(), tmp_path / "c")
    data = bytearray((tmp_path / "c").read_bytes())
    table = Generated.GetRootAs(bytes(data))._tab
    for version in (0, 1, 3, -1):
        struct.pack_into("<i", data, table.Pos + table.Offset(4), version)
        (tmp_path / "c").write_bytes(sealed(bytes(data)))
        with pytest.raises(CheckpointError, match=f"version {version};"):
            load(tmp_path / "c")


def foreign_files() -> dict[str, tuple[bytes, str]]:
    archive, array = io.BytesIO(), io.BytesIO()
    np.savez(archive, a=np.ones(2))
    np.save(array, np.ones(2))
    model = (GOLDEN / "cnn" / "forward.onnx").read_bytes()
    return {
        "zip": (archive.getvalue(), "ZIP"),
        "npy": (array.getvalue(), "NumPy"),
        "onnx": (model, "ONNX model"),
        "ort": (b"\x20\0\0\0ORTM" + bytes(32), "ORT format"),
        "pickle": (b"\x80\x04K\x01.", "pickle"),
        "text": (b"hello, world", "begins with"),
        "empty": (b"", "empty"),
    }


@pytest.mark.parametrize("kind", foreign_files())
def test_foreign_files_are_named(kind: str, tmp_path: Path) -> None:
    data, text = foreign_files()[kind]
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path / "c")


def test_the_other_format_is_named(tmp_path: Path) -> None:
    for name in FORMATS:
        save(small(), tmp_path / name)
    os.rename(tmp_path / FORMATS[1], tmp_path / "c")
    os.rename(tmp_path / FORMATS[0], tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"must end in \.safetensors"):
        load(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"must not end in \.safetensors"):
        load(tmp_path / "c.safetensors")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="not a regular file"):
            load(path)


def test_folders_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folder"):
        load(tmp_path)
    for name in FORMATS:
        with pytest.raises(CheckpointFileError, match=name) as caught:
            load(tmp_path / name)
        assert caught.value.errno == errno.ENOENT
        assert isinstance(caught.value, (RuntimeError, OSError)) and isinstance(
            caught.value, ortgrad.OrtgradError
        )
        with pytest.raises(CheckpointFileError):
            save(small(), tmp_path / "nowhere" / name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (Checkpoint(trainable={"w": np.array(["a"])}), "type <U1"),
        (Checkpoint(trainable={"w": [1.0]}), "type list"),  # type: ignore[dict-item]
        (Checkpoint(trainable={"w": np.ones(1)}, frozen={"w": np.ones(1)}), "trainable and frozen"),
        (Checkpoint(properties={"p": [1]}), "is a list"),  # type: ignore[dict-item]
        (Checkpoint(properties={"p": 1 << 63}), "64 bits"),
        (Checkpoint(optimizer={"g": OptimizerGroup(1 << 64)}), "64 bits"),
    ],
)
def test_what_cannot_be_written(state: Checkpoint, reason: str, name: str, tmp_path: Path) -> None:
    save(small(), tmp_path / name)
    with pytest.raises(CheckpointError, match=reason):
        save(state, tmp_path / name)
    assert_same(load(tmp_path / name), small())


def test_floats_are_single_precision_in_a_flatbuffer(tmp_path: Path) -> None:
    for name, expected in zip(FORMATS, (float(np.float32(0.1)), 0.1), strict=True):
        save(Checkpoint(properties={"p": 0.1, "big": 1e300, "flag": True}), tmp_path / name)
        found = load(tmp_path / name).properties
        assert found["p"] == expected
        assert found["flag"] == 1 and not isinstance(found["flag"], bool)


@pytest.mark.parametrize("function", ["replace", "fsync", "write"])
@pytest.mark.parametrize("name", [*FORMATS, "external"])
def test_a_full_disk_loses_nothing(
    function: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "external":
        request.getfixturevalue("external")
    path, changed = tmp_path / name, small()
    save(small(), path)
    changed.trainable["w"] = changed.trainable["w"] + 1

    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    class FullFile(io.FileIO):
        write = fail

    with monkeypatch.context() as patch:
        if function == "write":
            patch.setattr(files, "open", lambda handle, mode: FullFile(handle, mode), raising=False)
        else:
            patch.setattr(os, function, fail)
        with pytest.raises(CheckpointFileError, match="No space left") as caught:
            save(changed, path)
        assert caught.value.errno == errno.ENOSPC
    assert_same(load(path), small())
    assert not [n for n in os.listdir(tmp_path) if n.endswith(".partial") or re.search(r"data\.", n)]
    save(changed, path)
    assert_same(load(path), changed)


@pytest.mark.parametrize("fails", range(1, 4))
def test_external_data_at_every_rename(
    fails: int, external: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends at any of the renames leaves the old checkpoint or the new one."""
    path, changed, calls = tmp_path / "c", small(), []
    save(small(), path)
    changed.trainable["w"] = changed.trainable["w"] + 1
    replace = os.replace

    class Killed(BaseException):
        pass

    def killed(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) >= fails:
            raise Killed
        replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            save(changed, path)
    assert_same(load(path), small() if fails < 3 else changed)
    save(small(), path)
    assert_same(load(path), small())


SAVING = """
import numpy as np, sys
from ortgrad.training.checkpoint import Checkpoint, ortcheckpoint, save
if sys.argv[2] == "external":
    ortcheckpoint.EXTERNAL_FROM = 0
for i in range(1, 100000):
    save(Checkpoint(trainable={f"w{k}": np.full(50000, i, np.float32) for k in range(8)}), sys.argv[1])
    print(i, flush=True)
"""


@pytest.mark.parametrize("name", [*FORMATS, "external"])
def test_killed_while_saving(name: str, tmp_path: Path) -> None:
    """After a kill the file holds the last complete checkpoint, or the one that was just being written."""
    path = tmp_path / name
    numbers = np.random.default_rng(2)
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(path), name],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(float(numbers.uniform(0, 0.1)))
        child.kill()
        rest = child.stdout.read().split()
        child.wait()
        child.stdout.close()
        last = int(rest[-1]) if rest else 1
        arrays = load(path).trainable
        (value,) = {float(v) for array in arrays.values() for v in (array.min(), array.max())}
        assert value in (last, last + 1)


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / f".c.{'0' * 16}.partial", tmp_path / f".c.{'1' * 16}.partial"
    other = tmp_path / f".cc.{'0' * 16}.partial"
    for path in (old, new, other):
        path.write_bytes(b"x")
    for path in (old, other):
        os.utime(path, (0, 0))
    save(small(), tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == sorted([new.name, other.name, "c"])


@pytest.mark.skipif(not hasattr(os, "symlink") or sys.platform == "win32", reason="needs symbolic links")
def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.symlink(tmp_path / "folder" / "c", tmp_path / "link")
    save(small(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(load(tmp_path / "folder" / "c"), small())


def test_training_is_not_imported_by_the_package() -> None:
    command = [sys.executable, "-c", "import sys, ortgrad; sys.exit('ortgrad.training' in sys.modules)"]
    subprocess.run(command, check=True)
