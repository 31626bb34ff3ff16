"""Moves between meshes, by static lists of ranks: who has which elements is known when the program is made.

Replicated tensors are broadcast, partial ones reduced to each receiver; everything else goes piece by piece from whoever has it. A rank
that is in both meshes copies what it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostir.errors import BuildError
from hostir.graph.fusion import TensorView
from hostir.graph.sharding import Partial, Replicate, Sharding, times
from hostir.graph.show import identifier
from hostir.ir.nodes import Buffer
from hostir.passes.places import ME, indicator, member
from hostir.passes.tree import Segment
from hostir.types import Cmp, Dim, TensorType

if TYPE_CHECKING:
    from hostir.passes.emit import Emitter

Box = tuple[tuple[int, int], ...]
"""Elements by their global positions: first and past the last of each dimension."""


@dataclass(frozen=True)
class Piece:
    """Elements ``box`` of a tensor, from rank ``source`` to rank ``to``."""

    box: Box
    source: int
    to: int


def cross(em: Emitter, s: Segment) -> None:
    """The move ``s`` from one mesh to another."""
    (op,) = s.ops
    (source,) = dict.fromkeys(op.reads())
    out = op.outs[0]
    old, new = source.sharding, out.sharding
    assert old is not None and new is not None
    if not all(isinstance(n, int) for n in out.known.dims):
        raise BuildError(f"%{out.name} goes to another mesh, and its sizes are not numbers", expected="constant sizes", got=out.type, loc=op.loc)
    x, y = em.stored[source].buffer, em.stored[out].buffer
    if any(isinstance(p, Partial) for p in old.placements):
        _reduce(em, source, out, x, y)
    elif all(isinstance(p, Replicate) for p in (*old.placements, *new.placements)) and len(set(new.mesh.layout) - set(old.mesh.layout)) > 1:
        _broadcast(em, old, new, out, x, y)
    else:
        for piece in _pieces(out, old, new):
            _send(em, piece, _box_of(out, old, piece.source), _box_of(out, new, piece.to), x, y)


def _box_of(tv: TensorView, s: Sharding, rank: int) -> Box:
    """What ``rank`` holds of a tensor that lies as ``s``."""
    at = s.mesh.coordinates(rank)
    box = []
    for d, n in enumerate(tv.known.dims):
        start, stop = 0, int(n)
        for axis in s.axes_of(d):
            size = -(-(stop - start) // s.mesh.sizes[s.mesh.names.index(axis)])
            start, stop = min(start + at[axis] * size, stop), min(start + (at[axis] + 1) * size, stop)
        box.append((start, stop))
    return tuple(box)


def _meet(a: Box, b: Box) -> Box | None:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(i < j for i, j in both) else None


def _pieces(tv: TensorView, old: Sharding, new: Sharding) -> Iterator[Piece]:
    """What each receiver needs, from itself where it has it, else from the members that have it, each element once. Receivers begin with
    different senders, so that not all wait for one."""
    pieces = []
    for i, to in enumerate(new.mesh.layout):
        want = _box_of(tv, new, to)
        seen: set[Box] = set()
        senders = old.mesh.layout
        order = [to] if to in senders else []
        order += [r for k in range(len(senders)) if (r := senders[(k + i) % len(senders)]) != to]
        for r in order:
            mine = _box_of(tv, old, r)
            both = None if mine in seen else _meet(mine, want)
            seen.add(mine)
            if both is not None:
                pieces.append(Piece(both, r, to))
    yield from pieces


def _part(em: Emitter, b: Buffer, have: Box, box: Box) -> Buffer:
    """The view of ``b``, which holds ``have`` here, that is ``box``."""
    spans: dict[int, tuple[int, Dim]] = {}
    for d, ((first, past), (start, stop)) in enumerate(zip(have, box, strict=True)):
        guarded = d == 0 and id(b) in em.guarded
        if guarded or (start, stop) != (first, past) or not isinstance(b.type.dims[d], int):
            spans[d] = (start - first, stop - start)
    return em.w.spans(b, spans)


def _send(em: Emitter, piece: Piece, have: Box, want: Box, x: Buffer, y: Buffer) -> None:
    w = em.w
    if piece.source == piece.to:
        with w.when(Cmp("==", ME, piece.to)):
            w.copy(_part(em, x, have, piece.box), _part(em, y, want, piece.box))
        return
    with w.when(Cmp("==", ME, piece.source)):
        w.comm("send", None, _part(em, x, have, piece.box), to=piece.to)
    with w.when(Cmp("==", ME, piece.to)):
        w.comm("recv", _part(em, y, want, piece.box), None, source=piece.source)


def _broadcast(em: Emitter, old: Sharding, new: Sharding, out: TensorView, x: Buffer, y: Buffer) -> None:
    """From the first sender to all receivers that have nothing yet."""
    w = em.w
    whole: Box = tuple((0, int(n)) for n in out.known.dims)
    already = [r for r in new.mesh.layout if r in old.mesh.layout]
    root = next((r for r in old.mesh.layout if r in already), old.mesh.layout[0])
    others = [r for r in new.mesh.layout if r not in old.mesh.layout]
    team = (root, *others)
    target = y
    if root not in already:  # it is no receiver, so it needs a buffer to send from
        dims = (times(whole[0][1], indicator(team, em.num_ranks)), *out.known.dims[1:]) if whole else ()
        target = w.alloc(identifier(out.name), TensorType(out.dtype, dims))
        em.guarded[id(target)] = whole[0][1] if whole else 0
    with w.when(member(sorted({root, *already}))):
        with w.when(Cmp("==", ME, root)):
            w.copy(_part(em, x, whole, whole), _part(em, target, whole, whole))
        if rest := [r for r in already if r != root]:
            with w.when(member(rest)):
                w.copy(_part(em, x, whole, whole), _part(em, y, whole, whole))
    with w.when(member(team)):
        b = _part(em, target, whole, whole)
        w.comm("broadcast", b, b, source=0, team=team)
    if target is not y:
        with w.when(member(others)):
            w.copy(_part(em, target, whole, whole), _part(em, y, whole, whole))


def _reduce(em: Emitter, source: TensorView, out: TensorView, x: Buffer, y: Buffer) -> None:
    """To each receiver that has a term, over the senders; to others by way of the first sender."""
    old, new = source.sharding, out.sharding
    assert old is not None and new is not None
    (p,) = old.placements
    assert isinstance(p, Partial)
    w, team = em.w, old.mesh.layout
    whole: Box = tuple((0, int(n)) for n in out.known.dims)
    inside = [r for r in new.mesh.layout if r in team]
    others = [r for r in new.mesh.layout if r not in team]
    with w.when(member(team)):
        total = w.alloc(identifier(out.name), TensorType(out.dtype, out.known.dims))
        for root in inside or [team[0]]:
            w.comm("reduce", total, _part(em, x, whole, whole), op=p.op, to=team.index(root), team=team)
        if inside:
            with w.when(member(inside)):
                w.copy(total, _part(em, y, whole, whole))
        for r in others:
            with w.when(Cmp("==", ME, (inside or [team[0]])[0])):
                w.comm("send", None, total, to=r)
    for r in others:
        with w.when(Cmp("==", ME, r)):
            w.comm("recv", _part(em, y, whole, whole), None, source=(inside or [team[0]])[0])
