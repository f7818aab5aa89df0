"""`ortgrad compile`: compile kernels ahead of the first session that needs them."""

from __future__ import annotations

import argparse
import os
import time

from ortgrad.cli.exit_codes import fail
from ortgrad.compiled import cache, machine_code
from ortgrad.operators.declaration import all_operators
from ortgrad.runtime.session import InferenceSession


def command(arguments: argparse.Namespace) -> int:
    """Compile the kernels of a model, or all of them, unless they are in the cache."""
    if machine_code.entry() is None:
        return fail("kernels are compiled by Numba: pip install 'ortgrad[compiled]'")
    if arguments.shared is not None:
        os.environ["ORTGRAD_CACHE_DIR"] = arguments.shared  # that of the processes that compile, too
        try:
            cache.share(cache.folder())
        except OSError as error:
            return fail(f"the kernels cannot be kept in {arguments.shared}: {error}")
    if not cache.is_writable():
        return fail(
            f"the kernels cannot be kept in {cache.folder()}: the folder is not writable, or not safe"
        )
    start = time.perf_counter()
    if arguments.model is not None:
        InferenceSession(arguments.model, kernels="compiled")
    else:
        kernels = [
            (operator.compiled_kernel, [*variant.inputs, *variant.outputs])
            for operator in all_operators(internal=True)
            if operator.compiled_kernel is not None
            for variant in operator.variants()
        ]
        machine_code.compile_all(kernels)
        for kernel, dtypes in kernels:
            machine_code.block(kernel, dtypes)
    seconds = time.perf_counter() - start
    print(f"the kernels are compiled ({seconds:.1f} s) and kept in {cache.folder()}")
    return 0
