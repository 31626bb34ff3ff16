"""The device functions that need the vendor's mathematical library or a reduction of our own: the compiled form."""

# ruff: noqa: RET505 (Triton takes a branch whose condition is known as a whole: both sides must return)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    return libdevice.exp(x)


@triton.jit
def exp_fast(x: tl.tensor) -> tl.tensor:
    """Good to about 20 bits near zero, fewer far away: for results of 16 bits."""
    return libdevice.fast_expf(x)


@triton.jit
def reciprocal_fast(x: tl.tensor) -> tl.tensor:
    """One over ``x``, good to 22 bits; 0 from 2**126 on."""
    return libdevice.fast_dividef(1.0, x)


@triton.jit
def expm1(x: tl.tensor) -> tl.tensor:
    return libdevice.expm1(x)


@triton.jit
def log1p(x: tl.tensor) -> tl.tensor:
    return libdevice.log1p(x)


@triton.jit
def tan(x: tl.tensor) -> tl.tensor:
    return libdevice.tan(x)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    return libdevice.tanh(x)


@triton.jit
def atan(x: tl.tensor) -> tl.tensor:
    return libdevice.atan(x)


@triton.jit
def atan2(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return libdevice.atan2(x, y)


@triton.jit
def pow_float(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return libdevice.pow(x, y)


@triton.jit
def fmod_float(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return libdevice.fmod(x, y)


@triton.jit
def trunc_float(x: tl.tensor) -> tl.tensor:
    return libdevice.trunc(x)


@triton.jit
def rint(x: tl.tensor) -> tl.tensor:
    return libdevice.rint(x)


@triton.jit
def to_bf16(x: tl.tensor) -> tl.tensor:
    return x.to(tl.bfloat16)


@triton.jit
def to_f16(x: tl.tensor) -> tl.tensor:
    return x.to(tl.float16)


@triton.jit
def scalar(x: tl.tensor, dtype: tl.tensor) -> tl.tensor:
    """A number given at launch."""
    return x.to(dtype)


@triton.jit
def _larger(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    if x.dtype == tl.float32:
        return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _smaller(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    if x.dtype == tl.float32:
        return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where((x < y) | (x != x), x, y)


@triton.jit
def _product(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return x * y


@triton.jit
def amax(x: tl.tensor, axis: tl.tensor) -> tl.tensor:
    """The largest, NaN if there is one."""
    return tl.reduce(x, axis, _larger, keep_dims=len(x.shape) > 1)


@triton.jit
def amin(x: tl.tensor, axis: tl.tensor) -> tl.tensor:
    """The smallest, NaN if there is one."""
    return tl.reduce(x, axis, _smaller, keep_dims=len(x.shape) > 1)


@triton.jit
def prod(x: tl.tensor, axis: tl.tensor) -> tl.tensor:
    return tl.reduce(x, axis, _product, keep_dims=len(x.shape) > 1)


@triton.jit
def _add_both(x: tl.tensor, y: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return x + a, y + b


@triton.jit
def sum_both(x: tl.tensor, y: tl.tensor, axis: tl.tensor) -> tl.tensor:
    """Two sums in one pass over the lanes."""
    return tl.reduce((x, y), axis, _add_both, keep_dims=len(x.shape) > 1)
