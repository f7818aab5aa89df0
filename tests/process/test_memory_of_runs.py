"""The memory of a process does not grow with its runs."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.sessions_of_kernels import session

import ortgrad


def test_ten_thousand_runs_do_not_grow() -> None:
    import resource

    made = session()
    feeds = {"dY": np.ones(2000, np.float32), "X": np.ones(2000, np.float32)}
    bad = {**feeds, "X": np.ones(1999, np.float32)}

    def thousand() -> None:
        for i in range(1000):
            if i % 100:
                made.run(None, feeds)
            else:
                with pytest.raises(ortgrad.KernelError):
                    made.run(None, bad)
        gc.collect()

    thousand()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):
        thousand()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # A leak of one array per run would be 80 MB.
    assert grown < 24 * 1024, f"{grown} kB"
