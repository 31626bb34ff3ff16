"""Which tensors share memory, exactly where that can be told and "some" where it cannot.

Writing a result in place is only allowed where nothing that is still to be read is overwritten, so the question is asked before every
evaluation into given outputs. It is answered from addresses, sizes and strides alone: no device is touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import torch

Overlap: TypeAlias = Literal["no", "same", "some"]
_EXACT: int = 1 << 14  # elements up to which interleaved views are compared element by element


def extent(t: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that ``t`` can touch; equal when it has no elements."""
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.numel() * t.element_size()
    reach = 0
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if size == 0:
            return start, start
        reach += (size - 1) * stride
    return start, start + (reach + 1) * t.element_size()


def overlap(a: torch.Tensor, b: torch.Tensor) -> Overlap:
    """ "same": the same elements in the same order; "some": they may share memory; "no": they do not."""
    if a is b:
        return "same" if a.numel() else "no"
    a0, a1 = extent(a)
    b0, b1 = extent(b)
    if a0 >= b1 or b0 >= a1:
        return "no"
    if a0 == b0 and a.shape == b.shape and a.dtype == b.dtype and _strides(a) == _strides(b):
        return "same"
    if a.dtype == b.dtype and (_apart(a, b, (b0 - a0) // a.element_size()) if (b0 - a0) % a.element_size() == 0 else False):
        return "no"
    return "some"


def _strides(t: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def _apart(a: torch.Tensor, b: torch.Tensor, distance: int) -> bool:
    """True when two views of one buffer, ``distance`` elements apart, provably share no element."""
    steps = sorted({*_strides(a), *_strides(b)} - {0}, reverse=True)
    if distance % (math.gcd(*steps) or 1) if steps else distance:
        return True
    if a.numel() <= _EXACT and b.numel() <= _EXACT:
        return not bool(torch.isin(_offsets(b) + distance, _offsets(a)).any())
    if steps[-1] != 1:
        steps.append(1)
    return _boxes_apart(a, b, distance, steps)


def _offsets(t: torch.Tensor) -> torch.Tensor:
    out = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(t.shape, t.stride(), strict=True):
        out = out.unsqueeze(-1) + torch.arange(size) * stride
    return out.reshape(-1)


def _boxes_apart(a: torch.Tensor, b: torch.Tensor, distance: int, steps: Sequence[int]) -> bool:
    """Both as boxes in the grid whose strides are ``steps``: disjoint along one dim means disjoint."""
    if any(big % small for big, small in pairwise(steps)):
        return False
    low = min(0, distance)
    boxes = []
    for t, start in ((a, -low), (b, distance - low)):
        sizes = dict.fromkeys(steps, 1)
        for size, stride in zip(t.shape, t.stride(), strict=True):
            if size > 1 and stride:
                if sizes[stride] != 1:
                    return False
                sizes[stride] = size
        box = []
        for step in steps:
            first, start = divmod(start, step)
            box.append((first, first + sizes[step]))
        for (_, end), big, small in zip(box[1:], steps[:-1], steps[1:], strict=True):
            if end > big // small:
                return False  # wraps into the next row: not a box
        boxes.append(box)
    return any(x1 <= y0 or y1 <= x0 for (x0, x1), (y0, y1) in zip(*boxes, strict=True))


def overlaps_itself(t: torch.Tensor) -> bool:
    """True when two indices of ``t`` are one element (an expanded tensor): nothing can be written there."""
    if t.is_contiguous() or t.numel() < 2:
        return False
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            return t.numel() > _EXACT or stride == 0 or int(torch.unique(_offsets(t)).numel()) < t.numel()
        reach += (size - 1) * stride
    return False
