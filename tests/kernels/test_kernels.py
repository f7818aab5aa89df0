"""What NumPy kernels share: threads, pieces, masks."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import PATIENCE

from ortgrad.ops import _kernels as kernels


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    kernels._pool.cache_clear()
    monkeypatch.setattr(kernels, "thread_count", lambda: request.param)
    yield request.param
    kernels._pool.cache_clear()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_parallel_calls_each_index_once(threads: int, count: int) -> None:
    seen: list[int] = []
    kernels.parallel(seen.append, count)
    assert sorted(seen) == list(range(count))


def test_parallel_uses_the_threads(threads: int) -> None:
    # Nobody passes before all are there.
    barrier = threading.Barrier(threads, timeout=PATIENCE)
    kernels.parallel(lambda i: barrier.wait(), threads)


def test_parallel_within_parallel_does_not_wait_for_itself(threads: int) -> None:
    seen: list[tuple[int, int]] = []
    kernels.parallel(lambda i: kernels.parallel(lambda j: seen.append((i, j)), 5), 6)
    assert sorted(seen) == [(i, j) for i in range(6) for j in range(5)]


@pytest.mark.parametrize("wrong", [0, 5])
def test_parallel_raises_what_is_raised_and_goes_on_working(threads: int, wrong: int) -> None:
    def fail(i: int) -> None:
        if i == wrong:
            raise ValueError(f"index {i}")

    with pytest.raises(ValueError, match=f"index {wrong}"):
        kernels.parallel(fail, 6)
    seen: list[int] = []
    kernels.parallel(seen.append, 3)
    assert sorted(seen) == [0, 1, 2]


def test_floating_point_warnings_are_off_in_all_threads(threads: int) -> None:
    kernels.parallel(lambda i: np.exp(np.full(4, 1000.0)), 8)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (3, 70_001), (200_000, 3)])
def test_pieces_cover_everything_once(shape: tuple[int, ...]) -> None:
    a, b = np.ones(shape, np.float32), np.full(shape, 2, np.float32)
    assert kernels.piecewise(lambda a, b: np.add(a, b, out=a), a, b) is a
    assert (a == 3).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_masked_is_zero(dtype: type) -> None:
    values = np.array([1, -2, np.inf, np.nan, -0.0], dtype)
    kept = np.full_like(values, 7)
    kernels.keep_where(np.array([True, False, False, False, True]), values, out=kept)
    np.testing.assert_array_equal(kept, [1, 0, 0, 0, 0])
