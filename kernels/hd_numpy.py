"""The device functions of the vendor's library as numpy has them, on the values of Triton's interpreter; and the casts that the
interpreter gets wrong (it cuts bf16 off where the device rounds to the nearest)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl


def _value(like: Any, data: Any, block: bool) -> Any:
    """A value of the interpreter of the dtype of ``like``; one that is no block has one element."""
    data = np.asarray(data).astype(like.handle.data.dtype)
    return tl.tensor(type(like.handle)(data, like.dtype), tl.block_type(like.dtype, list(data.shape)) if block else like.dtype)


def _elementwise(f: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        return _value(values[0], f(*(v.handle.data for v in values)), any(v.type.is_block() for v in values))

    return call


exp = _elementwise(np.exp)
exp_fast = exp
reciprocal_fast = _elementwise(np.reciprocal)
expm1 = _elementwise(np.expm1)
log1p = _elementwise(np.log1p)
tan = _elementwise(np.tan)
tanh = _elementwise(np.tanh)
atan = _elementwise(np.arctan)
atan2 = _elementwise(np.arctan2)
pow_float = _elementwise(np.power)
fmod_float = _elementwise(np.fmod)
trunc_float = _elementwise(np.trunc)
rint = _elementwise(np.rint)


def to_bf16(x: Any) -> Any:
    """To the nearest bf16, ties to even."""
    x = x.to(tl.float32)
    bits = x.handle.data.view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)).astype(np.uint32) & np.uint32(0xFFFF0000)
    rounded = np.where(np.isnan(x.handle.data), np.uint32(0x7FC00000), rounded)
    data = (rounded >> 16).astype(np.uint16)
    return tl.tensor(type(x.handle)(data, tl.bfloat16), tl.block_type(tl.bfloat16, list(data.shape)) if x.type.is_block() else tl.bfloat16)


def to_f16(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return x.to(tl.float16)


def scalar(x: Any, dtype: Any) -> Any:
    """A number given at launch; the interpreter passes floats as Python's."""
    return x.to(dtype) if hasattr(x, "handle") else tl.full((), x, dtype)


def _fold(f: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, axis: int) -> Any:
        keep = len(x.shape) > 1
        data = f(x.handle.data, axis=axis, keepdims=keep)
        return _value(x, data if keep else [data], keep)

    return call


amax = _fold(np.max)
amin = _fold(np.min)
prod = _fold(np.prod)
_sum = _fold(np.sum)


def sum_both(x: Any, y: Any, axis: int) -> Any:
    """Two sums."""
    return _sum(x, axis), _sum(y, axis)


def repair(builder: Any) -> None:
    """Spread a scalar as what it holds: the interpreter takes the dtype of what was compared for that of the answer."""

    def create_splat(kind: Any, x: Any) -> Any:
        return type(x)(np.full(kind.shape, x.data.reshape(-1)[0]), x.dtype.scalar)

    builder.create_splat = create_splat


if triton.knobs.runtime.interpret:
    from triton.runtime.interpreter import interpreter_builder

    repair(interpreter_builder)
