"""Segments that walk through the same dimension in chunks share one host loop.

Segments are taken in an order in which they can run; one that fits into the loops that are open joins them, so neighbours fuse into one
body. It fits when all that it reads from this loop is there at its chunk: a value that only the loop's end makes whole, or that it needs
as a whole, closes the loop first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hostir.graph.fusion import TensorView
from hostir.passes.loops import LoopAxis, Loops, Where
from hostir.passes.tree import Item, Loop, Segment, Tree


def host_loops(tree: Tree) -> Tree:
    """``tree`` (flat) with its segments in loops."""
    return tree.with_(_Nesting(tree.loops, [s for s in tree.items if isinstance(s, Segment)]).run())


@dataclass
class _Open:
    """A loop under construction, and what it has made so far."""

    axis: LoopAxis | None
    body: list[Item] = field(default_factory=list)
    made: set[TensorView] = field(default_factory=set)


class _Nesting:
    def __init__(self, loops: Loops, segments: list[Segment]) -> None:
        self.loops = loops
        self.left = segments
        self.stack = [_Open(None)]
        self.done: set[TensorView] = set()
        self.to_make = {tv for s in segments for tv in s.made()}
        self.late = {o: loops.finishes(op) for s in segments for op in s.ops for o in op.outs}

    def run(self) -> tuple[Item, ...]:
        while self.left:
            ready = [s for s in self.left if all(tv in self.done or tv not in self.to_make for tv in s.reads())]
            depths = {id(s): self._fits(s) for s in ready}
            best = min(ready, key=lambda s: (-depths[id(s)], len(s.nest)))
            self._put(best, depths[id(best)])
            self.left.remove(best)
        while len(self.stack) > 1:
            self._close()
        return tuple(self.stack[0].body)

    def _fits(self, s: Segment) -> int:
        """How many of the open loops ``s`` can stay in."""
        depth = 0
        for opened, axis in zip(self.stack[1:], s.nest, strict=False):
            if opened.axis is not axis or not self._reads_chunks(s, opened, axis):
                break
            depth += 1
        return depth

    def _reads_chunks(self, s: Segment, opened: _Open, axis: LoopAxis) -> bool:
        for op in s.ops:
            for (tv, _), where in zip(self.loops.axes[op].ins, self.loops.chunked(op)[0], strict=True):
                if tv in opened.made and (axis in self.late[tv] or not self._at_its_chunk(tv, axis, where)):
                    return False
        return True

    def _at_its_chunk(self, tv: TensorView, axis: LoopAxis, where: Where) -> bool:
        """Whether ``tv`` is read in the chunks in which the loop makes it: along the same dimensions."""
        mine = [d for d in range(len(tv.known.dims)) if self.loops.of(tv, d) is axis]
        return bool(mine) and all((d, axis) in where for d in mine)

    def _put(self, s: Segment, depth: int) -> None:
        while len(self.stack) - 1 > depth:
            self._close()
        for axis in s.nest[depth:]:
            self.stack.append(_Open(axis))
        self.stack[-1].body.append(s)
        for opened in self.stack[1:]:
            opened.made |= set(s.made())
        self.done |= set(s.made())

    def _close(self) -> None:
        last = self.stack.pop()
        assert last.axis is not None
        self.stack[-1].body.append(Loop(last.axis, tuple(last.body)))
