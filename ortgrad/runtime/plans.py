"""The memory of a node's compiled kernel: its state, and plans for the shapes that it has met.

Compiled code finds the plan of a call by the shapes of the inputs. For new shapes it calls Python, which
checks them as for the NumPy kernel and makes a plan, so no kernel runs on shapes that have not been checked.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortgrad.compiled import layout, machine_code
from ortgrad.errors import RegistrationError
from ortgrad.operators.call import Call
from ortgrad.operators.compiled import CompiledKernel, Plan, Product, elementwise_plan
from ortgrad.operators.gemm import ROOM, Operation, operations
from ortgrad.runtime.c_api import Products
from ortgrad.runtime.evaluate import declared_shapes
from ortgrad.threads import make_reentrant_lock

# Elementary operations for which starting another thread pays off, and the limit of blocks.
_WORK_PER_BLOCK = 1 << 15
_MOST_BLOCKS = 64
_ALIGNMENT = 64
# Held while a plan is added to those of a kernel.
_lock = make_reentrant_lock()


class State:
    """The state of a kernel in native memory; `address` is what onnxruntime passes to the kernel."""

    def __init__(self, api: int, python: int, owner: object, *, guarded: int = 0) -> None:
        """`guarded` is the address of the function that flushes subnormal numbers; 0 if it is not wanted."""
        self._fields = np.zeros(layout.STATE_SIZE, np.int64)
        self._fields[layout.STATE_API] = api
        self._fields[layout.STATE_PYTHON] = python
        self._fields[layout.STATE_OBJECT] = id(owner)
        self._fields[layout.STATE_GUARDED] = guarded
        self._plans: list[np.ndarray] = []
        # Plans that have been replaced, which calls on other threads may still hold.
        self._replaced: list[np.ndarray] = []
        self._kernel: CompiledKernel | None = None
        self._products: Products | None = None

    @property
    def address(self) -> int:
        return self._fields.ctypes.data

    def use(
        self,
        kernel: CompiledKernel,
        call: Call,
        block: int,
        memory: int,
        products: Products | None,
        types: Sequence[int],
    ) -> None:
        """Make the node run a compiled kernel; `memory` is the address of the OrtMemoryInfo.

        `types` are onnxruntime's numbers of the inputs' element types.
        """
        if products is not None:
            self._products = products
            self._fields[layout.STATE_ELEMENT] = products.element
            last = layout.STATE_PRODUCTS + len(products.operators)
            self._fields[layout.STATE_PRODUCTS : last] = products.operators
        self._fields[layout.STATE_MEMORY] = memory
        self._fields[layout.STATE_TYPES : layout.STATE_TYPES + len(types)] = types
        contents = {row.parameter for row in call.contract.rows if row.contents}
        self._kernel = kernel
        self._fields[layout.STATE_INPUTS] = len(call.operator.inputs)
        self._fields[layout.STATE_OUTPUTS] = len(call.operator.outputs)
        self._fields[layout.STATE_CONTENTS] = sum(1 << i for i in contents)
        self._fields[layout.STATE_BLOCK] = block

    def run(self, context: int, call: Call, inputs: Sequence[np.ndarray]) -> bool:
        """Run the compiled kernel on inputs for which there is no plan yet; returns whether it could.

        Raises ValueError for inputs that violate the operator's contract.
        """
        if self._kernel is None:
            return False
        plan = _make_plan(self._kernel, call, inputs)
        if plan is None:
            return False
        # A plan that is not kept is made again. So nobody waits for a thread that may never release the lock,
        # because an exception of a debugger ended it between two bytecodes.
        if _lock.acquire(blocking=False):
            try:
                self._keep(plan)
            finally:
                _lock.release()
        return _perform()(self.address, context, plan.ctypes.data) == 0

    def _keep(self, plan: np.ndarray) -> None:
        """Keep a plan for further calls, in place of the one that was not used for the longest time."""
        place = int(self._fields[layout.STATE_PLANS])
        if self._replaced and self._fields[layout.STATE_ACTIVE] == 1:
            # Only this call is under way: the others that could have found these have ended.
            found = {*self._fields[layout.STATE_PLANS + 1 : layout.STATE_PLANS + 1 + place].tolist()}
            self._replaced = [each for each in self._replaced if each.ctypes.data in found]
        if place == layout.MOST_PLANS:
            if len(self._replaced) >= layout.MOST_PLANS:
                return
            place = min(range(place), key=lambda i: self._plans[i][layout.PLAN_USED])
        plan[layout.PLAN_USED] = self._fields[layout.STATE_CLOCK]
        # In this order: other threads may look for plans meanwhile, and an exception of a signal handler may
        # end this function anywhere.
        if place < len(self._plans):
            self._replaced.append(self._plans[place])
            self._plans[place] = plan
        else:
            self._plans.append(plan)
        self._fields[layout.STATE_PLANS + 1 + place] = plan.ctypes.data
        self._fields[layout.STATE_PLANS] = max(place + 1, self._fields[layout.STATE_PLANS])


@functools.cache
def _perform() -> Callable[[int, int, int], int]:
    entry = machine_code.entry()
    assert entry is not None  # else there are no states
    return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)(entry.perform)


def _make_plan(kernel: CompiledKernel, call: Call, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the plan for inputs of these shapes; None if the kernel does not support them."""
    arrays = [array if real else None for array, real in zip(inputs, call.present, strict=True)]
    call.contract.check_arrays(arrays)
    declared = declared_shapes(call, inputs)
    if any(_is_unknown(shape) for shape, wanted in zip(declared, call.wanted, strict=True) if wanted):
        return None
    outputs = [tuple(shape) if wanted else None for shape, wanted in zip(declared, call.wanted, strict=True)]
    given = [None if array is None else array.shape for array in arrays]
    if kernel.plan is None:
        made: Plan | None = elementwise_plan(given[0] or ())
    else:
        made = kernel.plan(*given, *outputs, **call.attributes)
    if made is None:
        return None
    key: list[int] = []
    contents = {row.parameter for row in call.contract.rows if row.contents}
    for i, array in enumerate(inputs):
        key += (array.ndim, *array.shape)
        if i in contents:
            key += array.tolist()
    shapes: list[int] = []
    for shape in outputs:
        shapes += (1, 0) if shape is None else (len(shape), *shape)
    if len(key) > layout.KEY_SIZE or max((len(s) for s in outputs if s), default=0) > layout.MOST_DIMENSIONS:
        return None
    begin = layout.PLAN_FIELDS + len(key)
    numbers: dict[str, Any] = {**call.attributes, **made.numbers}
    fields = block_fields(kernel, made, numbers, _float_size(inputs))
    return np.array([len(key), begin, begin + len(shapes), 0, *key, *shapes, *fields], np.int64)


