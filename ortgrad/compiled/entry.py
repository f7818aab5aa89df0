"""The compiled function that onnxruntime calls for every node (KernelComputeV2). Numba compiles this module.

It reads the shapes of the inputs, looks for the plan that was made for them, allocates the outputs and
performs the blocks of the plan, on onnxruntime's threads if there are several; onnxruntime's own Gemm
computes the plan's products before and after. Whatever is out of the ordinary is left to the Python function
of the kernel: shapes without a plan, a failing task, an error.

Meanwhile, subnormal numbers are flushed to zero, on this thread and on the threads of the blocks.
"""

from __future__ import annotations

from ortgrad.compiled import layout
from ortgrad.compiled.instructions import (
    add_atomically,
    call2,
    call3,
    call5,
    call6,
    call7,
    flush_subnormals,
    free,
    load,
    malloc,
    restore_floats,
    stack,
    store,
)
from ortgrad.compiled.libraries import inner

# Places in OrtApi.
_DATA, _TYPE, _RANK, _SIZES, _TYPE_AND_SHAPE = 8 * 51, 8 * 60, 8 * 61, 8 * 62, 8 * 65
_INPUT, _OUTPUT = 8 * 90, 8 * 91
_RELEASE_STATUS, _RELEASE_VALUE, _RELEASE_INFO = 8 * 93, 8 * 96, 8 * 99
_TENSOR_OF_MEMORY, _INVOKE, _PARALLEL_FOR = 8 * 49, 8 * 214, 8 * 274
_ALLOCATE, _FREE, _RELEASE_ALLOCATOR, _ALLOCATOR = 8 * 75, 8 * 76, 8 * 132, 8 * 253
# In bytes: larger scratch memory comes from onnxruntime, which keeps it for the next run. malloc would return
# it to the system, and every page would have to be mapped and cleared again.
_LARGE_SCRATCH = 1 << 16

_API, _PYTHON, _OBJECT, _BLOCK = (
    8 * place for place in (layout.STATE_API, layout.STATE_PYTHON, layout.STATE_OBJECT, layout.STATE_BLOCK)
)
_INPUTS, _OUTPUTS, _CONTENTS, _PLANS = (
    8 * place
    for place in (layout.STATE_INPUTS, layout.STATE_OUTPUTS, layout.STATE_CONTENTS, layout.STATE_PLANS)
)
_ELEMENT, _MEMORY, _GUARDED, _PRODUCTS_OF_STATE, _TYPES = (
    8 * place
    for place in (
        *(layout.STATE_ELEMENT, layout.STATE_MEMORY, layout.STATE_GUARDED),
        *(layout.STATE_PRODUCTS, layout.STATE_TYPES),
    )
)
_CLOCK, _ACTIVE = 8 * layout.STATE_CLOCK, 8 * layout.STATE_ACTIVE
_PLAN_KEY, _PLAN_OUTPUTS, _PLAN_BLOCK, _PLAN_USED, _PLAN_FIELDS = (
    8 * place
    for place in (
        *(layout.PLAN_KEY, layout.PLAN_OUTPUTS, layout.PLAN_BLOCK, layout.PLAN_USED),
        layout.PLAN_FIELDS,
    )
)
_TENSORS, _PHASE, _FAILED = 8 * layout.TENSORS, 8 * layout.CALL_PHASE, 8 * layout.CALL_FAILED
_BLOCK_OF_CALL = 8 * layout.CALL_BLOCK
_PHASES, _SCRATCH_COUNT, _SCRATCH_BYTES, _SCRATCH_ROOM, _PHASE_FIELDS = (
    8 * place
    for place in (
        *(layout.PHASES, layout.SCRATCH_COUNT, layout.SCRATCH_BYTES, layout.SCRATCH_ROOM),
        layout.PHASE_FIELDS,
    )
)
_PRODUCTS, _PRODUCTS_BEFORE, _PRODUCTS_AFTER, _PRODUCT_SIZE, _MATRICES, _MATRIX_SIZE = (
    8 * place
    for place in (
        *(layout.PRODUCTS, layout.PRODUCTS_BEFORE, layout.PRODUCTS_AFTER),
        *(layout.PRODUCT_SIZE, layout.PRODUCT_MATRICES, layout.MATRIX_SIZE),
    )
)
_START, _BYTES, _SHAPE = (
    8 * place for place in (layout.MATRIX_START, layout.MATRIX_BYTES, layout.MATRIX_SHAPE)
)
_TURN = layout.PRODUCT_KINDS.index("turn")
_MOST_DIMENSIONS, _MOST_CONTENTS = layout.MOST_DIMENSIONS, layout.MOST_CONTENTS
_key_fields = stack(layout.KEY_SIZE)
_call_fields = stack(layout.TENSORS + layout.MOST_TENSORS + 1)
_answers = stack(3)


