"""Where an element lies: sizes, strides and an offset, and what views do to them.

Everything a view can do is done here on numbers, before any code is written, so that a kernel only ever sees strides. A reshape that
strides cannot express becomes a second level: the row-major number of the element, taken apart again by the layout below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

LIMIT_32: Final = 2**31 - 1
SLACK: Final = 2**21  # lanes past the end of a tile compute offsets too, though nothing is read there


def dense(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides = [1] * len(sizes)
    for d in range(len(sizes) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(sizes[d + 1], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class Layout:
    """Element ``(i0, i1, …)`` is ``offset + sum(i * stride)``, in elements; with ``inner`` that number is a row-major position in
    ``inner``, which says where it lies."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    inner: Layout | None = None

    @staticmethod
    def row_major(sizes: Sequence[int]) -> Layout:
        return Layout(tuple(sizes), dense(sizes))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def bounds(self) -> tuple[int, int]:
        """The smallest and largest number that the top level gives."""
        steps = [(n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)]
        return self.offset + sum(min(s, 0) for s in steps), self.offset + sum(max(s, 0) for s in steps)

    def reach(self) -> int:
        """The largest distance from the base pointer on any level, in elements: what an offset must be able to hold."""
        if 0 in self.sizes:
            return 0
        low, high = self.bounds()
        here = max(abs(low - self.offset), abs(high - self.offset), abs(low), abs(high)) if self.inner is not None else high - low
        return max(here, self.inner.reach() if self.inner is not None else 0)


def needs_64_bit(layouts: Iterable[Layout], numbers: Iterable[int] = ()) -> bool:
    """Whether 32-bit offsets would wrap: decided by the largest *offset* that is reached (not by the number of elements) and by the
    element counts in ``numbers`` that become indices."""
    return any(layout.reach() > LIMIT_32 - SLACK for layout in layouts) or any(n > LIMIT_32 - SLACK for n in numbers)


# ------------------------------------------------------------------------------------------------------------------- views


@dataclass(frozen=True, slots=True)
class Arrange:
    """Dim ``d`` of the result runs along dim ``sources[d]``, or along nothing (None). Permutes, expands, adds and drops dims; a dropped
    dim is read at index 0."""

    sources: tuple[int | None, ...]
    sizes: tuple[int, ...]

    def apply(self, x: Layout) -> Layout:
        strides = tuple(0 if s is None or n == 1 else x.strides[s] for s, n in zip(self.sources, self.sizes, strict=True))
        return replace(x, sizes=self.sizes, strides=strides)

    def result(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.sizes


@dataclass(frozen=True, slots=True)
class Cut:
    """Dim ``dim`` runs ``start, start + step, …`` over ``size`` elements; ``start`` may lie outside where a condition guards the reads."""

    dim: int
    start: int
    step: int
    size: int

    def apply(self, x: Layout) -> Layout:
        stride = x.strides[self.dim]
        sizes = (*x.sizes[: self.dim], self.size, *x.sizes[self.dim + 1 :])
        strides = (*x.strides[: self.dim], stride * self.step, *x.strides[self.dim + 1 :])
        return replace(x, sizes=sizes, strides=strides, offset=x.offset + self.start * stride)

    def result(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in row-major order under other sizes."""

    sizes: tuple[int, ...]

    def apply(self, x: Layout) -> Layout:
        strides = _viewed(x.sizes, x.strides, self.sizes)
        if strides is not None:
            return replace(x, sizes=self.sizes, strides=strides)
        return Layout(self.sizes, dense(self.sizes), 0, x)

    def result(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.sizes


Step: TypeAlias = Arrange | Cut | Reshape


def then(first: Step, second: Step) -> tuple[Step, ...]:
    """Both steps, as one where two rearrangements follow one another."""
    if isinstance(first, Arrange) and isinstance(second, Arrange):
        sources = tuple(None if s is None or n == 1 else first.sources[s] for s, n in zip(second.sources, second.sizes, strict=True))
        return (Arrange(sources, second.sizes),)
    return (first, second)


def chain(step: Step, rest: tuple[Step, ...]) -> tuple[Step, ...]:
    """``step`` before the steps ``rest``."""
    return (*then(step, rest[0]), *rest[1:]) if rest else (step,)


def _viewed(old: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides under the sizes ``new``, or None when the elements do not lie so."""
    if 0 in old:
        return dense(new)
    runs: list[tuple[int, int]] = []  # (number of elements, stride of the last one), maximal runs that are dense in themselves
    for n, s in zip(old, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == s * n:
            runs[-1] = (runs[-1][0] * n, s)
        else:
            runs.append((n, s))
    out = [0] * len(new)
    d = len(new) - 1
    for n, stride in reversed(runs):
        left = n
        step = stride
        while left > 1:
            if d < 0:
                return None
            if new[d] == 1:
                d -= 1
                continue
            if left % new[d]:
                return None
            out[d] = step
            step *= new[d]
            left //= new[d]
            d -= 1
    return tuple(out)


# ---------------------------------------------------------------------------------------------------------------- collapsing


def runs_of(axes: Sequence[int], sizes: Sequence[int], layouts: Sequence[Layout]) -> list[tuple[int, ...]]:
    """Groups of neighbouring ``axes`` that every layout walks in one stride, so that they can be one axis; axes of size 1 are left out."""
    runs: list[list[int]] = []
    for axis in axes:
        if sizes[axis] == 1:
            continue
        if runs and all(x.strides[runs[-1][-1]] == x.strides[axis] * sizes[axis] for x in layouts):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return [tuple(r) for r in runs]
