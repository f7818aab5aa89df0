"""The cache of compiled kernels: what is executed was written by this user, and it does not grow for ever."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ortgrad.cli.entry_point import main
from ortgrad.compiled import cache

OTHER_USER = 65534

posix = pytest.mark.skipif(os.name != "posix", reason="this system has other permissions of files")
root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache, and a home folder for the user's key."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.setattr(cache, "_writes", 0)
    yield tmp_path / "cache"


def entry(folder: Path) -> Path:
    (found,) = folder.glob("*.o")
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_only_the_user_can_read_it(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache.write("key", b"code")
    finally:
        os.umask(before)
    own = tmp_path / "home" / ".cache" / "ortgrad"
    assert [mode(path) for path in (folder, own)] == [0o700] * 2
    assert [mode(path) for path in (entry(folder), own / "key")] == [0o600] * 2
    assert cache.read("key") == b"code"


def unsafe_group(path: Path) -> None:
    path.chmod(0o770)


def unsafe_all(path: Path) -> None:
    path.chmod(0o707)


def sticky(path: Path) -> None:
    path.chmod(0o1777)


def foreign(path: Path) -> None:
    os.chown(path, OTHER_USER, -1)


CHANGES = [
    unsafe_group,
    unsafe_all,
    sticky,
    pytest.param(foreign, marks=root),
]


@posix
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", ["folder", "file", "key"])
def test_what_others_can_write_is_not_loaded(folder: Path, what: str, change: Callable[[Path], None]) -> None:
    if what == "key":
        cache.share(folder)
    cache.write("key", b"code")
    assert cache.read("key") == b"code"
    change({"folder": folder, "file": entry(folder), "key": folder / "key"}[what])
    with pytest.warns(RuntimeWarning, match="ORTGRAD_CACHE_DIR") as caught:
        assert cache.read("key") is None
    assert len(caught) == 1
    # The warning is given once, and nothing is raised afterwards.
    assert cache.read("key") is None
    assert not cache.has("key")
    if what != "file":
        cache.write("other", b"code")
        assert not cache.is_writable()
        assert len(list(folder.glob("*.o"))) == 1


@posix
def test_links_and_devices_are_not_followed(folder: Path, tmp_path: Path) -> None:
    cache.write("key", b"code")
    path = entry(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.read("key") is None
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.warns(RuntimeWarning, match="not an ordinary file"):
        assert cache.read("key") is None


@posix
def test_a_link_to_the_folder(folder: Path, tmp_path: Path) -> None:
    """It is the folder itself that is checked."""
    folder.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(folder)
    os.environ["ORTGRAD_CACHE_DIR"] = str(tmp_path / "link")
    cache.write("key", b"code")
    assert cache.read("key") == b"code"


def test_one_kernel_under_the_name_of_another(folder: Path) -> None:
    cache.write("key", b"code")
    path = entry(folder)
    os.replace(path, path.with_name(cache._name("other")))
    assert cache.read("other") is None
    os.replace(path.with_name(cache._name("other")), path)
    assert cache.read("key") == b"code"


@pytest.mark.parametrize("beside", [False, True])
def test_files_of_another_user(
    folder: Path, tmp_path: Path, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied into the cache they are not loaded: they are signed with another key."""
    if beside:
        cache.share(folder)
    cache.write("key", b"code")
    theirs = entry(folder).read_bytes()
    monkeypatch.setenv("HOME", str(tmp_path / "another"))
    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(tmp_path / "mine"))
    cache.write("key", b"my code")
    entry(tmp_path / "mine").write_bytes(theirs)
    assert cache.read("key") is None


def test_files_signed_without_a_key(folder: Path) -> None:
    for secret in (b"", bytes(32)):
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / cache._name("key")
        path.write_bytes(cache._sign(secret, "key", b"code") + b"code")
        path.chmod(0o600)
        assert cache.read("key") is None
    path.write_bytes(hashlib.sha256(b"code").digest() + b"code")
    assert cache.read("key") is None


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_key(folder: Path, tmp_path: Path, content: bytes) -> None:
    cache.write("key", b"code")
    own = tmp_path / "home" / ".cache" / "ortgrad" / "key"
    own.write_bytes(content)
    assert cache.read("key") is None
    cache.write("key", b"code")
    assert cache.read("key") == b"code"
    assert len(own.read_bytes()) == 32


