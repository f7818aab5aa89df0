"""What all tests share."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Leave what exists before the first test out of all garbage collections: with thousands of tests and
    PyTorch these would take a tenth of the time."""
    gc.collect()
    gc.freeze()
