"""Which elements a view touches: strided layouts over a root buffer, exact overlap, and sets of what has been written.

A root counts as dense, whatever the strides of the tensor that a caller passes: alias questions are about elements, not bytes. So
a region is an offset and (size, stride) pairs, as in torch. Overlap of two regions is a bounded linear Diophantine question that
is solved exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, assert_never

import numpy as np
import numpy.typing as npt

from hostir.errors import VerifyError
from hostir.ir.nodes import Expand, Index, Peer, Permute, Reshape, Span, Transpose, ViewOp
from hostir.types import Env, Operand, evaluate, show_expr


@dataclass(frozen=True, slots=True)
class Layout:
    """Elements ``offset + sum(i_k * strides[k])`` with ``0 <= i_k < sizes[k]`` of a root buffer."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def last(self) -> int:
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))


def dense(sizes: tuple[int, ...]) -> Layout:
    """The layout of a whole contiguous buffer."""
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(sizes[i + 1], 1)
    return Layout(0, sizes, tuple(strides))


class OutOfRange(VerifyError):
    """An index below 0 or past the end: whoever evaluates the view fills in the place."""


def _value(e: Operand, env: Env) -> int:
    return int(evaluate(e, env))


def check_index(index: int, size: int, item: Operand, position: int, *, past: int) -> None:
    if index < 0 or index >= size + past:
        raise OutOfRange(
            f"index {show_expr(item)} = {index} is outside dimension {position}",
            expected=f"0 .. {size - 1 + past}",
            got=index,
            cure="indices never wrap: write (i + n) % n, or guard the statement with an if",
        )


def apply(layout: Layout, op: ViewOp, env: Env) -> Layout:
    """One view operation; ``env`` gives the values of its host expressions. ``Peer`` does not change the layout."""
    match op:
        case Index(items):
            offset, sizes, strides = layout.offset, [], []
            for position, (n, s) in enumerate(zip(layout.sizes, layout.strides, strict=True)):
                item = items[position] if position < len(items) else None
                if item is None:
                    sizes.append(n)
                    strides.append(s)
                elif isinstance(item, Span):
                    a, b = _value(item.start, env), _value(item.stop, env)
                    check_index(a, n, item.start, position, past=1)
                    check_index(b, n, item.stop, position, past=1)
                    if b < a:
                        raise OutOfRange(f"the range {show_expr(item.start)} : {show_expr(item.stop)} ends before it starts", got=f"{a} : {b}")
                    offset += a * s
                    sizes.append(b - a)
                    strides.append(s)
                else:
                    i = _value(item, env)
                    check_index(i, n, item, position, past=0)
                    offset += i * s
            return Layout(offset, tuple(sizes), tuple(strides))
        case Transpose():
            return Layout(layout.offset, layout.sizes[::-1], layout.strides[::-1])
        case Permute(order):
            return Layout(layout.offset, tuple(layout.sizes[i] for i in order), tuple(layout.strides[i] for i in order))
        case Expand(dims):
            sizes_ = tuple(_value(d, env) for d in dims)
            lead = len(sizes_) - len(layout.sizes)
            old = (*([1] * lead), *layout.sizes)
            kept = (*([0] * lead), *layout.strides)
            if any(n != m and n != 1 for n, m in zip(old, sizes_, strict=True)):
                raise OutOfRange("expand repeats dimensions of size 1 only", expected=list(layout.sizes), got=list(sizes_))
            return Layout(layout.offset, sizes_, tuple(0 if n == 1 and m != 1 else s for n, m, s in zip(old, sizes_, kept, strict=True)))
        case Reshape(dims):
            return reshape(layout, tuple(_value(d, env) for d in dims))
        case Peer():
            return layout
        case _:
            assert_never(op)


def _merged(layout: Layout) -> list[tuple[int, int]]:
    """(size, stride) pairs without size-1 dimensions, neighbours that are contiguous joined."""
    pairs: list[tuple[int, int]] = []
    for n, s in zip(layout.sizes, layout.strides, strict=True):
        if n == 1:
            continue
        if pairs and pairs[-1][1] == n * s:
            pairs[-1] = (pairs[-1][0] * n, s)
        else:
            pairs.append((n, s))
    return pairs


def reshape(layout: Layout, sizes: tuple[int, ...]) -> Layout:
    """As a view, or OutOfRange where the elements would have to move."""
    if math.prod(sizes) != layout.numel:
        raise OutOfRange("a reshape keeps the number of elements", expected=list(layout.sizes), got=list(sizes))
    if layout.numel == 0:
        return Layout(layout.offset, sizes, dense(sizes).strides)
    pairs = _merged(layout)[::-1]
    strides: list[int] = []
    n, s = pairs.pop(0) if pairs else (1, 1)
    for want in reversed(sizes):
        if want == 1:
            strides.append(s)
            continue
        if n == 1 and pairs:
            n, s = pairs.pop(0)
        if n % want:
            raise OutOfRange(
                "this reshape would move elements, so it is no view",
                expected="contiguous dimensions", got=f"sizes {list(layout.sizes)}, strides {list(layout.strides)}",
                cure="copy into a dense buffer first: p.copy(x, out=p.empty(...))",
            )  # fmt: skip
        strides.append(s)
        n, s = n // want, s * want
    return Layout(layout.offset, sizes, tuple(reversed(strides)))


