"""Kernels that fold rows and then write whole rows: softmax and the norms. A row stays in registers where it fits."""

from __future__ import annotations

from typing import Final

from hostir.kernels.body import Body
from hostir.kernels.reduction import axes, how, is_inner, tile_class
from hostir.kernels.tiling import Target, Tiling, power, size_of

TILE: Final = 16384  # a row up to this stays in registers
LOOP: Final = 4096
ACROSS: Final = 4096  # elements of a tile when rows lie across memory


def holds(n: int, last: bool, target: Target) -> bool:
    """Whether a program keeps rows of ``n`` elements in one tile; ``last``: they lie side by side."""
    if target.interpret:
        return n <= 2048
    if not target.tight:
        return n <= LOOP
    return n <= (TILE if last else ACROSS // 8)


def choose(body: Body, target: Target, wide: bool) -> Tiling:
    """The tiling of a body that folds and also stores at every point."""
    rows, cols = axes(body)
    sizes = body.domain.sizes
    num_rows, num_cols = size_of(sizes, rows), size_of(sizes, cols)
    if target.interpret:
        col_block = min(power(num_cols), 2048)
        row_block = min(power(num_rows), max(1, 16384 // col_block))
        return Tiling((), rows, cols, row_block, col_block, how(num_cols, col_block), wide=wide)
    if is_inner(body):
        col_block = tile_class(num_cols, TILE, LOOP, target)
        row_block = max(1, min(power(num_rows) if target.tight else 16, 1024 // col_block))
        warps = max(1, min(16, row_block * col_block // 512)) if col_block > 1024 else max(1, min(4, row_block * col_block // 256))
        return Tiling((), rows, cols, row_block, col_block, how(num_cols, col_block), warps, wide)
    row_block = min(power(num_rows), 32) if target.tight else 32
    most = ACROSS // row_block * 4
    col_block = tile_class(num_cols, most, ACROSS // row_block, target)
    warps = max(4, min(16, row_block * col_block // 1024))
    return Tiling((), rows, cols, row_block, col_block, how(num_cols, col_block), warps, wide)
