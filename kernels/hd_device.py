"""The device functions that need the vendor's mathematical library or a reduction of our own: the compiled form."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def exp(x: Any) -> Any:
    return libdevice.exp(x)


@triton.jit
def expm1(x: Any) -> Any:
    return libdevice.expm1(x)


@triton.jit
def log1p(x: Any) -> Any:
    return libdevice.log1p(x)


@triton.jit
def tan(x: Any) -> Any:
    return libdevice.tan(x)


@triton.jit
def tanh(x: Any) -> Any:
    return libdevice.tanh(x)


@triton.jit
def atan(x: Any) -> Any:
    return libdevice.atan(x)


@triton.jit
def atan2(x: Any, y: Any) -> Any:
    return libdevice.atan2(x, y)


@triton.jit
def pow_float(x: Any, y: Any) -> Any:
    return libdevice.pow(x, y)


@triton.jit
def fmod_float(x: Any, y: Any) -> Any:
    return libdevice.fmod(x, y)


@triton.jit
def trunc_float(x: Any) -> Any:
    return libdevice.trunc(x)


@triton.jit
def rint(x: Any) -> Any:
    return libdevice.rint(x)


@triton.jit
def to_bf16(x: Any) -> Any:
    return x.to(tl.bfloat16)


@triton.jit
def to_f16(x: Any) -> Any:
    return x.to(tl.float16)


@triton.jit
def scalar(x: Any, dtype: Any) -> Any:
    """A number given at launch."""
    return x.to(dtype)


@triton.jit
def _larger(x: Any, y: Any) -> Any:
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _smaller(x: Any, y: Any) -> Any:
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def _product(x: Any, y: Any) -> Any:
    return x * y


@triton.jit
def amax(x: Any, axis: Any) -> Any:
    """The largest, NaN if there is one."""
    return tl.reduce(x, axis, _larger, keep_dims=len(x.shape) > 1)


@triton.jit
def amin(x: Any, axis: Any) -> Any:
    """The smallest, NaN if there is one."""
    return tl.reduce(x, axis, _smaller, keep_dims=len(x.shape) > 1)


@triton.jit
def prod(x: Any, axis: Any) -> Any:
    return tl.reduce(x, axis, _product, keep_dims=len(x.shape) > 1)
