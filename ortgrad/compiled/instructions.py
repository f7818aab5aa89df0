"""Instructions for compiled code that cannot be written in Python. This module imports Numba."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from ortgrad.compiled import functions, libraries, processor
from ortgrad.compiled.functions import SUMS
from ortgrad.compiled.layout import ITEM_SIZES
from ortgrad.compiled.libraries import inner

_WORD = ir.IntType(64)
WORD = types.int64
_LLVM_TYPES = {
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
    "int32": ir.IntType(32),
    "int64": _WORD,
    "bool": ir.IntType(8),
}


@intrinsic
def load(_: Any, address: Any) -> Any:
    """Return the 64-bit integer at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _WORD.as_pointer()))

    return WORD(WORD), generate


@intrinsic
def load_double(_: Any, address: Any) -> Any:
    """Return the double-precision number at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.DoubleType().as_pointer()))

    return types.float64(WORD), generate


@intrinsic
def store(_: Any, address: Any, value: Any) -> Any:
    """Write a 64-bit integer to an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()))
        return context.get_dummy_value()

    return types.void(WORD, WORD), generate


@intrinsic
def add_atomically(_: Any, address: Any, value: Any) -> Any:
    """Add to the 64-bit integer at an address, to which other threads may add at the same time."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.atomic_rmw("add", place, arguments[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(WORD, WORD), generate


# The bits of MXCSR, and of AArch64's FPCR, by which subnormal operands and results are zero.
_FTZ_AND_DAZ, _FZ = 0x8040, 1 << 24


@intrinsic
def flush_subnormals(_: Any) -> Any:
    """Flush subnormal numbers to zero on this thread; returns its state before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _is_x86():
            place = _stored_word(builder, ir.Constant(_HALF, 0))
            builder.call(_declared(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), _BYTES), [place])
            before = builder.zext(builder.load(builder.bitcast(place, _HALF.as_pointer())), _WORD)
            _write_floats(builder, builder.or_(before, _WORD(_FTZ_AND_DAZ)))
        elif _is_arm():
            before = builder.call(_declared(builder, "llvm.aarch64.get.fpcr", _WORD), [])
            _write_floats(builder, builder.or_(before, _WORD(_FZ)))
        else:
            before = _WORD(0)
        return before

    return WORD(), generate


@intrinsic
def restore_floats(_: Any, state: Any) -> Any:
    """Give the thread the state that `flush_subnormals` has returned."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _write_floats(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(WORD), generate


_HALF = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def _is_x86() -> bool:
    return bool(llvm.get_process_triple().startswith("x86_64"))


def _is_arm() -> bool:
    return bool(llvm.get_process_triple().startswith(("aarch64", "arm64")))


def _write_floats(builder: Any, state: Any) -> None:
    if _is_x86():
        place = _stored_word(builder, builder.trunc(state, _HALF))
        builder.call(_declared(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), _BYTES), [place])
    elif _is_arm():
        builder.call(_declared(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), _WORD), [state])


def _stored_word(builder: Any, value: Any) -> Any:
    with builder.goto_entry_block():
        place = builder.alloca(_HALF)
    builder.store(value, place)
    return builder.bitcast(place, _BYTES)


def _declared(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def stack(count: int) -> Any:
    """Return a function for the address of `count` 64-bit fields on the stack of the calling function."""

    @intrinsic
    def fields(_: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with builder.goto_entry_block():
                place = builder.alloca(_WORD, count)
            return builder.ptrtoint(place, _WORD)

        return WORD(), generate

    return fields


def _call(builder: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(_WORD, [_WORD] * (len(arguments) - 1)).as_pointer()
    return builder.call(builder.inttoptr(arguments[0], kind), list(arguments[1:]))


@intrinsic
def call2(_: Any, address: Any, a: Any, b: Any) -> Any:
    """Call the C function at an address. All arguments and the result are 64 bits wide."""
    return WORD(*[WORD] * 3), lambda context, builder, signature, arguments: _call(builder, arguments)


@intrinsic
def call3(_: Any, address: Any, a: Any, b: Any, c: Any) -> Any:
    """Call a C function with three arguments."""
    return WORD(*[WORD] * 4), lambda context, builder, signature, arguments: _call(builder, arguments)


@intrinsic
def call5(_: Any, address: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call a C function with five arguments."""
    return WORD(*[WORD] * 6), lambda context, builder, signature, arguments: _call(builder, arguments)


