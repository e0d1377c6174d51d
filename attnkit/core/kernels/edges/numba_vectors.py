"""Vectors of float32 in numba's functions: numbers that are loaded, combined and stored together.

numba compiles loops over numbers, and leaves to LLVM whether they become the processor's vector
instructions. Here they are vectors from the start, `Floats(size)`, of whatever size the kernel has
use for: LLVM splits them into registers. Addresses are those of `Tensor.data_ptr()`, in bytes;
indices count numbers of four bytes.

Sums may be taken in any order. What is not finite stays so, since no flag tells LLVM otherwise.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
ANY_ORDER = ("reassoc", "contract", "nsz")


class Floats(types.Type):
    """`size` numbers of float32."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(name=f"Floats({size})")


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Floats) -> None:
        super().__init__(manager, kind, ir.VectorType(FLOAT, kind.size))


def _constant(kind: ir.Type, size: int, value: float) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, size), [value] * size)


def _spread(builder: Any, value: Any, size: int) -> Any:
    """A number as a vector of it; a vector as it is."""
    if isinstance(value.type, ir.VectorType):
        return value
    undefined = ir.Constant(ir.VectorType(value.type, size), ir.Undefined)
    first = builder.insert_element(undefined, value, INT(0))
    return builder.shuffle_vector(first, undefined, _constant(INT, size, 0))


def _at(builder: Any, address: Any, kind: ir.Type, index: Any = None) -> Any:
    pointer = builder.inttoptr(address, kind.as_pointer())
    return pointer if index is None else builder.gep(pointer, [index])


def _load(builder: Any, address: Any, size: int) -> Any:
    loaded = builder.load(_at(builder, address, ir.VectorType(FLOAT, size)))
    loaded.align = 4
    return loaded


@intrinsic(prefer_literal=True)
def load(typing, address, size):
    """The numbers from this address on, as many as the constant `size`."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def generate(context, builder, signature, arguments):
        return _load(builder, arguments[0], count)

    return Floats(count)(types.int64, size), generate


@intrinsic
def load_like(typing, address, floats):
    """As many numbers as `floats` has."""

    def generate(context, builder, signature, arguments):
        return _load(builder, arguments[0], floats.size)

    return floats(types.int64, floats), generate


@intrinsic
def store(typing, address, floats):
    """Write the vector to this address."""

    def generate(context, builder, signature, arguments):
        address, vector = arguments
        builder.store(vector, _at(builder, address, vector.type)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, floats), generate


@intrinsic(prefer_literal=True)
def zeros(typing, size):
    """A vector of zeros, as many as the constant `size`."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    count = size.literal_value

    def generate(context, builder, signature, arguments):
        return _constant(FLOAT, count, 0.0)

    return Floats(count)(size), generate


def _with(operation: str) -> Any:
    """An operation of a vector and another, or a number."""

    @intrinsic
    def combine(typing, floats, other):
        def generate(context, builder, signature, arguments):
            first, second = arguments
            second = _spread(builder, second, floats.size)
            return getattr(builder, operation)(first, second, flags=ANY_ORDER)

        return floats(floats, other if isinstance(other, Floats) else types.float32), generate

    return combine


plus, minus, times = _with("fadd"), _with("fsub"), _with("fmul")


@intrinsic
def plus_times(typing, added, floats, other):
    """added + floats · other, where `other` may be a number."""

    def generate(context, builder, signature, arguments):
        added, first, second = arguments
        second = _spread(builder, second, floats.size)
        product = builder.fmul(first, second, flags=ANY_ORDER)
        return builder.fadd(added, product, flags=ANY_ORDER)

    kind = other if isinstance(other, Floats) else types.float32
    return floats(added, floats, kind), generate


