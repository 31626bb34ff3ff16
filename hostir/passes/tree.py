"""A fusion on its way to a host program: segments, each for one executor or one communication, in the loops that they share.

The tree has a text of its own, so that the passes between fusion and program can be tested as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.show import Names, show_arg, show_op
from hostir.passes.loops import LoopAxis, Loops
from hostir.types import Dim, DType, show_expr

Kind: TypeAlias = Literal["communication", "view", "compute", "library"]


@dataclass(frozen=True, eq=False)
class Sum:
    """``value`` is put together over the trips of ``loops``: kept in ``dtype``, terms combined by ``op`` (a reduction's name). ``eager``:
    the term is written out and added by a call of its own."""

    value: TensorView
    loops: tuple[LoopAxis, ...]
    op: str
    dtype: DType
    eager: bool = False


@dataclass(frozen=True, eq=False)
class Segment:
    """Operations that one executor runs as a unit, or one communication. ``how`` a communication travels is the plan's choice."""

    kind: Kind
    ops: tuple[Op, ...]
    nest: tuple[LoopAxis, ...] = ()
    sums: tuple[Sum, ...] = ()
    how: str = ""

    def reads(self) -> Iterator[TensorView]:
        """Tensors from outside, each once."""
        made = {o for op in self.ops for o in op.outs}
        yield from dict.fromkeys(tv for op in self.ops for tv in op.reads() if tv not in made)

    def made(self) -> Iterator[TensorView]:
        for op in self.ops:
            yield from op.outs

    def __str__(self) -> str:
        return "\n".join(_segment(self, Names()))


@dataclass(frozen=True, eq=False)
class Finish:
    """A sum that was kept in a longer dtype becomes what it is to be."""

    sum: Sum


@dataclass(frozen=True, eq=False)
class Rotation:
    """Trip k of the rank at position r of ``axis`` takes the chunk of member r - step · (k + offset)."""

    axis: str
    size: Dim
    step: int = 1
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Loop:
    axis: LoopAxis
    body: tuple[Item, ...]
    rotation: Rotation | None = None


Item: TypeAlias = Segment | Finish | Loop


@dataclass(frozen=True, eq=False)
class Tree:
    """``items`` in program order; ``loops`` knows the loop axes of ``fusion``."""

    fusion: Fusion
    loops: Loops
    items: tuple[Item, ...]
    note: str = field(default="")

    def with_(self, items: tuple[Item, ...]) -> Tree:
        return replace(self, items=items)

    def segments(self) -> Iterator[Segment]:
        yield from _segments(self.items)

    def __str__(self) -> str:
        names = Names()
        for p in self.fusion.params:
            names(p)
        lines = [f"tree @{self.fusion.name} {{", *("  " + line for line in _lines(self.items, names))]
        results = ", ".join(show_arg(r.value, names) for r in self.fusion.results)
        return "\n".join([*lines, f"  return {results}" if results else "  return", "}"])


def _segments(items: tuple[Item, ...]) -> Iterator[Segment]:
    for item in items:
        if isinstance(item, Segment):
            yield item
        elif isinstance(item, Loop):
            yield from _segments(item.body)


def _lines(items: tuple[Item, ...], names: Names) -> Iterator[str]:
    for item in items:
        if isinstance(item, Segment):
            yield from _segment(item, names)
        elif isinstance(item, Finish):
            yield f"finish {show_arg(item.sum.value, names)} from {item.sum.dtype}"
        else:
            r = item.rotation
            how = "" if r is None else f" rotated by {r.axis}" + ("" if r.step == 1 else " backward") + (f" from {r.offset}" if r.offset else "")
            yield f"loop {item.axis.name} in {show_expr(item.axis.trips)}{how} {{"
            yield from ("  " + line for line in _lines(item.body, names))
            yield "}"


def _segment(s: Segment, names: Names) -> Iterator[str]:
    head = s.kind + (f" {s.how}" if s.how else "")
    lines = []
    for op in s.ops:
        right = show_op(op, names)
        if s.kind == "communication":
            (source,) = dict.fromkeys(op.reads())
            right += f"  # {source.sharding} → {op.outs[0].sharding}"
        lines.append(right)
    yield f"{head} {{ {lines[0]} }}" if len(lines) == 1 and not s.sums else f"{head} {{"
    if len(lines) > 1 or s.sums:
        yield from ("  " + line for line in lines)
        for x in s.sums:
            over = ", ".join(a.name for a in x.loops)
            yield f"  {'add' if x.eager else 'accumulate'} {show_arg(x.value, names)} {x.op} {x.dtype} over {over}"
        yield "}"
