"""Which operations run together: the largest groups of fusible operations, each library call, view and communication by itself.

Two operations share a group when data flows between them, they go through the same loops, and nothing outside the group stands between
them; a value that is whole only after a loop is outside by nature. Views at the end of a group leave it: they are aliases.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.table import TABLE
from hostir.passes.loops import LoopAxis, Loops, is_move
from hostir.passes.tree import Kind, Segment, Tree

Fusible: TypeAlias = Callable[[Op], bool]


def fusible(op: Op) -> bool:
    """Whether the generated kernels take ``op``, as far as its row tells: it has an expression, or is a reduction or a composite."""
    row = TABLE.get(op.name)
    if row is None or row.library or row.random:
        return False
    return (row.pointwise and bool(row.triton)) or row.reduction or row.composite or row.view


def segment(f: Fusion, accepts: Fusible = fusible) -> Tree:
    """The segments of a decomposed fusion, in an order in which they can run. ``accepts`` says which operations one kernel may hold."""
    loops = Loops(f)
    groups = _Groups(f, loops, accepts).run()
    pieces = [piece for kind, ops, nest in groups for piece in _without_tail(f, kind, ops, nest)]
    return Tree(f, loops, tuple(in_order(pieces)))


class _Groups:
    def __init__(self, f: Fusion, loops: Loops, accepts: Fusible) -> None:
        self.f = f
        self.loops = loops
        self.accepts = accepts
        self.group: dict[Op, int] = {}
        self.members: dict[int, list[Op]] = {}
        self.kind: dict[int, Kind] = {}
        self.nest: dict[int, tuple[LoopAxis, ...]] = {}
        self.at = {op: i for i, op in enumerate(f.ops)}
        self.late = {o for op in f.ops if loops.finishes(op) for o in op.outs}  # whole only after a loop

    def run(self) -> list[tuple[Kind, list[Op], tuple[LoopAxis, ...]]]:
        for i, op in enumerate(self.f.ops):
            self.group[op], self.members[i] = i, [op]
            self.kind[i], self.nest[i] = self._kind(op), self.loops.nest(op)
            if self.kind[i] in ("view", "compute"):
                for tv in op.reads():
                    self._merge(tv, op)
        return [(self.kind[g], self.members[g], self.nest[g]) for g in self.members]

    def _kind(self, op: Op) -> Kind:
        if is_move(op):
            return "communication"
        if not self.accepts(op):
            return "library"
        return "view" if TABLE[op.name].view else "compute"

    def _merge(self, tv: TensorView, op: Op) -> None:
        producer = tv.definition
        if producer is None or tv in self.late:
            return
        a, b = self.group[producer], self.group[op]
        if a == b or self.kind[a] not in ("view", "compute") or self.nest[a] != self.nest[b] or not _one_place(producer, op):
            return
        if self._reaches_round({a, b}):
            return
        for x in self.members[b]:
            self.group[x] = a
        self.members[a] = sorted(self.members[a] + self.members.pop(b), key=self.at.__getitem__)
        if self.kind[b] == "compute":
            self.kind[a] = "compute"

    def _reaches_round(self, pair: set[int]) -> bool:
        """Whether something outside the two groups, or a value that a loop finishes, lies between them."""
        low = min(self.at[self.members[g][0]] for g in pair)
        stack, seen = list(pair), set(pair)
        first = True
        while stack:
            g = stack.pop()
            for op in self.members[g]:
                for tv in op.reads():
                    p = tv.definition
                    if p is None:
                        continue
                    h = self.group[p]
                    if h in pair:
                        if (g not in pair) or tv in self.late:
                            return True
                    elif h not in seen and self.at[self.members[h][-1]] > low:
                        seen.add(h)
                        stack.append(h)
        del first
        return False


def _one_place(a: Op, b: Op) -> bool:
    """Whether both are computed by the same ranks."""
    x, y = a.outs[0].sharding, b.outs[0].sharding
    return (x is None and y is None) or (x is not None and y is not None and x.mesh.same_as(y.mesh))


def _without_tail(f: Fusion, kind: Kind, ops: list[Op], nest: tuple[LoopAxis, ...]) -> list[Segment]:
    """The group, and the views that only hand its values on."""
    if kind not in ("view", "compute"):
        return [Segment(kind, tuple(ops), nest)]
    tail: list[Op] = []
    left = list(ops)
    for op in reversed(ops):
        used = any(tv in op.outs for other in left if other is not op for tv in other.reads())
        if TABLE[op.name].view and not used:
            tail.insert(0, op)
            left.remove(op)
    found = [Segment("compute", tuple(left), nest)] if left else []
    return [*found, *(Segment("view", (op,), nest) for op in tail)]


def in_order(segments: list[Segment]) -> list[Segment]:
    """Producers first; else as the operations stand in the fusion."""
    made = {tv: i for i, s in enumerate(segments) for tv in s.made()}
    waits = [{made[tv] for tv in s.reads() if tv in made} for s in segments]
    users: list[list[int]] = [[] for _ in segments]
    for i, before in enumerate(waits):
        for b in before:
            users[b].append(i)
    ready = [i for i, before in enumerate(waits) if not before]
    found: list[Segment] = []
    while ready:
        i = heappop(ready)
        found.append(segments[i])
        for u in users[i]:
            waits[u].discard(i)
            if not waits[u]:
                heappush(ready, u)
    assert len(found) == len(segments), "groups are free of cycles"
    return found
