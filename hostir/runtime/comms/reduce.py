"""Reductions that give the same bits on every rank and in every run: rank order, one rounding at the end.

Low-precision floats accumulate in fp32 and are rounded once, min and max let NaN through whichever rank holds it, a sum of bools is
their or, integers wrap as torch's do. A transport that reduces by itself (NCCL) does not come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

_FP32_FIRST: Final = frozenset(
    getattr(torch, name)
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_WIDER: Final = {getattr(torch, f"uint{b}"): torch.int64 for b in (16, 32) if hasattr(torch, f"uint{b}")}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a reduction is carried out in: fp32 for low-precision floats, a wider one where torch has no arithmetic."""
    if dtype in _FP32_FIRST:
        return torch.float32
    return _WIDER.get(dtype, dtype)


def _step(into: torch.Tensor, x: torch.Tensor, op: str) -> None:
    is_bool = into.dtype == torch.bool
    match op:
        case "sum" | "avg":
            into.logical_or_(x) if is_bool else into.add_(x)
        case "prod":
            into.logical_and_(x) if is_bool else into.mul_(x)
        case "max":
            into.logical_or_(x) if is_bool else torch.maximum(into, x, out=into)
        case "min":
            into.logical_and_(x) if is_bool else torch.minimum(into, x, out=into)
        case "band":
            into.bitwise_and_(x)
        case "bor":
            into.bitwise_or_(x)
        case "bxor":
            into.bitwise_xor_(x)
        case _:
            raise AssertionError(op)


def ordered(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce equal-shaped ``parts`` in the order given; a fresh tensor of their dtype.

    The result depends on the values and their order only, not on who computes it or how the tensor was cut.
    """
    first = parts[0]
    dtype = accumulate_dtype(first.dtype)
    total = first.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for part in parts[1:]:
        _step(total, part.to(dtype), op)
    if op == "avg":
        total.div_(len(parts))
    return total.to(first.dtype)
