"""The device functions that Triton expressions of the op table and of the folds call, as ``hd.name``.

They follow torch where Triton does not: extrema propagate NaN, integer division rounds down, exp and division are correctly rounded
to f32's last bits. Under Triton's interpreter they are plain Python functions on its values, with numpy in place of the vendor's
mathematical library.
"""

# ruff: noqa: RET505 (Triton takes a branch whose condition is known as a whole: both sides must return)
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import triton
import triton.language as tl

INTERPRETED: Final[bool] = bool(triton.knobs.runtime.interpret)


def device(fn: Callable[..., Any]) -> Any:
    """A function that kernels can call."""
    return fn if INTERPRETED else triton.jit(fn)


if INTERPRETED:
    from hostir.kernels.hd_numpy import (
        amax,
        amin,
        atan,
        atan2,
        exp,
        exp_fast,
        expm1,
        fmod_float,
        log1p,
        pow_float,
        prod,
        reciprocal_fast,
        rint,
        scalar,
        sum_both,
        tan,
        tanh,
        to_bf16,
        to_f16,
        trunc_float,
    )
else:
    from hostir.kernels.hd_device import (
        amax,
        amin,
        atan,
        atan2,
        exp,
        exp_fast,
        expm1,
        fmod_float,
        log1p,
        pow_float,
        prod,
        reciprocal_fast,
        rint,
        scalar,
        sum_both,
        tan,
        tanh,
        to_bf16,
        to_f16,
        trunc_float,
    )


# ------------------------------------------------------------------------------------------------------------- elementwise


@device
def maximum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """NaN if either is."""
    if x.dtype == tl.float32:
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((x > y) | (x != x), x, y)