@inner
def _fails(api: int, status: int) -> bool:
    """Return whether a status is an error, which is released."""
    if status != 0:
        call2(load(api + _RELEASE_STATUS), status, 0)
        return True
    return False


@inner
def _read_inputs(state: int, context: int, key: int, call: int, answers: int) -> int:
    """Write the key and the addresses of the inputs' data; return the length of the key, -1 on failure."""
    api, length = load(state + _API), 0
    for i in range(load(state + _INPUTS)):
        if _fails(api, call3(load(api + _INPUT), context, i, answers)):
            return -1
        value = load(answers)
        if value == 0 or _fails(api, call2(load(api + _DATA), value, call + _TENSORS + 8 * i)):
            return -1
        if _fails(api, call2(load(api + _TYPE_AND_SHAPE), value, answers)):
            return -1
        info = load(answers)
        # The type is 32 bits wide.
        store(answers, 0)
        failed = _fails(api, call2(load(api + _TYPE), info, answers))
        failed = failed or load(answers) != load(state + _TYPES + 8 * i)
        failed = failed or _fails(api, call2(load(api + _RANK), info, key + 8 * length))
        rank = 0 if failed else load(key + 8 * length)
        if not failed and rank <= _MOST_DIMENSIONS:
            failed = _fails(api, call3(load(api + _SIZES), info, key + 8 * (length + 1), rank))
        call2(load(api + _RELEASE_INFO), info, 0)
        if failed or rank > _MOST_DIMENSIONS:
            return -1
        length += 1 + rank
        if load(state + _CONTENTS) >> i & 1:
            count = load(key + 8 * (length - 1)) if rank == 1 else -1
            if count < 0 or count > _MOST_CONTENTS:
                return -1
            elements = load(call + _TENSORS + 8 * i)
            for k in range(count):
                store(key + 8 * (length + k), load(elements + 8 * k))
            length += count
    return length


@inner
def _find_plan(state: int, key: int, length: int) -> int:
    """Return the address of the plan with this key; 0 if there is none."""
    for i in range(load(state + _PLANS)):
        plan = load(state + _PLANS + 8 * (i + 1))
        if load(plan + _PLAN_KEY) == length:
            same = True
            for k in range(length):
                if load(plan + _PLAN_FIELDS + 8 * k) != load(key + 8 * k):
                    same = False
                    break
            if same:
                # Threads that do this at once may leave an older time: it need not be exact.
                clock = load(state + _CLOCK) + 1
                store(state + _CLOCK, clock)
                store(plan + _PLAN_USED, clock)
                return plan
    return 0


@inner
def _multiply(state: int, context: int, call: int, product: int, answers: int) -> bool:
    """Let onnxruntime compute a product, or turn a matrix; return whether that succeeded."""
    api, made, failed = load(state + _API), 0, False
    while made < 3 and not failed:
        matrix = product + _MATRICES + made * _MATRIX_SIZE
        data = load(call + _TENSORS + 8 * load(matrix)) + load(matrix + _START)
        create, memory, size = load(api + _TENSOR_OF_MEMORY), load(state + _MEMORY), load(matrix + _BYTES)
        element, value = load(state + _ELEMENT), answers + 8 * made
        failed = _fails(api, call7(create, memory, data, size, matrix + _SHAPE, 2, element, value))
        made += 0 if failed else 1
    if not failed:
        operator = load(state + _PRODUCTS_OF_STATE + 8 * load(product))
        factors = 1 if load(product) == _TURN else 2
        # The result is the last matrix.
        failed = _fails(api, call6(load(api + _INVOKE), context, operator, answers, factors, answers + 16, 1))
    for i in range(made):
        call2(load(api + _RELEASE_VALUE), load(answers + 8 * i), 0)
    return not failed


@inner
def _allocate(state: int, context: int, size: int, answers: int) -> tuple[int, int]:
    """Return the addresses of scratch memory, 0 if there is none, and of its allocator, 0 for malloc."""
    api = load(state + _API)
    if size < _LARGE_SCRATCH:
        return malloc(size), 0
    if _fails(api, call3(load(api + _ALLOCATOR), context, load(state + _MEMORY), answers)):
        return 0, 0
    allocator = load(answers)
    if _fails(api, call3(load(api + _ALLOCATE), allocator, size, answers)):
        call2(load(api + _RELEASE_ALLOCATOR), allocator, 0)
        return 0, 0
    return load(answers), allocator


