"""How a kernel walks its domain: which axes a program covers in its tile, which it loops over, and how large the tile is.

The schedulers (``pointwise``, ``reduction``, ``normalization``) choose a ``Tiling`` from a body, on numbers alone; ``emit`` writes it down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hostir.errors import UnsupportedError
from hostir.kernels.body import Body, Load
from hostir.kernels.layout import LIMIT_32, Layout, runs_of

Runs: TypeAlias = tuple[tuple[int, ...], ...]
How: TypeAlias = Literal["none", "tile", "loop"]
MAX_RUNS: Final = 8


@dataclass(frozen=True, slots=True)
class Target:
    """What code is generated for. ``tight``: all sizes are constants of the fusion, so tiles are made to measure; else they come in few
    classes, which bounds the number of kernels. ``num_sms`` is the number of programs that run at once, about."""

    interpret: bool
    tight: bool = True
    num_sms: int = 132


@dataclass(frozen=True, slots=True)
class Tiling:
    """``rows`` and ``cols`` are the two axes of a tile, each a list of runs (axes that are walked in one stride), outermost first; ``batch``
    runs are one index a program. ``cols`` are what a fold reduces; ``fold``: the tile holds all of them, or the program loops over them.
    """

    batch: Runs
    rows: Runs
    cols: Runs
    row_block: int
    col_block: int
    fold: How = "none"
    num_warps: int = 4
    wide: bool = False

    def __post_init__(self) -> None:
        if not self.rows:  # one index for all programs
            object.__setattr__(self, "row_block", 1)


def power(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def size_of(sizes: Sequence[int], runs: Runs) -> int:
    return math.prod(sizes[a] for run in runs for a in run)


def ordered(axes: Sequence[int], layout: Layout) -> list[int]:
    """``axes`` in the order in which ``layout`` lies in memory, outermost first."""
    return sorted(axes, key=lambda a: -abs(layout.strides[a]))


def main_load(body: Body) -> Layout | None:
    """The layout that decides what lies side by side: the load that touches the most elements."""
    loads = [v for v in body.values() if isinstance(v, Load)]
    if not loads:
        return None

    def touched(v: Load) -> int:
        return math.prod(n for n, s in zip(v.layout.sizes, v.layout.strides, strict=True) if s) * v.dtype.itemsize

    return max(loads, key=touched).layout


def collapsed(body: Body, axes: Sequence[int]) -> Runs:
    """The runs of ``axes``; UnsupportedError when too many are left."""
    runs = tuple(runs_of(axes, body.domain.sizes, body.layouts()))
    if len(runs) > MAX_RUNS:
        why = f"{len(runs)} dims are left after collapsing those that are dense in one another, and kernels index at most {MAX_RUNS}"
        raise UnsupportedError("no kernel walks these tensors", refusals={"KernelExecutor": why})
    return runs


def check_grid(programs: int) -> int:
    """The number of programs, which all lie along x; UnsupportedError past the hardware's limit."""
    if programs > LIMIT_32:
        raise UnsupportedError("too many tiles for one launch", refusals={"KernelExecutor": f"{programs} programs, and a grid holds {LIMIT_32}"})
    return programs