@device
def minimum(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """NaN if either is."""
    if x.dtype == tl.float32:
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((x < y) | (x != x), x, y)


@device
def clamp(x: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """``min(max(x, low), high)``; a bound of None is none."""
    if low is not None:
        x = maximum(x, low)
    if high is not None:
        x = minimum(x, high)
    return x


@device
def relu(x: tl.tensor) -> tl.tensor:
    return tl.where(x < 0, 0, x).to(x.dtype)


@device
def div(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Correctly rounded."""
    if y.dtype == tl.float32:
        return tl.div_rn(x, y)
    else:
        return x / y


@device
def sqrt(x: tl.tensor) -> tl.tensor:
    """Correctly rounded."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@device
def rsqrt(x: tl.tensor) -> tl.tensor:
    return tl.rsqrt(x)


@device
def log(x: tl.tensor) -> tl.tensor:
    return tl.log(x)


@device
def sigmoid(x: tl.tensor) -> tl.tensor:
    return div(1.0, exp(-x) + 1.0)


@device
def abs(x: tl.tensor) -> tl.tensor:
    return tl.abs(x)


@device
def sign(x: tl.tensor) -> tl.tensor:
    return ((x > 0).to(tl.int32) - (x < 0).to(tl.int32)).to(x.dtype)


@device
def isfinite(x: tl.tensor) -> tl.tensor:
    return (x - x) == 0


@device
def bitwise_not(x: tl.tensor) -> tl.tensor:
    if x.dtype == tl.uint8:
        return x ^ 255
    else:
        return ~x


@device
def floor(x: tl.tensor) -> tl.tensor:
    if x.dtype.is_floating():
        return tl.floor(x)
    else:
        return x


@device
def ceil(x: tl.tensor) -> tl.tensor:
    if x.dtype.is_floating():
        return tl.ceil(x)
    else:
        return x


@device
def trunc(x: tl.tensor) -> tl.tensor:
    if x.dtype.is_floating():
        return trunc_float(x)
    else:
        return x


@device
def round(x: tl.tensor) -> tl.tensor:
    """Halves go to the even neighbour."""
    if x.dtype.is_floating():
        return rint(x)
    else:
        return x


@device
def fmod(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The remainder with the sign of ``x``."""
    if x.dtype.is_floating():
        return fmod_float(x, y)
    else:
        return x % y


@device
def remainder(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """The remainder with the sign of ``y``."""
    rest = fmod(x, y)
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@device
def floor_divide(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Rounded down; for floats as torch does it, from the exact remainder."""
    if x.dtype.is_floating():
        rest = fmod_float(x, y)
        ratio = div(x - rest, y)
        ratio = tl.where((rest != 0) & ((y < 0) != (rest < 0)), ratio - 1, ratio)
        whole = tl.floor(ratio)
        whole = tl.where(ratio - whole > 0.5, whole + 1, whole)
        straight = div(x, y)
        zero = tl.where((straight < 0) | ((straight == 0) & (div(straight - straight + 1, straight) < 0)), -(ratio - ratio), ratio - ratio)
        return tl.where(y == 0, straight, tl.where(ratio != 0, whole, zero))
    else:
        whole = x // y
        rest = x - whole * y
        return tl.where((rest != 0) & ((rest < 0) != (y < 0)), whole - 1, whole)


@device
def pow(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Integers by repeated squaring, wrapping as torch does; negative exponents of integers give 1, -1 or 0."""
    if x.dtype.is_floating():
        return pow_float(x, y)
    else:
        power = x
        result = x - x + 1
        left = tl.where(y < 0, y - y, y)
        for _ in tl.static_range(x.dtype.primitive_bitwidth - 1):
            result = tl.where((left & 1) != 0, result * power, result)
            power = power * power
            left = left >> 1
        if x.dtype.is_int_unsigned():
            return result
        else:
            odd = tl.where((y & 1) != 0, x, x * x)
            return tl.where(y < 0, tl.where((x == 1) | (x == -1), odd, x - x), result)


@device
def gelu(x: tl.tensor, approximate: tl.tensor) -> tl.tensor:
    if approximate == "tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


# ------------------------------------------------------------------------- for results of 16 bits: a few instructions each


@device
def sigmoid_fast(x: tl.tensor) -> tl.tensor:
    return reciprocal_fast(1.0 + exp_fast(-x))


@device
def div_fast(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return x / y


@device
def gelu_fast(x: tl.tensor, approximate: tl.tensor) -> tl.tensor:
    if approximate == "tanh":
        return x * sigmoid_fast(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        # The upper tail of the normal distribution as a polynomial in 1 / (1 + p |x|) times exp(-x^2 / 2), off by at most 1e-7.
        t = reciprocal_fast(1.0 + 0.23164190 * tl.abs(x))
        poly = t * (0.12741479 + t * (-0.14224837 + t * (0.71070687 + t * (-0.72657601 + t * 0.53070271))))
        tail = poly * exp_fast(-0.5 * x * x)
        return x * tl.where(x < 0, tail, 1.0 - tail)


# ------------------------------------------------------------------------------------------------------------------- folds


@device
def sum(x: tl.tensor, axis: tl.tensor) -> tl.tensor:
    return tl.sum(x, axis, keep_dims=len(x.shape) > 1)


@device
def moments_join(mean: tl.tensor, m2: tl.tensor, count: tl.tensor, x: tl.tensor, m: tl.tensor) -> tl.tensor:
    more = count + 1.0
    step = x - mean
    new = mean + step / more
    return tl.where(m, new, mean), tl.where(m, m2 + step * (x - new), m2), tl.where(m, more, count)


@device
def moments(mean: tl.tensor, m2: tl.tensor, count: tl.tensor, axis: tl.tensor) -> tl.tensor:
    total = sum(count, axis)
    middle = div(sum(tl.where(count > 0, mean * count, 0.0), axis), total)
    off = tl.where(count > 0, mean - middle, 0.0)
    # The distances from a mean that was rounded do not add up to zero; what is left over tells by how much the squares are too large.
    left, squares = sum_both(off * count, tl.where(count > 0, m2 + off * off * count, 0.0), axis)
    shift = div(left, total)
    return middle + shift, squares - left * shift, total


@device
def moments_of(x: tl.tensor, m: tl.tensor, n: tl.tensor, axis: tl.tensor) -> tl.tensor:
    """Mean and squared distances of the ``n`` elements of a tile, in two passes over registers; see ``moments`` for the correction."""
    middle = div(sum(tl.where(m, x, 0.0), axis), n)
    off = tl.where(m, x - middle, 0.0)
    left, squares = sum_both(off, off * off, axis)
    shift = div(left, n)
    return middle + shift, squares - left * shift, n


@device
def softmax_join(top: tl.tensor, total: tl.tensor, x: tl.tensor, m: tl.tensor) -> tl.tensor:
    new = maximum(top, x)
    nothing = new == float("-inf")
    joined = tl.where(nothing, total, total * exp(top - new) + exp(x - new))
    return tl.where(m, new, top), tl.where(m, joined, total)


@device
def softmax(top: tl.tensor, total: tl.tensor, axis: tl.tensor) -> tl.tensor:
    new = amax(top, axis)
    return new, sum(tl.where(top == float("-inf"), total - total, total * exp(top - new)), axis)


@device
def later_max(best: tl.tensor, at: tl.tensor, x: tl.tensor, place: tl.tensor, m: tl.tensor) -> tl.tensor:
    better = m & ((x > best) | ((x != x) & (best == best)) | (at < 0))
    return tl.where(better, x, best), tl.where(better, place, at)


@device
def later_min(best: tl.tensor, at: tl.tensor, x: tl.tensor, place: tl.tensor, m: tl.tensor) -> tl.tensor:
    better = m & ((x < best) | ((x != x) & (best == best)) | (at < 0))
    return tl.where(better, x, best), tl.where(better, place, at)


@device
def _where_hit(hit: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Positions that count, others behind all."""
    if at.dtype == tl.int32:
        return tl.where(hit, at, 2147483647)
    else:
        return tl.where(hit, at, 9223372036854775807)


@device
def first_max(best: tl.tensor, at: tl.tensor, axis: tl.tensor) -> tl.tensor:
    top = amax(best, axis)
    hit = ((best == top) | (best != best)) & (at >= 0)
    return top, amin(_where_hit(hit, at), axis)


@device
def first_min(best: tl.tensor, at: tl.tensor, axis: tl.tensor) -> tl.tensor:
    top = amin(best, axis)
    hit = ((best == top) | (best != best)) & (at >= 0)
    return top, amin(_where_hit(hit, at), axis)


__all__ = [
    "INTERPRETED",
    "abs",
    "amax",
    "amin",
    "atan",
    "atan2",
    "bitwise_not",
    "ceil",
    "clamp",
    "device",
    "div",
    "div_fast",
    "exp",
    "exp_fast",
    "expm1",
    "first_max",
    "first_min",
    "floor",
    "floor_divide",
    "fmod",
    "fmod_float",
    "gelu",
    "gelu_fast",
    "isfinite",
    "later_max",
    "later_min",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "moments",
    "moments_join",
    "moments_of",
    "pow",
    "pow_float",
    "prod",
    "reciprocal_fast",
    "relu",
    "remainder",
    "rint",
    "round",
    "rsqrt",
    "scalar",
    "sigmoid",
    "sigmoid_fast",
    "sign",
    "softmax",
    "softmax_join",
    "sqrt",
    "sum",
    "sum_both",
    "tan",
    "tanh",
    "to_bf16",
    "to_f16",
    "trunc",
    "trunc_float",
]
