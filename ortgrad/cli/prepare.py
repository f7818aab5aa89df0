"""`ortgrad prepare`: make a model with gradient nodes ready for onnxruntime."""

from __future__ import annotations

import argparse

from ortgrad.cli.files import output_path, save_and_describe
from ortgrad.pipelines.prepare import prepare


def command(arguments: argparse.Namespace) -> int:
    """Write the prepared model."""
    path = output_path(arguments.output, arguments.model)
    save_and_describe(prepare(arguments.model, kernels=arguments.kernels), path)
    return 0