@intrinsic
def call6(_: Any, address: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call a C function with six arguments."""
    return WORD(*[WORD] * 7), lambda context, builder, signature, arguments: _call(builder, arguments)


@intrinsic
def call7(_: Any, address: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> Any:
    """Call a C function with seven arguments."""
    return WORD(*[WORD] * 8), lambda context, builder, signature, arguments: _call(builder, arguments)


def view_of(dtype: str) -> Any:
    """Return a function that makes an array of elements of a type out of an address and the shape."""
    # Booleans are bytes with the values 0 and 1.
    numba_type = types.uint8 if dtype == "bool" else getattr(types, dtype)

    @intrinsic
    def view(_: Any, address: Any, shape: Any) -> Any:
        array_type = types.Array(numba_type, len(shape), "C")

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = context.make_array(array_type)(context, builder)
            sizes = cgutils.unpack_tuple(builder, arguments[1])
            strides = [_WORD(ITEM_SIZES[dtype])]
            for size in reversed(sizes[1:]):
                strides.insert(0, builder.mul(strides[0], size))
            arrayobj.populate_array(
                array,
                data=builder.inttoptr(arguments[0], _LLVM_TYPES[dtype].as_pointer()),
                shape=sizes,
                strides=strides,
                itemsize=ITEM_SIZES[dtype],
                meminfo=None,
            )
            return array._getvalue()

        return array_type(WORD, types.UniTuple(WORD, len(shape))), generate

    return view


def _of_numbers(write: Callable[..., Any]) -> Any:
    """Make an instruction whose arguments and result are numbers of one type; `write` writes its code."""
    builder, *parameters = inspect.signature(write).parameters.values()

    def definition(_: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return write(builder, *arguments)

        return kinds[0](*[kinds[0]] * len(kinds)), generate

    return _intrinsic(definition, write.__name__, [builder, *parameters])


def _intrinsic(definition: Callable[..., Any], name: str, parameters: list[inspect.Parameter]) -> Any:
    """Return an intrinsic whose definition takes any arguments, with a name and parameters for Numba."""
    definition.__name__ = name
    definition.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(definition)


@_of_numbers
def rint(builder: Any, x: Any) -> Any:
    """The nearest integer as a floating-point number."""
    return builder.call(builder.module.declare_intrinsic("llvm.rint", [x.type]), [x])


def _bits_of(kind: Any) -> tuple[Any, int, int]:
    """Return the integers of the size of a number, the bias of its exponent and the size of its fraction."""
    if isinstance(kind, ir.DoubleType):
        return _WORD, 1023, 52
    return _HALF, 127, 23


@_of_numbers
def power_of_two(builder: Any, n: Any) -> Any:
    """2**n for an integral floating-point number n: it becomes the exponent of the result."""
    integer, bias, size = _bits_of(n.type)
    exponent = builder.add(builder.fptosi(n, integer), integer(bias))
    return builder.bitcast(builder.shl(exponent, integer(size)), n.type)


@_of_numbers
def times_power(builder: Any, x: Any, t: Any) -> Any:
    """x * 2**n for the integer n in the lowest bits of t: it is added to the exponent."""
    integer, _, size = _bits_of(x.type)
    value, power = (builder.bitcast(number, integer) for number in (x, t))
    return builder.bitcast(builder.add(value, builder.shl(power, integer(size))), x.type)


@_of_numbers
def exponent(builder: Any, x: Any) -> Any:
    """The exponent of a positive normal number, as a floating-point number."""
    integer, bias, size = _bits_of(x.type)
    biased = builder.lshr(builder.bitcast(x, integer), integer(size))
    return builder.sitofp(builder.sub(biased, integer(bias)), x.type)


@_of_numbers
def fraction(builder: Any, x: Any) -> Any:
    """A positive normal number with the exponent of 1."""
    integer, bias, size = _bits_of(x.type)
    low = builder.and_(builder.bitcast(x, integer), integer((1 << size) - 1))
    return builder.bitcast(builder.or_(low, integer(bias << size)), x.type)


@_of_numbers
def sqrt(builder: Any, x: Any) -> Any:
    """The square root."""
    return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [x.type]), [x])


@_of_numbers
def accumulate(builder: Any, total: Any, x: Any) -> Any:
    """total + x, a sum whose terms may change places."""
    return builder.fadd(total, x, flags=("reassoc", "nsz", "contract"))


def _place(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Return the address of an element of a contiguous array."""
    data = context.make_array(kind)(context, builder, value=array).data
    return builder.gep(data, [index])


@intrinsic
def subrecord(_: Any, record: Any, start: Any, size: Any) -> Any:
    """Return consecutive integers of a record, without the checks of a slice."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.return_type)(context, builder)
        data = _place(context, builder, record, *arguments[:2])
        item = ITEM_SIZES["int64"]
        arrayobj.populate_array(
            array, data=data, shape=[arguments[2]], strides=[_WORD(item)], itemsize=item, meminfo=None
        )
        return array._getvalue()

    return types.Array(WORD, 1, "C")(record, WORD, WORD), generate


def _disjoint(builder: Any, instruction: Any, own: str, other: str) -> None:
    """Tell LLVM that accesses marked with `own` never touch the memory of those marked with `other`."""
    module = builder.module
    domain = module.add_metadata(["ortgrad"])
    scopes = {name: module.add_metadata([[name, domain]]) for name in (own, other)}
    for key, name in (("alias.scope", own), ("noalias", other)):
        instruction.set_metadata(key, scopes[name])


@intrinsic
def fetch(_: Any, array: Any, k: Any) -> Any:
    """Return an element of an input of the node."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, array, *arguments)
        value = builder.load(place, align=array.dtype.bitwidth // 8)
        _disjoint(builder, value, "inputs", "outputs")
        return value

    return array.dtype(array, WORD), generate


@intrinsic
def put(_: Any, array: Any, k: Any, value: Any) -> Any:
    """Set an element of an output of the node."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, array, *arguments[:2])
        done = builder.store(arguments[2], place, align=array.dtype.bitwidth // 8)
        _disjoint(builder, done, "outputs", "inputs")
        return context.get_dummy_value()

    return types.void(array, WORD, array.dtype), generate


@intrinsic
def use_short_vectors(_: Any) -> Any:
    """Mark the calling function: its loops are vectorized with 256 bits at most."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite writes all attributes as they are, but `add` itself accepts only those without a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="256"')
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def double(_: Any, x: Any) -> Any:
    """Return a number in double precision."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], signature.args[0], types.float64)

    return types.float64(x), generate


@intrinsic
def malloc(_: Any, size: Any) -> Any:
    """Return the address of new memory; 0 if there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "malloc"), arguments)

    return WORD(WORD), generate


