"""Vectors of 64 numbers in Numba code: one 64-byte vector of codes, unpacked, multiplied and summed.

The page format stores codes as 64 bytes of 8 lanes by 8 contraction rows (byte ``8*lane + row``). ``Bytes64`` holds
such a vector, ``Floats64`` the same numbers in float32. Each operation is a few lines of target-independent LLVM that
the compiler splits into whatever registers the machine has. Offsets count elements of the array given, which is in C
order and may have any number of axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

COUNT = 64
ROWS = 8

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_F32 = ir.FloatType()


class _Vector(types.Type):
    def __init__(self, name: str, element: ir.Type) -> None:
        self.llvm = ir.VectorType(element, COUNT)
        super().__init__(name=name)


class Bytes64(_Vector):
    """64 unsigned bytes."""

    def __init__(self) -> None:
        super().__init__("kvsketch.Bytes64", _I8)


class Floats64(_Vector):
    """64 float32 numbers."""

    def __init__(self) -> None:
        super().__init__("kvsketch.Floats64", _F32)


@register_model(Bytes64)
@register_model(Floats64)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _Vector) -> None:
        super().__init__(manager, kind, kind.llvm)


bytes64, floats64 = Bytes64(), Floats64()


def _operation(signature: types.Type, emit: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    return signature, generate


def _memory(signature: Any, emit: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """An operation whose first two arguments are an array and an offset: `emit` gets a pointer for them."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, arguments: Any) -> Any:
        array = context.make_array(sig.args[0])(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        result = emit(builder, pointer, *arguments[2:])
        return context.get_dummy_value() if result is None else result

    return signature, generate


def _load(builder: ir.IRBuilder, pointer: Any, kind: ir.Type) -> Any:
    loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: ir.IRBuilder, pointer: Any, value: Any) -> None:
    stored = builder.store(value, builder.bitcast(pointer, value.type.as_pointer()))
    stored.align = 1


