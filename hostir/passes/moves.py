"""From one layout to another in steps that change one mesh axis each, all of which some communication can do.

Where several mesh axes cut one dimension, only the innermost can be given or taken: the outer ones wait. Steps that make a tensor smaller
go first. Between meshes a tensor moves at once; a partial one is summed up on the way, so it arrives replicated.
"""

from __future__ import annotations

from hostir.errors import BuildError
from hostir.graph.sharding import Partial, Placement, Replicate, Shard, Sharding, replicated


def steps(old: Sharding, new: Sharding) -> list[Sharding]:
    """The layouts after each step, the last one ``new``; empty where the two are the same."""
    if old.mesh.same_as(new.mesh):
        return _within(old, new)
    if crosses(old, new):
        return [new]
    here, there = replicated(old.mesh), replicated(new.mesh)
    return [*_within(old, here), there, *_within(there, new)]


def crosses(old: Sharding, new: Sharding) -> bool:
    """Whether one step brings a tensor to the other mesh: piece by piece from whoever has it, or as a reduction to each receiver."""
    if any(isinstance(p, Partial) for p in new.placements):
        return False
    if any(isinstance(p, Partial) for p in old.placements):
        return len(old.placements) == 1 and new.same_as(replicated(new.mesh))
    return True


def _within(old: Sharding, new: Sharding) -> list[Sharding]:
    found: list[Sharding] = []
    now = old
    while not now.same_as(new):
        now = _step(now, new)
        found.append(now)
    return found


def _step(now: Sharding, new: Sharding) -> Sharding:
    """One change on the way: the best that is possible now."""
    names = now.mesh.names
    open_axes = [n for n in names if now.on(n) != new.on(n)]
    for n in open_axes:
        if isinstance(new.on(n), Partial):
            raise BuildError(
                f"a layout cannot become {new.on(n)} on {n}", got=str(now), expected=str(new), cure="only a reduction gives partial values"
            )
    order = sorted(open_axes, key=lambda n: _rank(now.on(n), new.on(n)))
    for n in order:
        if _innermost(now, n, now.on(n)) and _innermost(now, n, new.on(n)) and not _in_the_way(now, new, n):
            return now.with_(n, new.on(n))
    for n in order:  # given up first, taken anew later
        if isinstance(now.on(n), Shard) and _innermost(now, n, now.on(n)):
            return now.with_(n, Replicate())
    blocking = next(n for n in reversed(names) if isinstance(now.on(n), Shard))
    return now.with_(blocking, Replicate())


def _in_the_way(now: Sharding, new: Sharding, name: str) -> bool:
    """Whether taking its dimension now would keep an outer mesh axis, still to change, from taking or giving it."""
    p = new.on(name)
    outer = now.mesh.names[: now.mesh.names.index(name)]
    return isinstance(p, Shard) and any(now.on(n) != new.on(n) and p in (now.on(n), new.on(n)) for n in outer)


def _rank(a: Placement, b: Placement) -> int:
    """Steps that leave less to move go first: slices, finished sums that are cut, exchanges; then sums, then gathers."""
    match a, b:
        case Replicate(), Shard():
            return 0
        case Partial(), Shard():
            return 1
        case Shard(), Shard():
            return 2
        case Partial(), _:
            return 3
        case _:
            return 4


def _innermost(s: Sharding, name: str, p: Placement) -> bool:
    """Whether no later mesh axis cuts the dimension that ``p`` cuts."""
    if not isinstance(p, Shard):
        return True
    later = s.mesh.names[s.mesh.names.index(name) + 1 :]
    return all(s.on(n) != p for n in later)