@inner
def _release(state: int, memory: int, allocator: int) -> None:
    api = load(state + _API)
    if allocator == 0:
        free(memory)
    else:
        _fails(api, call2(load(api + _FREE), allocator, memory))
        call2(load(api + _RELEASE_ALLOCATOR), allocator, 0)


@inner
def _perform(state: int, context: int, plan: int, call: int, answers: int) -> bool:
    """Allocate the outputs and perform all blocks; return whether everything succeeded."""
    api, inputs = load(state + _API), load(state + _INPUTS)
    output = plan + 8 * load(plan + _PLAN_OUTPUTS)
    for i in range(load(state + _OUTPUTS)):
        rank = load(output)
        if _fails(api, call5(load(api + _OUTPUT), context, i, output + 8, rank, answers)):
            return False
        if _fails(api, call2(load(api + _DATA), load(answers), call + _TENSORS + 8 * (inputs + i))):
            return False
        output += 8 * (1 + rank)
    part = plan + 8 * load(plan + _PLAN_BLOCK)
    store(call, part)
    store(call + _FAILED, 0)
    store(call + _BLOCK_OF_CALL, load(state + _BLOCK))
    parallel = load(state + _GUARDED) if load(state + _GUARDED) != 0 else load(state + _BLOCK)
    phases, size, memory, allocator = load(part + _PHASES), load(part + _SCRATCH_BYTES), 0, 0
    if size > 0:
        memory, allocator = _allocate(state, context, size, answers)
        if memory == 0:
            return False
        first, count = inputs + load(state + _OUTPUTS), load(part + _SCRATCH_COUNT)
        for i in range(count):
            place = load(part + _PHASE_FIELDS + 16 * phases + 8 * i)
            store(call + _TENSORS + 8 * (first + i), memory + place)
        store(call + _TENSORS + 8 * (first + count), memory + load(part + _SCRATCH_ROOM))
    succeeded = True
    product, before = part + 8 * load(part + _PRODUCTS), load(part + _PRODUCTS_BEFORE)
    for i in range(before):
        succeeded = succeeded and _multiply(state, context, call, product + i * _PRODUCT_SIZE, answers)
    for phase in range(phases if succeeded else 0):
        store(call + _PHASE, phase)
        blocks = load(part + _PHASE_FIELDS + 16 * phase + 8)
        if blocks == 1:
            call2(load(state + _BLOCK), call, 0)
        elif blocks > 1:
            status = call5(load(api + _PARALLEL_FOR), context, parallel, blocks, 0, call)
            if _fails(api, status):
                succeeded = False
        if not succeeded or load(call + _FAILED) != 0:
            succeeded = False
            break
    for i in range(before, before + load(part + _PRODUCTS_AFTER)):
        succeeded = succeeded and _multiply(state, context, call, product + i * _PRODUCT_SIZE, answers)
    if size > 0:
        _release(state, memory, allocator)
    return succeeded


@inner
def _compute(state: int, context: int) -> int:
    if load(state + _BLOCK) != 0:
        key, call, answers = _key_fields(), _call_fields(), _answers()
        length = _read_inputs(state, context, key, call, answers)
        if length >= 0:
            plan = _find_plan(state, key, length)
            if plan != 0 and _perform(state, context, plan, call, answers):
                return 0
    return call2(load(state + _PYTHON), load(state + _OBJECT), context)


def compute(state: int, context: int) -> int:
    """Run a kernel; returns the address of onnxruntime's status, 0 for success."""
    # While a call is under way it may hold a plan.
    add_atomically(state + _ACTIVE, 1)
    if load(state + _GUARDED) == 0:
        status = _compute(state, context)
    else:
        floats = flush_subnormals()
        status = _compute(state, context)
        restore_floats(floats)
    add_atomically(state + _ACTIVE, -1)
    return status


def guarded(call: int, i: int) -> int:
    """Perform a block of tasks on a thread in an unknown state."""
    floats = flush_subnormals()
    call2(load(call + _BLOCK_OF_CALL), call, i)
    restore_floats(floats)
    return 0


def perform(state: int, context: int, plan: int) -> int:
    """Run a kernel by a plan that was made for these inputs; returns 0 for success and 1 for failure."""
    key, call, answers = _key_fields(), _call_fields(), _answers()
    if _read_inputs(state, context, key, call, answers) < 0:
        return 1
    return 0 if _perform(state, context, plan, call, answers) else 1
