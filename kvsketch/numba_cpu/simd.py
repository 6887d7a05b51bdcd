"""Vectors in Numba code: values of one machine vector, and the operations on them that kernels are made of.

Memory is read and written at addresses, integers of the size of a pointer: kernels that pass arrays spend more time
counting references than computing. What the operations look like in LLVM is in :mod:`kvsketch.numba_cpu.emit`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from kvsketch.numba_cpu._tiers import TIER, VECTOR_BYTES
from kvsketch.numba_cpu.emit import (
    F32,
    I8,
    I16,
    I64,
    LANES,
    VECTORS,
    emit_absolute,
    emit_bfloats,
    emit_constant,
    emit_halves,
    emit_load,
    emit_maximum,
    emit_minimum,
    emit_multiply_add,
    emit_prefetch,
    emit_reduce,
    emit_round,
    emit_splat,
    emit_store,
)


class Vector(types.Type):
    """A machine vector of `element` numbers."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"kvsketch.Vector({element}, {VECTOR_BYTES})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, VECTORS[kind.element])


floats, ints, shorts, bytes_ = (Vector(element) for element in VECTORS)


def operation(sig: Any, emit: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """What an intrinsic returns: `emit` gets the builder and the arguments, and gives the result (None: none)."""

    def generate(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
        result = emit(builder, *arguments)
        return context.get_dummy_value() if result is None else result

    return sig, generate


# -- memory -----------------------------------------------------------------------------------------------------------


def _load_operation(result: Any, emit: Callable[..., Any]) -> Any:
    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        return operation(result(types.intp), emit)

    return load


load_floats = _load_operation(floats, lambda b, a: emit_load(b, a, 0, VECTORS["float32"]))
load_halves = _load_operation(floats, lambda b, a: emit_halves(b, emit_load(b, a, 0, ir.VectorType(I16, LANES))))
load_float = _load_operation(types.float32, lambda b, a: emit_load(b, a, 0, F32))
load_long = _load_operation(types.int64, lambda b, a: emit_load(b, a, 0, I64))
load_word = _load_operation(types.uint16, lambda b, a: emit_load(b, a, 0, I16))
load_byte = _load_operation(types.uint8, lambda b, a: emit_load(b, a, 0, I8))


load_bfloats = _load_operation(floats, emit_bfloats)


def make_load_longs(count: int) -> Any:
    """A function that gives the `count` int64 numbers from an address on as a tuple."""

    @intrinsic
    def load_longs(_context: Any, address: Any) -> Any:
        result = types.UniTuple(types.int64, count)

        def generate(context: Any, b: ir.IRBuilder, _signature: Any, arguments: Any) -> Any:
            numbers = [emit_load(b, arguments[0], 8 * i, I64) for i in range(count)]
            return context.make_tuple(b, result, numbers)

        return result(types.intp), generate

    return load_longs


@intrinsic
def store_floats(_context: Any, address: Any, x: Any) -> Any:
    """Write a vector at an address."""
    return operation(types.void(types.intp, floats), lambda b, a, x: emit_store(b, a, 0, x))


@intrinsic
def store_float(_context: Any, address: Any, x: Any) -> Any:
    """Write one number at an address."""
    return operation(types.void(types.intp, types.float32), lambda b, a, x: emit_store(b, a, 0, x))


@intrinsic
def store_word(_context: Any, address: Any, x: Any) -> Any:
    """Write the low 16 bits of an integer at an address."""
    return operation(types.void(types.intp, types.intp), lambda b, a, x: emit_store(b, a, 0, b.trunc(x, I16)))


@intrinsic
def store_byte(_context: Any, address: Any, x: Any) -> Any:
    """Write the low 8 bits of an integer at an address."""
    return operation(types.void(types.intp, types.intp), lambda b, a, x: emit_store(b, a, 0, b.trunc(x, I8)))


@intrinsic
def store_long(_context: Any, address: Any, x: Any) -> Any:
    """Write an int64 at an address."""
    return operation(types.void(types.intp, types.int64), lambda b, a, x: emit_store(b, a, 0, x))


@intrinsic
def copy_bytes(_context: Any, source: Any, count: Any, target: Any) -> Any:
    """Copy `count` bytes from one address to another; they do not overlap."""

    def emit(b: ir.IRBuilder, source: Any, count: Any, target: Any) -> None:
        pointers = [b.inttoptr(a, I8.as_pointer()) for a in (target, source)]
        cgutils.raw_memcpy(b, *pointers, count, 1)

    return operation(types.void(types.intp, types.intp, types.intp), emit)


@intrinsic
def clear_bytes(_context: Any, target: Any, count: Any) -> Any:
    """Fill `count` bytes at an address with zeros."""

    def emit(b: ir.IRBuilder, target: Any, count: Any) -> None:
        cgutils.memset(b, b.inttoptr(target, I8.as_pointer()), count, 0)

    return operation(types.void(types.intp, types.intp), emit)


@intrinsic
def prefetch(_context: Any, address: Any) -> Any:
    """Ask for the 64-byte line at an address to be brought nearer; harmless wherever it points."""
    return operation(types.void(types.intp), lambda b, a: emit_prefetch(b, a, 0))


@intrinsic
def address_of(_context: Any, array: Any) -> Any:
    """Where an array's first number lies; the caller keeps the array alive."""

    def generate(context: Any, b: ir.IRBuilder, sig: Any, arguments: Any) -> Any:
        data = context.make_array(sig.args[0])(context, b, arguments[0]).data
        return b.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), generate


@intrinsic
def take_next(_context: Any, counter: Any) -> Any:
    """Add one to ``counter[0]`` of an int64 array that threads share, and return what it was before."""

    def generate(context: Any, builder: ir.IRBuilder, sig: Any, arguments: Any) -> Any:
        array = context.make_array(sig.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", array.data, I64(1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def call_kernel(_context: Any, kernel: Any, arguments: Any) -> Any:
    """Call the compiled kernel at address `kernel`, whose arguments are all addresses and integers, with a tuple."""
    count = len(arguments)

    def emit(b: ir.IRBuilder, kernel: Any, arguments: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * count)
        b.call(b.inttoptr(kernel, kind.as_pointer()), [b.extract_value(arguments, i) for i in range(count)])

    return operation(types.void(types.intp, types.UniTuple(types.intp, count)), emit)


@intrinsic
def stay_apart(_context: Any) -> Any:
    """Keep the function that calls this out of its callers: it is compiled once, not again wherever it is used."""

    def emit(builder: ir.IRBuilder) -> None:
        builder.function.attributes.add("noinline")

    return operation(types.void(), emit)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _operator(function: Any, emit_floats: Any, emit_ints: Any) -> None:
    """Let `function` of two vectors of one kind give a vector of that kind."""

    @infer_global(function)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(function, Vector, Vector)
    def _lower(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        return (emit_floats if sig.return_type is floats else emit_ints)(b, *args)


_operator(operator.add, ir.IRBuilder.fadd, ir.IRBuilder.add)
_operator(operator.sub, ir.IRBuilder.fsub, ir.IRBuilder.sub)
_operator(operator.mul, ir.IRBuilder.fmul, ir.IRBuilder.mul)


@intrinsic
def maximum(_context: Any, x: Any, y: Any) -> Any:
    """The larger numbers; those of `y` where one is not a number."""
    return operation(floats(floats, floats), emit_maximum)


@intrinsic
def minimum(_context: Any, x: Any, y: Any) -> Any:
    """The smaller numbers; those of `y` where one is not a number."""
    return operation(floats(floats, floats), emit_minimum)


@intrinsic
def where_above(_context: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """Numbers of `yes` where ``x > y``, else of `no`."""
    emit = lambda b, x, y, yes, no: b.select(b.fcmp_ordered(">", x, y), yes, no)  # noqa: E731
    return operation(floats(floats, floats, floats, floats), emit)


@intrinsic
def above(_context: Any, x: Any, y: Any) -> Any:
    """Where ``x > y``: bit i of an integer for number i."""

    def emit(b: ir.IRBuilder, x: Any, y: Any) -> Any:
        return b.zext(b.bitcast(b.fcmp_ordered(">", x, y), ir.IntType(LANES)), I64)

    return operation(types.int64(floats, floats), emit)


@intrinsic
def lowest_bit(_context: Any, x: Any) -> Any:
    """Which the lowest bit of an integer that is set is; it is not 0."""
    return operation(types.int64(types.int64), lambda b, x: b.cttz(x, ir.IntType(1)(1)))


@intrinsic
def absolute(_context: Any, x: Any) -> Any:
    """|x|."""
    return operation(floats(floats), emit_absolute)


@intrinsic
def splat(_context: Any, x: Any) -> Any:
    """A vector of the same float32 number."""
    return operation(floats(types.float32), lambda b, x: emit_splat(b, x, LANES))


@intrinsic
def multiply_add(_context: Any, x: Any, y: Any, z: Any) -> Any:
    """``x*y + z``, fused where the machine can."""
    return operation(floats(floats, floats, floats), emit_multiply_add)


@intrinsic
def divide(_context: Any, x: Any, y: Any) -> Any:
    """``x/y`` by IEEE division."""
    return operation(floats(floats, floats), lambda b, x, y: b.fdiv(x, y))


@intrinsic
def round_to_ints(_context: Any, x: Any) -> Any:
    """The nearest int32, ties to even, of numbers below 2^22 in size."""
    return operation(ints(floats), emit_round)


@intrinsic
def to_floats(_context: Any, x: Any) -> Any:
    """int32 as float32."""
    return operation(floats(ints), lambda b, x: b.sitofp(x, VECTORS["float32"]))


@intrinsic
def sum_all(_context: Any, x: Any) -> Any:
    """Sum of the numbers of a vector, int32 or float32."""
    if x == ints:
        return operation(types.int32(ints), lambda b, x: emit_reduce(b, x, ir.IRBuilder.add))
    return operation(types.float32(floats), lambda b, x: emit_reduce(b, x, ir.IRBuilder.fadd))


@intrinsic
def max_all(_context: Any, x: Any) -> Any:
    """Largest of the numbers of a vector."""
    return operation(types.float32(floats), lambda b, x: emit_reduce(b, x, emit_maximum))


#: Coefficients of 2^f on [-1/2, 1/2], lowest first: the polynomial whose largest relative error, 7.5e-8, is smallest.
_EXP2 = (
    1.000000071654686,
    0.6931469670647517,
    0.24022119723840998,
    0.055507132735127716,
    0.009675541334416456,
    0.0013276471987796277,
)


@intrinsic
def exp2(_context: Any, x: Any) -> Any:
    """2^x of each number, for x <= 0; what lies below -126 gives 0, -inf included. Relative error below 3e-7."""

    def emit(b: ir.IRBuilder, x: Any) -> Any:
        kind, integers = VECTORS["float32"], VECTORS["int32"]
        lowest = emit_constant(kind, -126.0)
        tiny = b.fcmp_ordered("<", x, lowest)
        x = b.select(tiny, lowest, x)
        whole = emit_round(b, x)
        fraction = b.fsub(x, b.sitofp(whole, kind))
        result = emit_constant(kind, _EXP2[-1])
        for coefficient in _EXP2[-2::-1]:
            result = emit_multiply_add(b, result, fraction, emit_constant(kind, coefficient))
        power = b.bitcast(b.add(b.bitcast(result, integers), b.shl(whole, emit_constant(integers, 23))), kind)
        if TIER == "generic":  # there, what is no number is not rounded to a whole multiple of 2^9
            power = b.select(b.fcmp_unordered("uno", x, x), x, power)
        return b.select(tiny, emit_constant(kind, 0.0), power)

    return operation(floats(floats), emit)
