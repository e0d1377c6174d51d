"""Vectors of float32 in numba's functions: numbers that are loaded, combined and stored together.

numba compiles loops over numbers, and LLVM decides whether they become vector instructions of the
processor. Here they are vectors from the start, `Floats(size)`, of any size that the kernel needs;
LLVM splits them into registers. Addresses are those of `Tensor.data_ptr()`, in bytes; indices count
numbers of four bytes.

LLVM may reorder sums. It keeps numbers that are not finite, since no flag lets it assume finite
ones.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

FLOAT, INT, LONG, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
ANY_ORDER = ("reassoc", "contract", "nsz")


class Floats(types.Type):
    """numba's type of a vector of `size` numbers of float32."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(name=f"Floats({size})")


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Floats) -> None:
        super().__init__(manager, kind, ir.VectorType(FLOAT, kind.size))


def _operation(result: Any, *parameters: Any) -> Callable[[Callable], Any]:
    """Return a decorator that makes a function for numba's code from one that writes LLVM code.

    Args:
        result, parameters: numba's types. `Floats` as a parameter is a vector of any size; as the
            result it has the size of the first vector argument. A vector may be passed for a
            number. "size" is a constant, the size of the resulting vector.
    """

    def define(write: Callable) -> Any:
        def typed(typing, *given):
            kinds = [
                kind if isinstance(kind, Floats) or parameter == "size" else parameter
                for kind, parameter in zip(given, parameters, strict=True)
            ]
            vectors = [kind for kind in kinds if isinstance(kind, Floats)]
            if parameters[-1] == "size":
                if not isinstance(given[-1], types.IntegerLiteral):
                    return None
                vectors = [Floats(given[-1].literal_value)]

            def generate(context, builder, signature, arguments):
                if parameters[-1] == "size":
                    arguments = [*arguments[:-1], vectors[0].size]
                written = write(builder, *arguments)
                return context.get_dummy_value() if result is types.void else written

            return (vectors[0] if result is Floats else result)(*kinds), generate

        typed.__name__, typed.__doc__ = write.__name__, write.__doc__
        typed.__signature__ = inspect.signature(write)  # type: ignore[attr-defined]
        return intrinsic(prefer_literal=parameters[-1] == "size")(typed)

    return define


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _spread(builder: Any, value: Any, size: int) -> Any:
    """Return a number repeated to a vector; a vector as it is."""
    if isinstance(value.type, ir.VectorType):
        return value
    undefined = ir.Constant(ir.VectorType(value.type, size), ir.Undefined)
    first = builder.insert_element(undefined, value, INT(0))
    return builder.shuffle_vector(first, undefined, _constant(ir.VectorType(INT, size), 0))


def _at(builder: Any, address: Any, kind: ir.Type, index: Any = None) -> Any:
    pointer = builder.inttoptr(address, kind.as_pointer())
    return pointer if index is None else builder.gep(pointer, [index])


def _load(builder: Any, address: Any, kind: ir.Type, align: int) -> Any:
    loaded = builder.load(_at(builder, address, kind))
    loaded.align = align
    return loaded


@_operation(Floats, types.int64, "size")
def load(builder, address, size):
    """Load the constant number `size` of floats from this address on."""
    return _load(builder, address, ir.VectorType(FLOAT, size), 4)


@_operation(Floats, types.int64, Floats)
def load_like(builder, address, floats):
    """Load as many numbers as `floats` has from this address on."""
    return _load(builder, address, floats.type, 4)


@_operation(types.void, types.int64, Floats)
def store(builder, address, floats):
    """Write the vector to this address."""
    builder.store(floats, _at(builder, address, floats.type)).align = 4


@_operation(Floats, "size")
def zeros(builder, size):
    """Return a vector of zeros of the constant `size`."""
    return _constant(ir.VectorType(FLOAT, size), 0.0)


@_operation(Floats, Floats, types.float32)
def plus(builder, floats, other):
    """Compute floats + other, where `other` may be a number."""
    other = _spread(builder, other, floats.type.count)
    return builder.fadd(floats, other, flags=ANY_ORDER)


@_operation(Floats, Floats, types.float32)
def times(builder, floats, other):
    """Compute floats · other, where `other` may be a number."""
    other = _spread(builder, other, floats.type.count)
    return builder.fmul(floats, other, flags=ANY_ORDER)


@_operation(Floats, Floats, Floats, types.float32)
def plus_times(builder, added, floats, other):
    """Compute added + floats · other, where `other` may be a number."""
    other = _spread(builder, other, floats.type.count)
    product = builder.fmul(floats, other, flags=ANY_ORDER)
    return builder.fadd(added, product, flags=ANY_ORDER)


@_operation(types.float32, Floats)
def total(builder, floats):
    """Sum the numbers of a vector."""
    kind = ir.FunctionType(FLOAT, [FLOAT, floats.type])
    name = f"llvm.vector.reduce.fadd.v{floats.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [FLOAT(-0.0), floats], fastmath=ANY_ORDER)


