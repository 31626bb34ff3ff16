"""Where each value of a tree is kept: in the innermost loop body that holds both what makes it and all that reads it.

Kept inside a loop, a value is one chunk, new in each trip; kept outside, it is there in full and trips write or read their parts of it.
"""

from __future__ import annotations

from hostir.graph.fusion import TensorView
from hostir.passes.tree import Finish, Item, Loop, Segment, Tree

Path = tuple[Loop, ...]


class Homes:
    """``home[tv]`` is the path of loops (outermost first) in whose body ``tv`` is kept; ``whole[tv]`` is where it is made, or
    where the loop ends that makes it whole."""

    def __init__(self, tree: Tree) -> None:
        self.home: dict[TensorView, Path] = {}
        self.whole: dict[TensorView, Path] = {}
        self.maker: dict[TensorView, Segment] = {}
        self.users: dict[TensorView, list[Segment]] = {}
        self.results = {r.value for r in tree.fusion.results}
        self._made: dict[TensorView, Path] = {}
        self._read: dict[TensorView, list[Path]] = {tv: [()] for tv in self.results}
        self._walk(tree.items, ())
        for tv, path in self._made.items():
            op = next(op for op in self.maker[tv].ops if tv in op.outs)
            late = tree.loops.finishes(op)
            self.whole[tv] = path[: next((i for i, loop in enumerate(path) if loop.axis in late), len(path))]
            path = self.whole[tv]
            for other in self._read.get(tv, []):
                path = _common(path, other)
            self.home[tv] = path

    def _walk(self, items: tuple[Item, ...], path: Path) -> None:
        for item in items:
            if isinstance(item, Loop):
                self._walk(item.body, (*path, item))
            elif isinstance(item, Segment):
                for tv in item.made():
                    self.maker[tv], self._made[tv] = item, path
                for tv in item.reads():
                    self.users.setdefault(tv, []).append(item)
                    self._read.setdefault(tv, []).append(path)
            elif isinstance(item, Finish):
                pass

    def read_outside(self, s: Segment) -> list[TensorView]:
        """The values of ``s`` that anybody else reads, or that are results."""
        return [tv for tv in s.made() if tv in self.results or any(u is not s for u in self.users.get(tv, ()))]


def _common(a: Path, b: Path) -> Path:
    n = 0
    while n < min(len(a), len(b)) and a[n] is b[n]:
        n += 1
    return a[:n]
