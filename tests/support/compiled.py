"""Compiled kernels with checks of all indices. Files that also have tests without Numba import this."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortgrad.compiled.source import source_of
from ortgrad.operators.call import make_call
from ortgrad.operators.compiled import Argument, Bundled, Matrix, Plan, Product, elementwise_plan
from ortgrad.operators.declaration import Operator
from ortgrad.runtime.evaluate import declared_shapes
from support.calls import Case


def compute_products(products: Sequence[Product], tensors: Mapping[str, np.ndarray]) -> None:
    """What onnxruntime computes before and after the tasks."""

    def matrix(of: Matrix) -> np.ndarray:
        part = tensors[of.tensor].reshape(-1)[of.start : of.start + of.rows * of.columns]
        return part.reshape(of.rows, of.columns)

    for into, left, right, transposed in products:
        a, b = matrix(left), matrix(right)
        matrix(into)[...] = (a.T if transposed == "left" else a) @ (b.T if transposed == "right" else b)


@functools.cache
def checked_functions(operator: Operator, dtypes: tuple[str, ...]) -> list[Any]:
    """The functions of a compiled kernel with checks of all indices."""
    from ortgrad.compiled import compiler

    kernel = operator.compiled_kernel
    assert kernel is not None
    source = source_of(kernel, dtypes)
    flags = {"contract", "reassoc", "nsz"}
    return [compiler.compile_function(f, source.element, flags, checked=True) for f in source.phases]


def value_of(argument: Argument, values: Mapping[str, Any]) -> Any:
    """The value of an argument of a kernel's function, given all tensors and numbers."""
    if isinstance(argument, Bundled):
        return argument.kind(*(value_of(each, values) for each in argument.fields))
    return values[argument]


def checked_tasks(operator: Operator, case: Case) -> list[np.ndarray] | None:
    """The outputs of a compiled kernel whose functions check every index; run task by task from Python.

    None if the kernel does not support the case.
    """
    kernel = operator.compiled_kernel
    assert kernel is not None
    given = [case.arrays.get(parameter.name) for parameter in operator.inputs]
    wanted = [not case.outputs or parameter.name in case.outputs for parameter in operator.outputs]
    call = make_call(operator, "node", case.attributes, [a is not None for a in given], wanted)
    feed = [np.zeros(0, np.float32) if array is None else array for array in given]
    shapes = [
        shape if want else None for shape, want in zip(declared_shapes(call, feed), wanted, strict=True)
    ]
    planned: Plan | None = elementwise_plan(feed[0].shape)
    if kernel.plan is not None:
        known = [None if array is None else array.shape for array in given]
        planned = kernel.plan(*known, *shapes, **call.attributes)
    if planned is None:
        return None
    dtype = next(array.dtype for array in feed if array.dtype.kind == "f")
    types = [dtype if slot.type in operator.types else np.dtype(slot.type) for slot in operator.outputs]
    outputs = [
        np.full(0 if shape is None else shape, np.nan if of.kind == "f" else -1, of)
        for shape, of in zip(shapes, types, strict=True)
    ]
    names = [array.dtype.name for array in (*feed, *outputs)]
    phases = checked_functions(operator, tuple(names))
    numbers = {**call.attributes, **planned.numbers}
    values = [
        np.array(numbers[name], np.int64)
        if kind == "array"
        else dtype.type(numbers[name])
        if kind == "float"
        else int(numbers[name])
        for name, kind in kernel.numbers.items()
    ]
    if kernel.elementwise:
        flat = [array.reshape(-1) for array in feed]
        for k in range(flat[0].size):
            outputs[0].reshape(-1)[k] = phases[0](*(array[k] for array in flat), *values)
        return outputs
    tensors = [array.view(np.uint8) if array.dtype == bool else array for array in (*feed, *outputs)]
    views = [array.reshape(shape) for array, shape in zip(tensors, planned.views, strict=True)]
    scratch = [np.full(shape, np.nan, dtype) for shape in planned.scratch]
    named = dict(zip(kernel.names, (*views, *scratch), strict=True))
    compute_products(planned.before, named)
    counts = planned.tasks if isinstance(planned.tasks, tuple) else (planned.tasks,)
    named_values = {**named, **dict(zip(kernel.numbers, values, strict=True))}
    for phase, function, count in zip(kernel.phases, phases, counts, strict=True):
        arguments = [value_of(each, named_values) for each in kernel.parameters(phase)]
        for task in range(count):
            assert not function(task, *arguments)
    compute_products(planned.after, named)
    return outputs