def block_fields(kernel: CompiledKernel, plan: Plan, numbers: Mapping[str, Any], item: int) -> list[int]:
    """Return the part of a plan that `block` reads; `item` is the size of an element in bytes."""
    tasks = plan.tasks if isinstance(plan.tasks, tuple) else (plan.tasks,)
    work = plan.work or sum(math.prod(view) for view in plan.views)
    places = [0]
    for shape in plan.scratch:
        places.append(places[-1] + -(-math.prod(shape) * item // _ALIGNMENT) * _ALIGNMENT)
    before, after = (_operations(kernel, plan, products) for products in (plan.before, plan.after))
    matrices = [m for operation in (*before, *after) for m in operation[1:]]
    room = max((m.rows * m.columns for m in matrices if m.tensor == ROOM), default=0)
    fields = [
        len(tasks),
        len(plan.scratch),
        places[-1] + room * item,
        places[-1],
        0,  # the place of the products, which is not known yet
        len(before),
        len(after),
        *(number for count in tasks for number in (count, _blocks(count, work))),
        *places[:-1],
        *(size for view in (*plan.views, *plan.scratch) for size in view),
    ]
    arrays: list[int] = []
    end = len(fields) + sum(2 if kind == "array" else 1 for kind in kernel.numbers.values())
    for name, kind in kernel.numbers.items():
        value = numbers[name]
        if kind == "array":
            fields += (8 * (end + len(arrays)), len(value))
            arrays += value
        else:
            fields.append(_bits(value) if kind == "float" else int(value))
    fields += arrays
    fields[layout.PRODUCTS] = len(fields)
    for operation in (*before, *after):
        fields += _operation_fields(kernel, operation, item)
    return fields


def _operations(kernel: CompiledKernel, plan: Plan, products: Sequence[Product]) -> list[Operation]:
    """Return the operations of all products.

    Raises RegistrationError if the shapes of the matrices of one do not fit, or one exceeds its tensor.
    """
    if not products:
        return []
    sizes = dict(zip(kernel.names, map(math.prod, (*plan.views, *plan.scratch)), strict=True))
    for product in products:
        _check_product(kernel, product, sizes)
    return [operation for product in products for operation in operations(product)]


def _check_product(kernel: CompiledKernel, product: Product, sizes: Mapping[str, int]) -> None:
    into, left, right, transposed = product
    of_left = (left.columns, left.rows) if transposed == "left" else (left.rows, left.columns)
    of_right = (right.columns, right.rows) if transposed == "right" else (right.rows, right.columns)
    fit = (
        kernel.products
        and of_left[1] == of_right[0]
        and (into.rows, into.columns) == (of_left[0], of_right[1])
    )
    if not fit or any(
        m.start < 0 or m.start + m.rows * m.columns > sizes[m.tensor] for m in (into, left, right)
    ):
        raise RegistrationError(f"a product of {kernel.function.__name__} cannot be computed: {product}")


def _operation_fields(kernel: CompiledKernel, operation: Operation, item: int) -> list[int]:
    kind, *matrices = operation
    names = [*kernel.names, ROOM]
    fields = [layout.PRODUCT_KINDS.index(kind)]
    for m in matrices:
        size = m.rows * m.columns * item
        fields += (names.index(m.tensor), m.start * item, size, m.rows, m.columns)
    return fields


def _float_size(inputs: Sequence[np.ndarray]) -> int:
    """Return the size of an element of the first floating-point input; 0 if there is none."""
    return next((array.itemsize for array in inputs if array.dtype.kind == "f"), 0)


def _blocks(tasks: int, work: int) -> int:
    """Return the number of blocks. It depends on the shapes only, so results do not depend on threads."""
    return min(tasks, max(1, work // _WORK_PER_BLOCK), _MOST_BLOCKS)


def _is_unknown(shape: Sequence[int | str | None] | None) -> bool:
    return shape is None or not all(isinstance(size, (int, np.integer)) for size in shape)


def _bits(number: float) -> int:
    (bits,) = struct.unpack("q", struct.pack("d", number))
    return int(bits)
