"""Kernels without folds: tiles along the output's memory, two-dimensional where inputs broadcast or lie across it."""

from __future__ import annotations

from typing import Final

from hostir.kernels.body import Body, Load
from hostir.kernels.tiling import Runs, Target, Tiling, collapsed, ordered, power, size_of

ELEMENTS: Final = 1024  # of a program: eight a thread, so 16 bytes at once of f16 and bf16
INTERPRETED: Final = 1 << 16
NARROW: Final = 16  # a last axis shorter than this is no axis of a tile
TILE: Final = 32  # a transposed tile, each way


def choose(body: Body, target: Target, wide: bool) -> Tiling:
    """The tiling of a body without folds."""
    sizes = body.domain.sizes
    first = body.stores[0].layout
    runs = collapsed(body, ordered(range(len(sizes)), first))
    elements = INTERPRETED if target.interpret else ELEMENTS
    if len(runs) < 2:
        return _flat(runs, sizes, elements, target, wide)
    last = size_of(sizes, runs[-1:])
    across = _across(body, runs)
    if across is not None and last >= NARROW:
        side = 256 if target.interpret else TILE
        rest = tuple(r for r in runs[:-1] if r is not across)
        return Tiling(rest, (across,), runs[-1:], side, side, num_warps=4, wide=wide)
    if last < 2 * NARROW:
        return _flat(runs, sizes, elements, target, wide)
    col_block = _class(last, elements, target)
    row_block = max(1, elements // col_block)
    if target.tight or target.interpret:
        row_block = min(row_block, power(size_of(sizes, runs[:-1])))
    return Tiling((), runs[:-1], runs[-1:], row_block, col_block, num_warps=_warps(row_block * col_block, target), wide=wide)


def _class(n: int, most: int, target: Target) -> int:
    """The tile's extent along an axis of ``n``: its power of two, or one of few."""
    if target.tight or target.interpret:
        return min(power(n), most)
    return next((c for c in (64, 256) if n <= c), most)


def _flat(runs: Runs, sizes: tuple[int, ...], elements: int, target: Target, wide: bool) -> Tiling:
    n = size_of(sizes, runs)
    block = min(elements, power(n)) if target.interpret else elements if n > elements * target.num_sms else max(elements // 4, 128)
    if n == 1:
        return Tiling((), (), (), 1, 1, num_warps=1, wide=wide)
    return Tiling((), runs, (), block, 1, num_warps=_warps(block, target), wide=wide)


def _warps(elements: int, target: Target) -> int:
    return 4 if target.interpret else max(1, min(4, elements // 128))


def _across(body: Body, runs: Runs) -> tuple[int, ...] | None:
    """The run, not the last, along which the largest load lies side by side."""
    found: tuple[int, ...] | None = None
    most = 2 * NARROW - 1
    for v in body.values():
        if isinstance(v, Load) and v.layout.inner is None and v.layout.strides[runs[-1][-1]] > 1:
            for run in runs[:-1]:
                n = size_of(body.domain.sizes, (run,))
                if v.layout.strides[run[-1]] == 1 and n > most:
                    found, most = run, n
    return found
