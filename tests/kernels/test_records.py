"""Kernels that read the numbers of a plan by name, and take only the tensors and numbers that they read."""

from __future__ import annotations

import ast
from typing import NamedTuple

import numpy as np
import pytest

from ortgrad.compiled.functions import subrecord
from ortgrad.compiled.source import functions_of, source_of
from ortgrad.errors import RegistrationError
from ortgrad.operators.compiled import CompiledKernel, Integers
from ortgrad.operators.declaration import Operator, all_operators
from ortgrad.operators.records import numbers_of, size_of


class Sizes(NamedTuple):
    height: int
    width: int


class Geometry(NamedTuple):
    channels: int
    output: Sizes
    is_dense: bool


def area(sizes: Sizes) -> int:
    return sizes.height * sizes.width


def by_name(task: int, into: np.ndarray, geometry: Geometry, table: Integers) -> None:
    own: Sizes = table[2 * task : 2 * task + 2]
    into[task] = geometry.channels * geometry.output.width + own.height + area(geometry.output) + into.size


def by_place(task: int, into: np.ndarray, geometry: Integers, table: Integers) -> None:
    own = table[2 * task : 2 * task + 2]
    into[task] = geometry[0] * geometry[2] + own[0] + area(subrecord(geometry, 1, 2)) + into.size


def clear(task: int, into: np.ndarray, length: int) -> None:
    into[task] = length


def kernel(function: object, **others: object) -> CompiledKernel:
    fields = {"views": (1, 1), "scratch": (1,), "tensor_names": ("x", "into", "sums"), **others}
    return CompiledKernel(function, 2, **fields)  # type: ignore[arg-type]


def test_a_record_has_its_numbers_in_order() -> None:
    assert size_of(Geometry) == 4
    assert numbers_of(Geometry(5, Sizes(7, 3), True)) == [5, 7, 3, 1]


def test_fields_become_elements() -> None:
    (named,), (placed,) = (source_of(kernel(f), ["float32"] * 2).phases for f in (by_name, by_place))
    assert named.text == placed.text
    assert named.functions == placed.functions


def test_functions_take_what_they_name() -> None:
    made = kernel(by_name, first=clear)
    assert made.numbers == {"length": "int", "geometry": "array", "table": "array"}
    block = source_of(made, ["float32"] * 2).block
    assert "phase0(task, t1, n0)" in block
    assert "phase1(task, t1, n1, n2)" in block


def test_a_misspelt_field_is_refused() -> None:
    def wrong(task: int, into: np.ndarray, geometry: Geometry) -> None:
        into[task] = geometry.output.widht

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(RegistrationError, match=rf"test_records\.py:{line}: Sizes has no field 'widht'"):
        source_of(kernel(wrong), ["float32"] * 2)


def test_a_tensor_that_is_not_declared_is_refused() -> None:
    def wrong(task: int, imto: np.ndarray) -> None:
        imto[task] = 1.0

    with pytest.raises(RegistrationError, match="wrong takes 'imto', which is none of the tensors"):
        kernel(by_name, last=wrong)


def types_of(operator: Operator) -> list[str]:
    """An element type for each input and output."""
    slots = (*operator.inputs, *operator.outputs)
    return [operator.types.get(slot.type, (slot.type,))[0] for slot in slots]


# The functions of kernels that take more than eight arguments.
LONG = {
    "tensors that a phase reads or writes": """
        average_pool_grad_strip conv_grad_task convolve convolve_positions convolve_strip convolve_tiles
        differentiate differentiate_strip gather_elements_grad_part grad_apply gru_grad_steps
        gru_grad_weights gru_steps internal_apply invertible_layer_grad_rows layer_grad_rows
        lstm_grad_steps lstm_steps max_pool_strip pointwise_task convolve_rows channels_task _embed_quotients
        """,
    "places in memory, and what is there": """
        _add_up _copy_seen _finish _finish_block _load _load_planes _locate _pack _place _runs _store
        _transform_block transform_tiles
        """,
}


def test_functions_take_only_what_they_read() -> None:
    """Fields that do not exist are found, too: the sources are otherwise made when a session is.

    The first parameter of a phase is the number of the task, whether it is read or not.
    """
    allowed, many = {name for names in LONG.values() for name in names.split()}, set()
    for operator in all_operators(internal=True):
        if operator.compiled_kernel is None or operator.compiled_kernel.elementwise:
            continue
        source = source_of(operator.compiled_kernel, types_of(operator))
        for function in functions_of(source.phases):
            (tree,) = ast.parse(function.text).body
            assert isinstance(tree, ast.FunctionDef)
            names = [argument.arg for argument in tree.args.args]
            read = {node.id for each in tree.body for node in ast.walk(each) if isinstance(node, ast.Name)}
            assert not {*names} - read - {"task"}, f"{function.name} of {operator.name}"
            if len(names) > 8:
                many.add(function.name)
    assert many == allowed