@intrinsic
def free(_: Any, address: Any) -> Any:
    """Release memory of malloc."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "free"), arguments)
        return context.get_dummy_value()

    return types.void(WORD), generate


def _kept(builder: Any, place: Any) -> Any:
    """Return the address of a field of the table of released memory."""
    table = builder.module.globals.get(processor.KEPT)
    if table is None:
        count = processor.KEPT_SIZES * processor.KEPT_OF_A_SIZE
        table = ir.GlobalVariable(builder.module, ir.ArrayType(_WORD, count), processor.KEPT)
    return builder.gep(table, [_WORD(0), place])


@intrinsic
def _take_kept(_: Any, place: Any) -> Any:
    """Return an address of released memory, which nobody else takes; 0 if there is none at this place."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("xchg", _kept(builder, arguments[0]), _WORD(0), "acquire")

    return WORD(WORD), generate


@intrinsic
def _keep(_: Any, place: Any, address: Any) -> Any:
    """Put an address of released memory at a place, and return whether that was empty."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, address = _kept(builder, arguments[0]), arguments[1]
        done = builder.cmpxchg(place, _WORD(0), address, "release", "monotonic")
        return builder.extract_value(done, 1)

    return types.boolean(WORD, WORD), generate


# In bytes: the smallest memory that is kept, and what is in front of all memory.
_LEAST_KEPT, _HEADER = 1 << 15, 64
_SIZES, _OF_A_SIZE = processor.KEPT_SIZES, processor.KEPT_OF_A_SIZE


@functools.partial(inner, inlined=False)
def _allocate(size: int) -> int:
    """Return the address of memory; 0 if there is none.

    What tasks release is kept for others, unless it is small or very large. free would return it to the
    system, and in the next run every page would have to be mapped and cleared again.
    """
    kind, length = -1, size
    if size >= _LEAST_KEPT // 2 and size <= _LEAST_KEPT << (_SIZES - 1):
        kind, length = 0, _LEAST_KEPT
        while length < size:
            kind, length = kind + 1, 2 * length
        for i in range(_OF_A_SIZE):
            address = _take_kept(kind * _OF_A_SIZE + i)
            if address != 0:
                return address
    address = malloc(length + _HEADER)
    if address == 0:
        return 0
    store(address, kind)
    return address + _HEADER


@functools.partial(inner, inlined=False)
def _release(address: int) -> None:
    if address == 0:
        return
    kind = load(address - _HEADER)
    if kind >= 0:
        for i in range(_OF_A_SIZE):
            if _keep(kind * _OF_A_SIZE + i, address):
                return
    free(address - _HEADER)


_sums = stack(SUMS)
_views = {dtype: view_of(dtype) for dtype in ("float32", "float64", "int64")}
_view_of_doubles = _views["float64"]


@inner
def doubles() -> Any:
    """Return an array of double-precision numbers on the stack of the calling function."""
    return _view_of_doubles(_sums(), (SUMS,))


def allocator(dtype: str) -> Any:
    """Return a function that allocates an array of a type."""
    view, size = _views[dtype], ITEM_SIZES[dtype]

    @inner
    def allocate(count: int) -> Any:
        address = _allocate(count * size)
        return view(address, (count if address != 0 else 0,))

    return allocate


@inner
def release(array: Any) -> None:
    """Release the memory of an array that was allocated."""
    _release(array.ctypes.data)


class Array:
    """An array that an instruction is given."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value=value)
        self._builder = builder
        # The address of the first element, and the number of elements.
        self.data, self.length = array.data, builder.extract_value(array.shape, 0)
        self.bits = kind.dtype.bitwidth
        self.element = ir.DoubleType() if kind.dtype == types.float64 else ir.FloatType()

    def at(self, place: Any) -> Any:
        """Return the address of an element."""
        return self._builder.gep(self.data, [place])