def _constant(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _shuffle(builder: ir.IRBuilder, vector: Any, indices: list[int]) -> Any:
    order = ir.Constant(ir.VectorType(_I32, len(indices)), indices)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def _splat(builder: ir.IRBuilder, x: Any, count: int = COUNT) -> Any:
    empty = ir.Constant(ir.VectorType(x.type, count), ir.Undefined)
    return _shuffle(builder, builder.insert_element(empty, x, _I32(0)), [0] * count)


def _repeat_rows(builder: ir.IRBuilder, rows: Any) -> Any:
    return _shuffle(builder, rows, list(range(ROWS)) * (COUNT // ROWS))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


@intrinsic
def stay_apart(_context: Any) -> Any:
    """Keep the function that calls this out of its callers: it is compiled once, not again wherever it is used."""

    def emit(builder: ir.IRBuilder) -> Any:
        builder.function.attributes.add("noinline")
        return ir.Constant(_I32, 0)

    return _operation(types.int32(), emit)


@intrinsic
def take_next(_context: Any, counter: Any) -> Any:
    """Add one to ``counter[0]`` of an int64 array that threads share, and return what it was before."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def prefetch(_context: Any, array: Any, offset: Any) -> Any:
    """Ask for the 64-byte line at `offset` of a uint8 array to be brought nearer; harmless beyond the array's end."""

    def emit(b: ir.IRBuilder, pointer: Any) -> None:
        flag = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(b.module, flag, "llvm.prefetch.p0")
        b.call(function, [pointer, _I32(0), _I32(3), _I32(1)])

    return _memory(types.void(array, types.intp), emit)


@intrinsic
def load_word(_context: Any, array: Any, offset: Any) -> Any:
    """The two bytes at `offset` of a uint8 array as one uint16."""
    return _memory(types.uint16(array, types.intp), lambda b, p: _load(b, p, _I16))


@intrinsic
def store_word(_context: Any, array: Any, offset: Any, word: Any) -> Any:
    """Write a uint16 to the two bytes at `offset` of a uint8 array."""
    return _memory(types.void(array, types.intp, types.uint16), _store)


@intrinsic
def load_float(_context: Any, array: Any, offset: Any) -> Any:
    """The four bytes at `offset` of a uint8 array as a float32 number."""
    return _memory(types.float32(array, types.intp), lambda b, p: _load(b, p, _F32))


@intrinsic
def load_bytes(_context: Any, array: Any, offset: Any) -> Any:
    """64 bytes of a uint8 array."""
    return _memory(bytes64(array, types.intp), lambda b, p: _load(b, p, bytes64.llvm))


@intrinsic
def load(_context: Any, array: Any, offset: Any) -> Any:
    """64 numbers of a float32 array."""
    return _memory(floats64(array, types.intp), lambda b, p: _load(b, p, floats64.llvm))


@intrinsic
def store(_context: Any, array: Any, offset: Any, vector: Any) -> Any:
    """Write 64 numbers to a float32 array."""
    return _memory(types.void(array, types.intp, floats64), _store)


@intrinsic
def load_rows(_context: Any, array: Any, offset: Any) -> Any:
    """8 numbers of a float32 array, one for each contraction row, the same for all 8 lanes."""
    return _memory(floats64(array, types.intp), lambda b, p: _repeat_rows(b, _load(b, p, ir.VectorType(_F32, ROWS))))


@intrinsic
def store_lane_sums(_context: Any, array: Any, offset: Any, vector: Any, constant: Any) -> Any:
    """Sum the 8 rows of each of the 8 lanes, add a constant, and write the 8 sums to a float32 array."""

    def emit(b: ir.IRBuilder, pointer: Any, vector: Any, constant: Any) -> None:
        parts = vector
        while parts.type.count > ROWS:
            count = parts.type.count
            even = _shuffle(b, parts, list(range(0, count, 2)))
            odd = _shuffle(b, parts, list(range(1, count, 2)))
            parts = b.fadd(even, odd)
        _store(b, pointer, b.fadd(parts, _splat(b, constant, ROWS)))

    return _memory(types.void(array, types.intp, floats64, types.float32), emit)


@intrinsic
def take_bits(_context: Any, vector: Any, shift: Any, mask: Any) -> Any:
    """``(x >> shift) & mask`` of each byte; `shift` below 8."""

    def emit(b: ir.IRBuilder, vector: Any, shift: Any, mask: Any) -> Any:
        return b.and_(b.lshr(vector, _splat(b, shift)), _splat(b, mask))

    return _operation(bytes64(bytes64, types.uint8, types.uint8), emit)


@intrinsic
def add_high_bit(_context: Any, low: Any, high: Any) -> Any:
    """``low | high << 2`` of each byte: a 3-bit code of its two parts."""
    return _operation(
        bytes64(bytes64, bytes64), lambda b, low, high: b.or_(low, b.shl(high, _constant(bytes64.llvm, 2)))
    )


@intrinsic
def to_floats(_context: Any, vector: Any) -> Any:
    """The bytes as float32 numbers."""
    return _operation(floats64(bytes64), lambda b, x: b.uitofp(x, floats64.llvm))


@intrinsic
def splat(_context: Any, x: Any) -> Any:
    """64 times the same float32 number."""
    return _operation(
        floats64(types.float32),
        _splat,
    )


@intrinsic
def multiply_add(_context: Any, x: Any, y: Any, z: Any) -> Any:
    """``x*y + z``, fused where the machine can."""
    return _operation(
        floats64(floats64, floats64, floats64),
        lambda b, x, y, z: _call(b, "llvm.fmuladd.v64f32", floats64.llvm, [x, y, z]),
    )


def _reduce(combine: Callable[[ir.IRBuilder, Any, Any], Any]) -> Callable[[ir.IRBuilder, Any], Any]:
    def emit(b: ir.IRBuilder, x: Any) -> Any:
        while x.type.count > 1:
            half = x.type.count // 2
            low, high = _shuffle(b, x, list(range(half))), _shuffle(b, x, list(range(half, 2 * half)))
            x = combine(b, low, high)
        return b.extract_element(x, _I32(0))

    return emit


@intrinsic
def sum_all(_context: Any, x: Any) -> Any:
    """Sum of the 64 numbers."""
    return _operation(types.float32(floats64), _reduce(lambda b, x, y: b.fadd(x, y)))


@intrinsic
def max_all(_context: Any, x: Any) -> Any:
    """Largest of the 64 numbers."""
    return _operation(types.float32(floats64), _reduce(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y)))


#: Coefficients of 2^f on [-1/2, 1/2], lowest first: the Taylor series to the seventh power, error below 3e-9.
_EXP2 = (
    1.0,
    0.6931471805599453,
    0.2402265069591007,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.0001540353039338161,
    1.525273380405984e-05,
)


@intrinsic
def exp2(_context: Any, x: Any) -> Any:
    """2^x of each number, for x <= 0; what lies below -126 gives 0, -inf included. Relative error below 2e-7."""

    def emit(b: ir.IRBuilder, x: Any) -> Any:
        kind = floats64.llvm
        integers = ir.VectorType(_I32, COUNT)
        lowest = _constant(kind, -126.0)
        tiny = b.fcmp_ordered("<", x, lowest)
        x = b.select(tiny, lowest, x)
        whole = _call(b, "llvm.floor.v64f32", kind, [b.fadd(x, _constant(kind, 0.5))])
        fraction = b.fsub(x, whole)
        result = _constant(kind, _EXP2[-1])
        for coefficient in _EXP2[-2::-1]:
            result = _call(b, "llvm.fmuladd.v64f32", kind, [result, fraction, _constant(kind, coefficient)])
        exponent = b.add(b.fptosi(whole, integers), _constant(integers, 127))
        power = b.bitcast(b.shl(exponent, _constant(integers, 23)), kind)
        return b.select(tiny, _constant(kind, 0.0), b.fmul(result, power))

    return _operation(floats64(floats64), emit)