# ------------------------------------------------------------------------------------------------------------------- overlap


def overlap(a: Layout, b: Layout) -> bool:
    """Whether two regions of one root share an element."""
    if a.numel == 0 or b.numel == 0 or a.last < b.offset or b.last < a.offset:
        return False
    terms = [(s, n) for n, s in _merged(a) if s] + [(-s, n) for n, s in _merged(b) if s]
    return _solvable(b.offset - a.offset, tuple(sorted(terms, key=lambda t: (-abs(t[0]), t))))


@lru_cache(maxsize=65536)
def _solvable(total: int, terms: tuple[tuple[int, int], ...]) -> bool:
    """Is there ``sum(c * x) == total`` with ``0 <= x < n`` for the (c, n) of ``terms``, largest coefficient first?"""
    if not terms:
        return total == 0
    low = sum((n - 1) * c for c, n in terms if c < 0)
    high = sum((n - 1) * c for c, n in terms if c > 0)
    if not low <= total <= high or total % math.gcd(*(c for c, _ in terms)):
        return False
    (c, n), rest = terms[0], terms[1:]
    rest_low = sum((m - 1) * d for d, m in rest if d < 0)
    rest_high = sum((m - 1) * d for d, m in rest if d > 0)
    ends = sorted(((total - rest_high) / c, (total - rest_low) / c))
    first, last = max(0, math.floor(ends[0])), min(n - 1, math.ceil(ends[1]))
    return any(_solvable(total - c * x, rest) for x in range(first, last + 1))


def identical(a: Layout, b: Layout) -> bool:
    """The same elements in the same order."""
    return a.offset == b.offset and a.sizes == b.sizes and (a.numel <= 1 or _merged(a) == _merged(b))


# ------------------------------------------------------------------------------------------------------------------ intervals

_Runs = npt.NDArray[np.int64]
_LIMIT: Final = 1 << 22


def runs(layout: Layout) -> tuple[_Runs, _Runs]:
    """The elements of a region as sorted disjoint half-open intervals (starts, stops)."""
    if layout.numel == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    pairs = sorted((p for p in _merged(layout) if p[1]), key=lambda p: p[1])
    width = 1
    while pairs and pairs[0][1] <= width:
        n, s = pairs.pop(0)
        width = (n - 1) * s + width
    starts = np.array([layout.offset], np.int64)
    for n, s in pairs:
        if starts.size * n > _LIMIT:
            return np.array([layout.offset], np.int64), np.array([layout.last + 1], np.int64)
        starts = (starts[:, None] + np.arange(n, dtype=np.int64)[None, :] * s).reshape(-1)
    starts.sort()
    return join(starts, starts + width)


def join(starts: _Runs, stops: _Runs) -> tuple[_Runs, _Runs]:
    """Sorted intervals with touching and overlapping ones merged."""
    if starts.size == 0:
        return starts, stops
    reach = np.maximum.accumulate(stops)
    fresh = np.concatenate(([True], starts[1:] > reach[:-1]))
    first = np.flatnonzero(fresh)
    return starts[first], reach[np.concatenate((first[1:] - 1, [starts.size - 1]))]


class Written:
    """The elements of one buffer that have been written so far."""

    def __init__(self) -> None:
        self._starts: _Runs = np.zeros(0, np.int64)
        self._stops: _Runs = np.zeros(0, np.int64)

    def add(self, layout: Layout) -> None:
        self.add_runs(*runs(layout))

    def add_runs(self, starts: _Runs, stops: _Runs) -> None:
        """Half-open intervals in any order."""
        if not self.covers_runs(starts, stops):
            every = np.concatenate((self._starts, starts))
            order = np.argsort(every, kind="stable")
            self._starts, self._stops = join(every[order], np.concatenate((self._stops, stops))[order])

    def covers(self, layout: Layout) -> bool:
        """Whether every element of the region was written."""
        return self.covers_runs(*runs(layout))

    def covers_runs(self, starts: _Runs, stops: _Runs) -> bool:
        if starts.size == 0:
            return True
        at = np.searchsorted(self._starts, starts, side="right") - 1
        return bool((at >= 0).all()) and bool((self._stops[np.maximum(at, 0)] >= stops).all()) if self._starts.size else False