def test_no_home_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("not a folder")
    cache.write("key", b"code")
    assert cache.read("key") == b"code"
    assert len((folder / "key").read_bytes()) == 32


def _write(number: int) -> None:
    cache.write(str(number), b"code")


def test_several_processes_make_one_key(folder: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.map(_write, range(12), chunksize=1)
    assert all(cache.read(str(number)) == b"code" for number in range(12))
    assert all(path.suffix == ".o" for path in folder.iterdir())


def test_what_was_not_used_for_months_is_forgotten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for name, days in (("old", 200), ("used", 200), ("new", 20)):
        cache.write(name, b"code")
        os.utime(folder / cache._name(name), (now - days * 86400,) * 2)
    (folder / "notes.txt").write_text("of the user")
    (folder / "tmp0123456789abcdef").write_text("of a process that was killed")
    for other in ("notes.txt", "tmp0123456789abcdef"):
        os.utime(folder / other, (0, 0))
    assert cache.read("used") == b"code"
    monkeypatch.setattr(cache, "_writes", 0)
    cache.write("another", b"code")
    kept = {cache._name(name) for name in ("used", "new", "another")}
    assert {path.name for path in folder.iterdir()} == {*kept, "notes.txt"}


def test_its_size_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LARGEST", 10_000)
    now = time.time()
    for number in range(250):
        cache.write(str(number), bytes(1000))
        os.utime(folder / cache._name(str(number)), (now - 1000 + number,) * 2)
    assert len(list(folder.iterdir())) <= 9 + cache._WRITES
    assert cache.read("249") is not None and cache.read("0") is None


@posix
def test_a_folder_for_all_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root makes it for a container image, in which another user only reads it."""
    shared = tmp_path / "shared"
    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(shared))
    cache.write("before", b"code")
    cache.share(shared)
    cache.write("key", b"code")
    assert mode(shared) == 0o755
    assert {mode(path) for path in shared.iterdir()} == {0o644}
    monkeypatch.setenv("HOME", str(tmp_path / "another"))
    assert cache.read("key") == b"code"


READER = """
import os, sys
from ortgrad.compiled import cache
os.setuid(int(sys.argv[1]))
cache.write("new", b"code")
print(cache.read("key"), cache.read("new"))
"""


@root
def test_another_user_reads_the_folder_for_all_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        monkeypatch.setenv("ORTGRAD_CACHE_DIR", f"{place}/shared")
        cache.share(Path(place) / "shared")
        cache.write("key", b"code")
        done = subprocess.run(
            [sys.executable, "-c", READER, str(OTHER_USER)], capture_output=True, text=True, cwd=place
        )
    assert done.stdout == "b'code' None\n", done.stderr


def test_ortgrad_compile_says_when_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(tmp_path / "file"))
    assert main(["compile"]) == 2
    assert main(["compile", "--shared", str(tmp_path / "file")]) == 2


SCRIPT = """
import warnings
import numpy as np, ortgrad
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    nodes = [ortgrad.nodes.tanh_grad("dY", "Y", "A"), ortgrad.nodes.relu_grad("A", "Y", "B")]
    session = ortgrad.InferenceSession(ortgrad.nodes.make_model(nodes), kernels="compiled")
    print(session.run(["B"], {name: np.float32([0.5]) for name in ("dY", "Y")})[0])
print(sum("the cache of compiled kernels" in str(each.message) for each in caught))
"""


@posix
def test_a_session_beside_an_unsafe_folder(folder: Path) -> None:
    """It compiles its kernels, and warns once."""
    pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")
    folder.mkdir()
    folder.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "[0.375]\n1\n", done.stderr
    assert not list(folder.iterdir())
