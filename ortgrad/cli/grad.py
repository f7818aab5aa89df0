"""`ortgrad grad`: build the backward graph of a model."""

from __future__ import annotations

import argparse

from ortgrad.cli.files import output_path, save_and_describe
from ortgrad.pipelines.build import build_gradient_model


def command(arguments: argparse.Namespace) -> int:
    """Write the gradient model."""
    path = output_path(arguments.output)
    save_and_describe(build_gradient_model(arguments.model, wrt=arguments.wrt, of=arguments.of), path)
    return 0
