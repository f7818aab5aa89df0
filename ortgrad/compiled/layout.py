"""The memory that Python and compiled code share. All fields are 64 bits wide; places are counted in fields.

The state of a kernel, one per node:

    STATE_API       address of onnxruntime's OrtApi
    STATE_PYTHON    address of the C function that runs the kernel in Python
    STATE_OBJECT    address of the Python object that it takes
    STATE_BLOCK     address of the compiled `block`; 0 if the node runs in Python
    STATE_INPUTS    number of inputs
    STATE_OUTPUTS   number of outputs
    STATE_CONTENTS  bit i is set if the elements of input i, a short vector of int64, belong to the key
    STATE_ELEMENT   onnxruntime's number of the element type
    STATE_MEMORY    address of onnxruntime's OrtMemoryInfo of ordinary memory
    STATE_GUARDED   address of the function that runs `block` on any thread, flushing subnormal numbers; 0 if
                    they are not to be flushed
    STATE_PRODUCTS  addresses of onnxruntime's operators, one for each of PRODUCT_KINDS
    STATE_TYPES     onnxruntime's numbers of the element types of all inputs
    STATE_CLOCK     number of calls that have found a plan
    STATE_ACTIVE    number of calls that are under way, on all threads
    STATE_PLANS     number of plans, followed by the addresses of up to MOST_PLANS plans

A plan says how the kernel runs on certain shapes:

    PLAN_KEY        number of fields of the key
    PLAN_OUTPUTS    place of the shapes of the outputs: for each the rank and the sizes
    PLAN_BLOCK      place of the part that `block` reads (below)
    PLAN_USED       the clock of the state when it was last used
    PLAN_FIELDS     the key: for each input the rank, the sizes and, if they belong to the key, the elements

    PHASES          number of phases; one begins when the tasks of the previous one are done
    SCRATCH_COUNT   number of scratch tensors
    SCRATCH_BYTES   size of the memory of all of them, and of the room for a matrix behind them
    SCRATCH_ROOM    place of that room in the memory, in bytes
    PRODUCTS        place of the products
    PRODUCTS_BEFORE number of operations for products that onnxruntime performs before the phases
    PRODUCTS_AFTER  number of those that it performs after them
    PHASE_FIELDS    for each phase the number of tasks, and of blocks into which they are divided;
                    then the place of each scratch tensor in the memory, in bytes;
                    then the sizes of all views, then the numbers

An operation has PRODUCT_SIZE fields: PRODUCT_KIND, and for each of its three matrices, the factors and the
result, from PRODUCT_MATRICES on,

    MATRIX_TENSOR   number of the tensor that contains it; the room has the number after all tensors
    MATRIX_START    place of its first element in the tensor, in bytes
    MATRIX_BYTES    its size
    MATRIX_SHAPE    the numbers of rows and columns

A call is what `block` receives:

    CALL_PLAN       address of the second part of the plan
    CALL_PHASE      number of the phase
    CALL_FAILED     set to 1 by a task that fails
    CALL_BLOCK      address of `block`
    TENSORS         addresses of the data of all inputs, outputs and scratch tensors, and of the room
"""

from __future__ import annotations

STATE_API, STATE_PYTHON, STATE_OBJECT, STATE_BLOCK, STATE_INPUTS, STATE_OUTPUTS, STATE_CONTENTS = range(7)
STATE_ELEMENT, STATE_MEMORY, STATE_GUARDED, STATE_PRODUCTS = range(7, 11)
# How the factors of a product are read: as they are, or transposed. "turn" transposes the left one, no more.
PRODUCT_KINDS = ("", "left", "right", "both", "turn")
# Limits of what compiled code reads: tensors of a node, dimensions of a tensor, elements in a key.
MOST_TENSORS = 40
MOST_DIMENSIONS = 8
MOST_CONTENTS = 8
KEY_SIZE = MOST_TENSORS * (1 + MOST_DIMENSIONS) + 64

STATE_TYPES = STATE_PRODUCTS + len(PRODUCT_KINDS)
STATE_CLOCK = STATE_TYPES + MOST_TENSORS
STATE_ACTIVE = STATE_CLOCK + 1
STATE_PLANS = STATE_ACTIVE + 1
MOST_PLANS = 256
STATE_SIZE = STATE_PLANS + 1 + MOST_PLANS

PLAN_KEY, PLAN_OUTPUTS, PLAN_BLOCK, PLAN_USED, PLAN_FIELDS = range(5)

PHASES, SCRATCH_COUNT, SCRATCH_BYTES, SCRATCH_ROOM = range(4)
PRODUCTS, PRODUCTS_BEFORE, PRODUCTS_AFTER, PHASE_FIELDS = range(4, 8)

PRODUCT_KIND, PRODUCT_MATRICES = range(2)
MATRIX_TENSOR, MATRIX_START, MATRIX_BYTES, MATRIX_SHAPE = range(4)
MATRIX_SIZE = 5
PRODUCT_SIZE = PRODUCT_MATRICES + 3 * MATRIX_SIZE

CALL_PLAN, CALL_PHASE, CALL_FAILED, CALL_BLOCK, TENSORS = range(5)

ITEM_SIZES = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1}