@_operation(Floats, Floats, types.float32)
def leaky_slope(builder, floats, negative_slope):
    """Compute the derivative of LeakyReLU: 1 where a number is positive, else the slope."""
    slope = _spread(builder, negative_slope, floats.type.count)
    is_positive = builder.fcmp_ordered(">", floats, _constant(floats.type, 0.0))
    return builder.select(is_positive, _constant(floats.type, 1.0), slope)


@_operation(types.int64, Floats)
def length(builder, floats):
    """Return the size of a vector, a constant for LLVM, so that a branch on it costs nothing."""
    return LONG(floats.type.count)


@_operation(types.void, types.int64, Floats)
def store_signs(builder, address, floats):
    """Write a bit for each number, whether it is positive; the size must be a multiple of 8."""
    bits = builder.fcmp_ordered(">", floats, _constant(floats.type, 0.0))
    bits = builder.bitcast(bits, ir.IntType(floats.type.count))
    builder.store(bits, _at(builder, address, bits.type)).align = 1


@_operation(Floats, types.int64, types.float32, Floats)
def slopes_of_signs(builder, address, negative_slope, floats):
    """Compute `leaky_slope` from bits of `store_signs`, as many as `floats` has."""
    size = floats.type.count
    bits = _load(builder, address, ir.IntType(size), 1)
    bits = builder.bitcast(bits, ir.VectorType(ir.IntType(1), size))
    one = _constant(floats.type, 1.0)
    return builder.select(bits, one, _spread(builder, negative_slope, size))


@_operation(Floats, Floats)
def exp(builder, floats):
    """Compute e to the power of each number up to 88, with relative error 2⁻²³; 0 below −87.

    With n the integer next to x / ln 2, eˣ = 2ⁿ · eʳ, where r is at most half of ln 2 and eʳ is
    Cephes' polynomial of expf (Moshier, 1989).
    """
    bits = ir.VectorType(INT, floats.type.count)

    def sum_of(first, second, third):
        product = builder.fmul(first, second, flags=("contract",))
        return builder.fadd(product, third, flags=("contract",))

    def number(value):
        return _constant(floats.type, value)

    is_low = builder.fcmp_ordered("<", floats, number(-87.0))
    power = builder.select(is_low, number(-87.0), floats)
    # a sum with 1.5 · 2²³ has no bits for a fraction: its last bits are the integer
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
    exponent = builder.add(builder.bitcast(shifted, bits), _constant(bits, 127))
    exponent = builder.shl(exponent, _constant(bits, 23))
    value = builder.fmul(value, builder.bitcast(exponent, floats.type))
    return builder.select(is_low, number(0.0), value)


@_operation(Floats, types.int64, types.int64, types.int64, Floats)
def kept(builder, first, seed, threshold, floats):
    """Return 1 for each place from `first` on that dropout keeps, else 0, as many as `floats` has.

    A place is kept where a hash of it and the seed's halves, 32 bits, is below the threshold. The
    hash is `lowbias32` (Wellons, Prospecting for Hash Functions, 2018), once for each half.
    """
    kind = ir.VectorType(INT, floats.type.count)

    def spread(value):
        return _spread(builder, builder.trunc(value, INT), kind.count)

    bits = builder.add(spread(first), ir.Constant(kind, [*range(kind.count)]))
    for half in (seed, builder.lshr(seed, LONG(32))):
        bits = builder.xor(bits, spread(half))
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            bits = builder.xor(bits, builder.lshr(bits, _constant(kind, shift)))
            bits = builder.mul(bits, _constant(kind, factor))
        bits = builder.xor(bits, builder.lshr(bits, _constant(kind, 16)))
    is_kept = builder.icmp_unsigned("<", bits, spread(threshold))
    return builder.select(is_kept, _constant(floats.type, 1.0), _constant(floats.type, 0.0))


@_operation(types.void, types.int64)
def fetch(builder, address):
    """Prefetch the 64 bytes at this address."""
    pointer = builder.inttoptr(address, BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, INT, INT, INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
    builder.call(function, [pointer, INT(0), INT(3), INT(1)])  # read, high locality, data cache


@_operation(types.float32, types.int64, types.int64)
def number(builder, address, index):
    """Load the float32 at this index."""
    return builder.load(_at(builder, address, FLOAT, index))


@_operation(types.void, types.int64, types.int64, types.float32)
def set_number(builder, address, index, value):
    """Write a float32 to this index."""
    builder.store(value, _at(builder, address, FLOAT, index))


@_operation(types.int64, types.int64, types.int64)
def integer(builder, address, index):
    """Load the int32 at this index."""
    return builder.sext(builder.load(_at(builder, address, INT, index)), LONG)