@intrinsic
def total(typing, floats):
    """The sum of its numbers."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(FLOAT, [FLOAT, arguments[0].type])
        name = f"llvm.vector.reduce.fadd.v{floats.size}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [FLOAT(-0.0), arguments[0]], fastmath=ANY_ORDER)

    return types.float32(floats), generate


@intrinsic
def leaky_slope(typing, floats, negative_slope):
    """The derivative of LeakyReLU: 1 where a number is positive, else the slope."""

    def generate(context, builder, signature, arguments):
        vector, slope = arguments
        slope = _spread(builder, slope, floats.size)
        zero, one = (_constant(FLOAT, floats.size, value) for value in (0.0, 1.0))
        return builder.select(builder.fcmp_ordered(">", vector, zero), one, slope)

    return floats(floats, types.float32), generate


@intrinsic
def length(typing, floats):
    """How many numbers it has, which LLVM knows: a branch upon it costs nothing."""

    def generate(context, builder, signature, arguments):
        return LONG(floats.size)

    return types.int64(floats), generate


@intrinsic
def store_signs(typing, address, floats):
    """Write for each number whether it is positive: a bit. A multiple of eight numbers."""

    def generate(context, builder, signature, arguments):
        address, vector = arguments
        bits = builder.fcmp_ordered(">", vector, _constant(FLOAT, floats.size, 0.0))
        bits = builder.bitcast(bits, ir.IntType(floats.size))
        builder.store(bits, _at(builder, address, bits.type)).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, floats), generate


@intrinsic
def slopes_of_signs(typing, address, negative_slope, floats):
    """`leaky_slope` of the numbers whose signs were written there, as many as `floats` has."""

    def generate(context, builder, signature, arguments):
        address, slope, _ = arguments
        bits = builder.load(_at(builder, address, ir.IntType(floats.size)))
        bits.align = 1
        bits = builder.bitcast(bits, ir.VectorType(ir.IntType(1), floats.size))
        one = _constant(FLOAT, floats.size, 1.0)
        return builder.select(bits, one, _spread(builder, slope, floats.size))

    return floats(types.int64, types.float32, floats), generate


@intrinsic
def exp(typing, floats):
    """e to the power of each number up to 88, to 2⁻²³ of it; 0 below −87.

    With n the integer next to x / ln 2, eˣ = 2ⁿ · eʳ, where r is at most half of ln 2 and eʳ is
    Cephes' polynomial of expf (Moshier, 1989).
    """

    def generate(context, builder, signature, arguments):
        size, vector, bits = floats.size, arguments[0], ir.VectorType(INT, floats.size)

        def sum_of(first, second, third):
            product = builder.fmul(first, second, flags=("contract",))
            return builder.fadd(product, third, flags=("contract",))

        def number(value):
            return _constant(FLOAT, size, value)

        is_low = builder.fcmp_ordered("<", vector, number(-87.0))
        power = builder.select(is_low, number(-87.0), vector)
        # 1.5 · 2²³ leaves no place for a fraction: the last bits of the sum are the integer
        shifted = sum_of(power, number(1.4426950408889634), number(12582912.0))
        whole = builder.fsub(shifted, number(12582912.0))
        rest = sum_of(whole, number(-0.693359375), power)  # ln 2 in two parts
        rest = sum_of(whole, number(2.12194440e-4), rest)
        value = number(1.9875691500e-4)
        for coefficient in (
            *(1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2),
            *(1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0),
        ):
            value = sum_of(value, rest, number(coefficient))
        exponent = builder.add(builder.bitcast(shifted, bits), _constant(INT, size, 127))
        exponent = builder.shl(exponent, _constant(INT, size, 23))
        value = builder.fmul(value, builder.bitcast(exponent, vector.type))
        return builder.select(is_low, number(0.0), value)

    return floats(floats), generate


@intrinsic
def kept(typing, first, seed, threshold, floats):
    """1 for each place from `first` on that dropout keeps, else 0, as many as `floats` has.

    A place is kept where a hash of it and the seed's halves, 32 bits, is below the threshold. The
    hash is `lowbias32` (Wellons, Prospecting for Hash Functions, 2018), once for each half.
    """

    def generate(context, builder, signature, arguments):
        first, seed, threshold, _ = arguments
        size = floats.size

        def number(value):
            return _constant(INT, size, value)

        places = ir.Constant(ir.VectorType(INT, size), [*range(size)])
        bits = builder.add(_spread(builder, builder.trunc(first, INT), size), places)
        for half in (seed, builder.lshr(seed, LONG(32))):
            bits = builder.xor(bits, _spread(builder, builder.trunc(half, INT), size))
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                bits = builder.xor(bits, builder.lshr(bits, number(shift)))
                bits = builder.mul(bits, number(factor))
            bits = builder.xor(bits, builder.lshr(bits, number(16)))
        bound = _spread(builder, builder.trunc(threshold, INT), size)
        is_kept = builder.icmp_unsigned("<", bits, bound)
        return builder.select(is_kept, _constant(FLOAT, size, 1.0), _constant(FLOAT, size, 0.0))

    return floats(types.int64, types.int64, types.int64, floats), generate


@intrinsic
def fetch(typing, address):
    """Ask for what stands at this address, 64 bytes, before it is read."""

    def generate(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        pointer = builder.inttoptr(arguments[0], byte)
        builder.call(function, [pointer, INT(0), INT(3), INT(1)])  # to read, often, data
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def number(typing, address, index):
    """The float32 at this index."""

    def generate(context, builder, signature, arguments):
        return builder.load(_at(builder, arguments[0], FLOAT, arguments[1]))

    return types.float32(types.int64, types.int64), generate


@intrinsic
def set_number(typing, address, index, value):
    """Write a float32 to this index."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[2], _at(builder, arguments[0], FLOAT, arguments[1]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def integer(typing, address, index):
    """The int32 at this index."""

    def generate(context, builder, signature, arguments):
        loaded = builder.load(_at(builder, arguments[0], INT, arguments[1]))
        return builder.sext(loaded, LONG)

    return types.int64(types.int64, types.int64), generate