# Instructions for arrays, by their names. Other modules add to them.
INSTRUCTIONS: dict[str, Any] = {}


def instruction(write: Callable[[Any, Any, Any], None]) -> Any:
    """Make an instruction; `write` writes its code, given the context, the builder and the arguments.

    It has the parameters of the function of the same name in ortgrad.compiled.functions. The arguments are
    found by these names: arrays as Array, other numbers as integers of 64 bits, and the fields of a bundle by
    their names.
    """
    plain = functions.PRIMITIVES[write.__name__]
    parameters = list(inspect.signature(plain).parameters.values())

    def definition(_: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = [
                _operand(context, builder, kind, value)
                for kind, value in zip(signature.args, arguments, strict=True)
            ]
            names = [parameter.name for parameter in parameters]
            write(context, builder, SimpleNamespace(**dict(zip(names, values, strict=True))))
            return context.get_dummy_value()

        return types.void(*(WORD if isinstance(kind, types.Number) else kind for kind in kinds)), generate

    first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made = INSTRUCTIONS[write.__name__] = _intrinsic(definition, write.__name__, [first, *parameters])
    return made


def _operand(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        return Array(context, builder, kind, value)
    if isinstance(kind, types.BaseNamedTuple):
        values = zip(kind, cgutils.unpack_tuple(builder, value), strict=True)
        fields = [_operand(context, builder, *each) for each in values]
        return SimpleNamespace(**dict(zip(kind.fields, fields, strict=True)))
    return context.cast(builder, value, kind, WORD)


def call_written(
    context: Any, builder: Any, name: str, values: Sequence[Any], body: Callable[[Any], None]
) -> None:
    """Call the function of this name, which `body` writes unless it exists already (see libraries.write)."""
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(libraries.write(context, builder, name, kind, body), values)


def lanes(bits: int) -> int:
    """Return how many numbers of `bits` bits a vector register holds."""
    features = processor.features()
    if "avx512f" in features:
        return 512 // bits
    return (256 if features >= {"avx", "fma"} else 128) // bits


def load_vector(builder: Any, row: Any, place: int, kind: Any, align: int) -> Any:
    pointer = builder.bitcast(builder.gep(row, [_WORD(place)]), kind.as_pointer())
    return builder.load(pointer, align=align)


def broadcast(builder: Any, number: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def transposed(builder: Any, source: Any, stride: Any, element: Any, size: int) -> list[Any]:
    """Return the columns of a square of numbers as vectors; `size` is a power of two, and at least 4."""
    kind, align = ir.VectorType(element, 4), 8 if isinstance(element, ir.DoubleType) else 4
    rows = [builder.gep(source, [builder.mul(stride, _WORD(i))]) for i in range(size)]

    def shuffle(left: Any, right: Any, places: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)
        return builder.shuffle_vector(left, right, mask)

    def join(parts: list[Any]) -> Any:
        while len(parts) > 1:
            both = list(range(2 * parts[0].type.count))
            parts = [shuffle(left, right, both) for left, right in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    # Pairs of two vectors, in every four of their numbers.
    low, high = ([k // 4 * 4 + k % 4 // 2 + k % 2 * size + first for k in range(size)] for first in (0, 2))
    columns = []
    for first in range(0, size, 4):
        # Vector i has four numbers of each of the rows i, i + 4, i + 8, ...: loading them so takes no
        # instruction that moves numbers within a vector. Then every square of four is transposed.
        parts = [[load_vector(builder, row, first, kind, align) for row in rows[i::4]] for i in range(4)]
        vectors = [join(part) for part in parts]
        for _ in range(2):
            vectors = [shuffle(vectors[i], vectors[i + 2], places) for i in (0, 1) for places in (low, high)]
        columns += vectors
    return columns
