"""How data moves inside a host loop, where each trip needs or finishes another member's part.

``ring``: neighbours pass the travelling part on, two buffers, D - 1 messages. ``direct``: each trip fetches from the owner. ``collective``:
one collective a trip, all ranks at the same chunk. ``serial``: no communication in the loop at all, it stands before or after it. In a
ring the ranks are at different chunks in one trip; a collective over that mesh axis cannot stand in such a loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from hostir.errors import PlanError
from hostir.graph.sharding import even
from hostir.passes.loops import LoopAxis, Loops, changed_axis
from hostir.passes.tree import Item, Loop, Rotation, Segment, Tree
from hostir.types import Dim, same

PLANS: Final = ("auto", "serial", "collective", "ring", "direct", "copy_engine", "gated")
ONE_SIDED: Final = ("copy_engine", "gated")


def plan(tree: Tree, how: str = "auto") -> Tree:
    """``tree`` with a way for each communication in a loop (see ``PLANS``). PlanError where the chosen one is impossible."""
    if how not in PLANS:
        raise PlanError("there is no such plan", expected=", ".join(PLANS), got=how)
    if how in ONE_SIDED:
        raise PlanError(
            f"the plan {how} reads peers' memory, which a lowered fusion does not lay out", got=how,
            expected=", ".join(p for p in PLANS if p not in ONE_SIDED), cure="hir.overlap has operations with this plan; or choose ring or direct",
        )  # fmt: skip
    return tree.with_(_Planner(tree.loops, how).block(tree.items))


@dataclass(frozen=True)
class Part:
    """A communication by which the trips of a loop get (``fetch``), or finish, the parts of the members of mesh axis ``axis``."""

    segment: Segment
    dim: int
    loop: LoopAxis
    axis: str
    size: Dim
    fetch: bool


def part_of(s: Segment, loops: Loops) -> Part | None:
    found = loops.source_part(s.ops[0]) if s.kind == "communication" else None
    if found is None or found[1] not in s.nest:
        return None
    dim, loop, axis = found
    (source,) = dict.fromkeys(s.ops[0].reads())
    assert source.sharding is not None
    fetch = any(d == dim and a is loop for d, a in loops.chunked(s.ops[0])[1][0])
    return Part(s, dim, loop, axis, source.sharding.mesh.axis_size(axis), fetch)


class _Planner:
    def __init__(self, loops: Loops, how: str) -> None:
        self.loops = loops
        self.how = how

    def block(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if not isinstance(item, Loop):
                out.append(item)
                continue
            loop = replace(item, body=self.block(item.body))
            if self.how == "serial":
                out += _outside(loop)
            else:
                out.append(self._loop(loop))
        return tuple(out)

    def _loop(self, loop: Loop) -> Loop:
        comms = [s for s in _within(loop.body) if s.kind == "communication"]
        parts = [p for s in comms if (p := part_of(s, self.loops)) is not None and p.loop is loop.axis]
        axis = loop.axis.swizzle or next((p.axis for p in parts if not _is_one(p.size)), None)
        wanted = self.how in ("ring", "direct") or loop.axis.swizzle is not None
        if axis is None or self.how == "collective":
            return self._collective(loop, parts)
        why = self._why_not(loop, comms, parts, axis)
        if why is not None:
            if wanted and parts:
                raise PlanError(
                    f"the loop over {loop.axis} cannot be a {self.how if self.how != 'auto' else 'ring'} over {axis}: {why}", cure='plan="collective"'
                )
            return self._collective(loop, parts)
        if not wanted and _float_sums(loop):
            return self._collective(loop, parts)  # ranks would add in different orders
        return self._rotated(loop, parts, axis)

    def _why_not(self, loop: Loop, comms: list[Segment], parts: list[Part], axis: str) -> str | None:
        mine = [p for p in parts if p.axis == axis]
        rotating = {id(p.segment) for p in mine}
        for s in comms:
            change = changed_axis(s.ops[0])
            if id(s) not in rotating and (change is None or change[0] == axis):
                return f"another communication in it goes over {axis}"
        if not mine:
            return None
        size, trips = mine[0].size, loop.axis.trips
        if not same(size, trips) and not even(trips, size):
            return f"{trips} chunks are no multiple of {size} ranks"
        for p in mine:
            if all(p.segment is not item for item in loop.body):
                return "one of its communications stands in an inner loop"
            (source,) = dict.fromkeys(p.segment.ops[0].reads())
            whole = source.known.dims[p.dim]
            if not _ends_together(whole, size, loop.axis.chunks):
                return f"chunks and shards of {whole} elements do not end together"
        return None

    def _collective(self, loop: Loop, parts: list[Part]) -> Loop:
        how = {id(p.segment): "broadcast" if p.fetch else "reduce" for p in parts}
        return replace(loop, body=_chosen(loop.body, how))

    def _rotated(self, loop: Loop, parts: list[Part], axis: str) -> Loop:
        mine = [p for p in parts if p.axis == axis]
        fetches = any(p.fetch for p in mine)
        step = -1 if self.how == "direct" or not mine else 1
        size = mine[0].size if mine else self._size(axis)
        way = "direct" if self.how == "direct" else "ring"
        how = {id(p.segment): way if p.fetch else "ring" for p in mine}
        how |= {id(p.segment): "broadcast" if p.fetch else "reduce" for p in parts if p.axis != axis}
        offset = 1 if mine and not fetches else 0
        return replace(loop, body=_chosen(loop.body, how), rotation=Rotation(axis, size, step, offset))

    def _size(self, axis: str) -> Dim:
        for tv in (*self.loops.f.inputs, *(o for op in self.loops.f.ops for o in op.outs)):
            if tv.sharding is not None and axis in tv.sharding.mesh.names:
                return tv.sharding.mesh.axis_size(axis)
        raise PlanError(f"no mesh has the axis {axis} by which a loop is to be rotated")


def _ends_together(n: Dim, parts: Dim, chunks: Dim) -> bool:
    if same(parts, chunks) or not (isinstance(n, int) and isinstance(parts, int) and isinstance(chunks, int)):
        return True
    return -(-n // chunks) * (chunks // parts) == -(-n // parts)


def _is_one(d: Dim) -> bool:
    return isinstance(d, int) and d == 1


def _within(items: tuple[Item, ...]) -> list[Segment]:
    return [s for item in items for s in ((item,) if isinstance(item, Segment) else _within(item.body) if isinstance(item, Loop) else ())]


def _float_sums(loop: Loop) -> bool:
    return any(loop.axis in x.loops and x.dtype.is_float for s in _within(loop.body) for x in s.sums)


def _chosen(items: tuple[Item, ...], how: dict[int, str]) -> tuple[Item, ...]:
    return tuple(
        replace(i, how=how[id(i)]) if isinstance(i, Segment) and id(i) in how
        else replace(i, body=_chosen(i.body, how)) if isinstance(i, Loop) else i
        for i in items
    )  # fmt: skip


def _outside(loop: Loop) -> list[Item]:
    """``loop`` with its communications before it, where their operand comes from outside, or after it, where nothing in it reads them."""
    before: list[Item] = []
    after: list[Item] = []
    left = list(loop.body)
    moved = True
    while moved:
        moved = False
        made = {tv for s in _within(tuple(left)) for tv in s.made()}
        read = {tv for s in _within(tuple(left)) for tv in s.reads()}
        for s in [x for x in left if isinstance(x, Segment) and x.kind == "communication"]:
            nest = tuple(a for a in s.nest if a is not loop.axis)
            if not any(tv in made for tv in s.reads()):
                before.append(replace(s, nest=nest))
            elif not any(tv in read for tv in s.made()):
                after.insert(0, replace(s, nest=nest))
            else:
                continue
            left.remove(s)
            moved = True
            break
    return [*before, replace(loop, body=tuple(left)), *after] if left else [*before, *after]
