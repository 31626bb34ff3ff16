"""Kernels that fold: rows that lie side by side in memory (inner) or across it (outer), few long ones split over many programs."""

from __future__ import annotations

import math
from typing import Final

from hostir.kernels.body import Body, Folded, State
from hostir.kernels.folds import FOLDS
from hostir.kernels.tiling import How, Runs, Target, Tiling, collapsed, main_load, ordered, power, size_of

TILE: Final = 8192  # a row up to this is one tile
LOOP: Final = 4096  # columns of a tile in a loop over an inner row
OUTER_ROWS: Final = 64  # results side by side, at least: 128 bytes of bf16
OUTER_COLS: Final = 32
SPLIT_INNER: Final = 4096  # columns that a program folds at least, when a row is split
SPLIT_OUTER: Final = 256
SPLIT_WHOLE: Final = 1 << 16  # columns from which a row that is also written is split
MAX_SPLIT: Final = 512


def is_inner(body: Body) -> bool:
    """Whether what is folded lies side by side."""
    layout = main_load(body)
    kept = [a for a in body.domain.kept if body.domain.sizes[a] != 1]
    if layout is None or not kept:
        return True
    reach = [(abs(s), a in body.domain.reduced) for a, s in enumerate(layout.strides) if s and body.domain.sizes[a] != 1]
    return not reach or min(reach)[1]


def split(body: Body, target: Target) -> int:
    """How many programs share each row: enough to fill the device, each with a good part to fold."""
    rows, cols = body.domain.count(body.domain.kept), body.domain.count(body.domain.folded)
    inner = is_inner(body)
    programs = rows if inner else math.ceil(rows / OUTER_ROWS)
    if rows == 0 or programs >= 2 * target.num_sms:
        return 1
    if any(s.whole for s in body.stores) and (4 * programs > target.num_sms or cols < SPLIT_WHOLE):
        return 1  # reading the rows again in another kernel costs more than idle processors
    parts = min(math.ceil(4 * target.num_sms / programs), cols // (SPLIT_INNER if inner else SPLIT_OUTER), MAX_SPLIT)
    if parts < 2:
        return 1
    return parts if target.tight else 64


def axes(body: Body) -> tuple[Runs, Runs]:
    """The kept and the folded runs, each in the order of memory."""
    layout = main_load(body) or body.stores[0].layout
    folds = {v.fold.kind for v in body.values() if isinstance(v, (Folded, State))}
    kept = ordered(body.domain.kept, body.stores[0].layout if body.stores else layout)
    folded = body.domain.folded if any(FOLDS[k].ordered for k in folds) else ordered(body.domain.folded, layout)
    return collapsed(body, kept), collapsed(body, folded)


def choose(body: Body, target: Target, wide: bool) -> Tiling:
    """The tiling of a body whose results are all folded."""
    rows, cols = axes(body)
    sizes = body.domain.sizes
    num_rows = size_of(sizes, rows)
    num_cols = math.ceil(size_of(sizes, cols) / body.split)
    merge = any(isinstance(v, Folded) and v.fold.of.merge for v in body.values())
    if target.interpret:
        col_block = min(power(num_cols), LOOP)
        return Tiling((), rows, cols, min(power(num_rows), max(1, 16384 // col_block)), col_block, how(num_cols, col_block), wide=wide)
    if is_inner(body) or merge:
        col_block = power(num_cols) if merge else tile_class(num_cols, TILE, LOOP, target)
        row_block = max(1, min(power(num_rows) if target.tight else 16, 1024 // col_block))
        warps = max(1, min(8, row_block * col_block // 256))
        return Tiling((), rows, cols, row_block, col_block, how(num_cols, col_block), warps, wide)
    row_block, col_block = OUTER_ROWS, OUTER_COLS
    if target.tight:
        col_block = min(OUTER_COLS, power(num_cols))
        row_block = min(OUTER_ROWS * OUTER_COLS // col_block, max(power(num_rows), 16))
        col_block = max(col_block, min(OUTER_ROWS * OUTER_COLS // row_block, power(num_cols)))
    return Tiling((), rows, cols, row_block, col_block, how(num_cols, col_block), 4, wide)


def how(num_cols: int, col_block: int) -> How:
    return "tile" if num_cols <= col_block else "loop"


def tile_class(n: int, most: int, loop: int, target: Target) -> int:
    """Columns of a tile: all ``n`` (as a power of two, or one of two classes) up to ``most``, else ``loop`` at a time."""
    if target.tight:
        return max(power(n), 16) if n <= most else loop
    return 1024 if n <= 1024 else loop
