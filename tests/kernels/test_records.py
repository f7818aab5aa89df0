"""Kernels that read the numbers of a plan by name, take tensors together, and only what they read."""

from __future__ import annotations

import ast
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from ortgrad.compiled.functions import subrecord
from ortgrad.compiled.source import functions_of, source_of
from ortgrad.errors import RegistrationError
from ortgrad.operators.compiled import CompiledKernel, Integers
from ortgrad.operators.declaration import Operator, all_operators
from ortgrad.operators.records import is_bundle, is_record, numbers_of, size_of


class Sizes(NamedTuple):
    height: int
    width: int


class Geometry(NamedTuple):
    channels: int
    output: Sizes
    is_dense: bool


class Row(NamedTuple):
    into: np.ndarray
    factor: int


class Tensors(NamedTuple):
    x: np.ndarray
    row: Row
    geometry: Geometry
    share: float


def area(sizes: Sizes) -> int:
    return sizes.height * sizes.width


def by_name(task: int, into: np.ndarray, geometry: Geometry, table: Integers) -> None:
    own: Sizes = table[2 * task : 2 * task + 2]
    into[task] = geometry.channels * geometry.output.width + own.height + area(geometry.output) + into.size


def by_place(task: int, into: np.ndarray, geometry: Integers, table: Integers) -> None:
    own = table[2 * task : 2 * task + 2]
    into[task] = geometry[0] * geometry[2] + own[0] + area(subrecord(geometry, 1, 2)) + into.size


def in_a_bundle(task: int, tensors: Tensors, table: Integers) -> None:
    own: Sizes = table[2 * task : 2 * task + 2]
    geometry: Geometry = tensors.geometry
    row = Row(tensors.row.into, geometry.channels * tensors.geometry.output.width)
    write(task, row, own.height + area(tensors.geometry.output) + tensors.row.into.size)


def write(task: int, row: Row, value: int) -> None:
    row.into[task] = row.factor + value


def clear(task: int, into: np.ndarray, length: int) -> None:
    into[task] = length


def kernel(function: object, **others: object) -> CompiledKernel:
    fields = {"views": (1, 1), "scratch": (1,), "tensor_names": ("x", "into", "sums"), **others}
    return CompiledKernel(function, 2, **fields)  # type: ignore[arg-type]


def checked_function(kernel: CompiledKernel) -> Any:
    from ortgrad.compiled import compiler

    (function,) = source_of(kernel, ["float32"] * 2).phases
    return compiler.compile_function(function, "float32", set(), checked=True)


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


def test_a_bundle_has_tensors_and_numbers() -> None:
    assert is_bundle(Tensors) and not is_record(Tensors)
    assert is_record(Geometry) and not is_bundle(Geometry)
    made = kernel(in_a_bundle, first=clear)
    assert made.numbers == {
        "length": "int",
        "factor": "int",
        "geometry": "array",
        "share": "float",
        "table": "array",
    }
    source = source_of(made, ["float32"] * 2)
    assert "phase1(task, Bundle0(t0, Bundle1(t1, n1), n2, n3), n4)" in source.block
    assert [(name, bundle.fields) for name, bundle in source.bundles] == [
        ("Bundle0", Tensors._fields),
        ("Bundle1", Row._fields),
    ]
    text = source.phases[1].text
    assert "tensors.geometry[2]" in text and "subrecord(tensors.geometry, 1, 2)" in text


def test_a_bundle_is_computed_as_its_fields() -> None:
    pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")
    results = []
    for function in (in_a_bundle, by_name):
        into, table, geometry = np.zeros(2, np.float32), np.arange(4), np.array([5, 7, 3, 1])
        arguments: tuple[Any, ...] = (into, geometry, table)
        if function is in_a_bundle:
            arguments = Tensors(into, Row(into, 1), geometry, 0.5), table  # type: ignore[arg-type]
        compiled = checked_function(kernel(function))
        for task in range(2):
            compiled(task, *arguments)
        results.append(into.tolist())
    assert results[0] == results[1] == [5 * 3 + 0 + 21 + 2, 5 * 3 + 2 + 21 + 2]


def test_a_kernel_takes_only_its_tensors_in_bundles() -> None:
    def wrong(task: int, other: Other) -> None:
        other.imto[task] = 1.0

    with pytest.raises(RegistrationError, match="wrong takes 'imto', which is none of the tensors"):
        kernel(by_name, last=wrong)


class Other(NamedTuple):
    imto: np.ndarray


def test_a_misspelt_field_is_refused() -> None:
    def wrong(task: int, into: np.ndarray, geometry: Geometry) -> None:
        into[task] = geometry.output.widht

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(RegistrationError, match=rf"test_records\.py:{line}: Sizes has no field 'widht'"):
        source_of(kernel(wrong), ["float32"] * 2)


def test_a_misspelt_field_of_a_bundle_is_refused() -> None:
    def wrong(task: int, tensors: Tensors) -> None:
        tensors.row.imto[task] = 1.0

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(RegistrationError, match=rf"test_records\.py:{line}: Row has no field 'imto'"):
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


def test_functions_take_only_what_they_read() -> None:
    """Fields that do not exist are found, too: the sources are otherwise made when a session is.

    The first parameter of a phase is the number of the task, whether it is read or not.
    """
    many = set()
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
        fields = {name for _, bundle in source.bundles for name in bundle.fields}
        words = {word for each in functions_of(source.phases) for word in re.findall(r"\w+", each.text)}
        assert fields <= words, operator.name
    assert not many  # no function takes more than eight arguments
