"""Communications inside a host loop by which trips get, or finish, the parts of a mesh axis' members.

``before`` the loop they set up what travels, at the beginning of each ``trip`` they say where it is, ``in_loop`` stands where the
communication itself does, and ``after`` the loop they hand over what has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostir.graph.fusion import TensorView
from hostir.graph.sharding import Partial, ceil_div, even, plus, times
from hostir.graph.show import identifier
from hostir.ir.nodes import Buffer, Index, Span
from hostir.passes.expand import accumulator
from hostir.passes.loops import Where, changed_axis
from hostir.passes.plan import Part, part_of
from hostir.passes.sizes import chunk, local_dims
from hostir.passes.tree import Loop, Segment
from hostir.types import Cmp, Dim, Operand, Rank, TensorType, Var, binary, same

if TYPE_CHECKING:
    from hostir.passes.emit import Emitter


@dataclass
class Travelling:
    """One part of a loop. ``buffer`` is where chunks arrive: two shards that take turns (ring), two chunks (direct), or the whole result
    (``whole``: it is kept outside the loop); else this rank's own shard, as ``own`` always is. ``current`` and ``next`` are the chunks of this
    trip and the next one in it; ``op`` is how terms combine."""

    part: Part
    loop: Loop
    source: TensorView
    out: TensorView
    size: Dim
    per: Dim
    most: Dim
    buffer: Buffer
    own: Buffer
    reads: Where
    writes: Where
    whole: bool = False
    op: str = "sum"
    current: Buffer | None = None
    next: Buffer | None = None
    step: Operand = 0
    fused: bool = False


def before(em: Emitter, loop: Loop, p: Part) -> Travelling | None:
    """What stands before the loop for one of its parts."""
    (op,) = p.segment.ops
    (source,) = dict.fromkeys(op.reads())
    out = op.outs[0]
    if isinstance(p.size, int) and p.size == 1:
        return None
    per: Dim = 1
    if not same(loop.axis.trips, p.size):
        assert isinstance(loop.axis.trips, int) and isinstance(p.size, int)
        per = max(loop.axis.trips // p.size, 1)
    most = ceil_div(source.known.dims[p.dim], loop.axis.chunks)
    shard = times(most, per)
    change = changed_axis(op)
    assert change is not None
    nothing = Buffer("none", source.known)
    (reads,), (writes,) = em.inside(p.segment, op)
    t = Travelling(p, loop, source, out, p.size, per, most, nothing, nothing, reads, writes)
    if p.fetch:
        _before_fetch(em, t, shard)
    else:
        assert isinstance(change[1], Partial)
        t.op = change[1].op
        _before_reduce(em, t, shard)
    return t


def _before_fetch(em: Emitter, t: Travelling, shard: Dim) -> None:
    from hostir.passes.emit_moves import padded

    x = em.read(t.source, t.reads)
    d, how = t.part.dim, t.part.segment.how
    short = not even(t.source.known.dims[d], t.loop.axis.chunks)
    t.own = t.buffer = x
    if how == "ring" or (how == "direct" and not short):
        if (whole := _whole_target(em, t)) is not None and not short:
            t.buffer, t.whole = whole, True  # the result is kept in full: chunks arrive where they stay
            em.w.copy(x, em.w.narrow(whole, d, times(Rank(t.part.axis), shard), shard))
            return
    if how != "ring" and short:
        t.own = t.buffer = padded(em, x, {d: shard})
    if how in ("ring", "direct"):
        dims = list(x.type.dims)
        dims[d] = shard if how == "ring" else t.most
        t.buffer = em.w.alloc(identifier(t.out.name), TensorType(x.type.dtype, (2, *dims)), 0 if short else None)
        first = em.w.select(t.buffer, 0)
        if how == "ring":
            em.w.copy(x, em.w.narrow(first, d, 0, x.type.dims[d]))
        else:
            em.w.copy(em.w.narrow(t.own, d, 0, t.most), first)


def _whole_target(em: Emitter, t: Travelling) -> Buffer | None:
    """The buffer of a fetched tensor that is kept outside the loop."""
    if em.homes.home[t.out] != (*em.path, t.loop):
        if t.out not in em.stored:
            em.stored[t.out] = em.allocate(t.out)
        return em.stored[t.out].buffer
    return None


def _before_reduce(em: Emitter, t: Travelling, shard: Dim) -> None:
    d = t.part.dim
    dims = list(em._here(t.out, tuple((i, a) for i, a in t.writes if a in em.index)))
    longest = list(em.dims(t.out, em.path))
    dims[d] = longest[d] = shard
    name = identifier(t.out.name)
    short: dict[int, tuple[Operand, Dim]] = {i: (0, n) for i, n in enumerate(dims) if not same(n, longest[i])}
    if t.part.segment.how == "ring":
        dtype = accumulator(t.out.dtype) if t.op in ("sum", "prod") else t.out.dtype
        from hostir.passes.emit import identity

        whole = em.w.alloc(name, TensorType(dtype, (2, *longest)), identity(t.op, dtype))
        t.buffer = em.w.spans(whole, {i + 1: span for i, span in short.items()})
        t.fused = _fuses(em, t)
        if t.fused:
            em.terms[t.source] = t
    else:
        init = None if even(t.source.known.dims[d], t.loop.axis.chunks) else 0
        t.buffer = em.w.spans(em.w.alloc(name, TensorType(t.out.dtype, tuple(longest)), init), short)


def _fuses(em: Emitter, t: Travelling) -> bool:
    """Whether the unit that makes the term can add it to what travels: it is in this loop, and nobody else reads the term."""
    maker = em.homes.maker.get(t.source)
    alone = em.homes.users.get(t.source) == [t.part.segment] and t.source not in em.homes.results
    return (
        maker is not None and alone and any(item is maker for item in t.loop.body) and not maker.sums and len(list(em.homes.read_outside(maker))) == 1
    )


def trip(em: Emitter, loop: Loop, var: Var, states: list[Travelling | None]) -> None:
    """The chunks that this trip has and the next one gets."""
    from hostir.passes.emit import position

    for t in states:
        if t is None or loop.rotation is None or t.part.segment.how not in ("ring", "direct"):
            continue
        ring = t.part.segment.how == "ring"
        owner, inner, per = position(loop, var)
        t.step = var if same(per, 1) else binary("//", var, per)
        if not t.whole:
            turn = t.step if ring else var
            t.current = _half(em, t, binary("%", turn, 2), inner, ring)
            t.next = _half(em, t, binary("%", binary("+", turn, 1), 2), inner, ring)
            continue
        t.current = _chunk_of(em, t, owner, inner)
        if ring:
            after_owner = binary("%", binary("+", owner, t.size - loop.rotation.step), t.size)
            t.next = _chunk_of(em, t, after_owner, inner)
        else:
            t.next = _chunk_of(em, t, *position(loop, binary("+", var, 1))[:2])


def _chunk_of(em: Emitter, t: Travelling, owner: Operand, inner: Operand) -> Buffer:
    """A chunk of the result that is kept as a whole."""
    return em.w.narrow(t.buffer, t.part.dim, times(plus(times(owner, t.per), inner), t.most), t.most)


def _half(em: Emitter, t: Travelling, which: Operand, inner: Operand, ring: bool) -> Buffer:
    """One of the two shards or chunks that take turns; of a shard, chunk ``inner``."""
    if same(t.per, 1) or not ring:
        return em.w.select(t.buffer, which)
    d = t.part.dim
    start = times(inner, t.most)
    return em.w.view(t.buffer, Index((which, *[None] * d, Span(start, plus(start, t.most)))))


def in_loop(em: Emitter, s: Segment) -> bool:
    """The communication itself. False where it is no part of a loop, so that the ordinary form is used."""
    p = part_of(s, em.loops)
    if p is None:
        return False
    if isinstance(p.size, int) and p.size == 1:
        return False
    state = em.parts[id(s)]
    if p.fetch:
        _fetch(em, state)
    else:
        _reduce(em, state)
    return True


def accumulator_of(em: Emitter, t: Travelling) -> Buffer:
    """What travels, as far as this trip's term goes."""
    assert t.current is not None
    return em.w.narrow(t.current, t.part.dim, 0, _length(em, t)[0])


def _length(em: Emitter, t: Travelling) -> tuple[Dim, bool]:
    c = chunk(t.out if t.part.fetch else t.source, t.part.dim, t.loop.axis, em.index[t.loop.axis])
    return c.size, c.full


def _own(em: Emitter, t: Travelling, inner: Operand) -> Buffer:
    """Chunk ``inner`` of this rank's shard."""
    return em.w.narrow(t.own, t.part.dim, times(inner, t.most), t.most)


def _fetch(em: Emitter, t: Travelling) -> None:
    from hostir.passes.emit import Stored

    d, how = t.part.dim, t.part.segment.how
    if how in ("ring", "direct"):
        assert t.current is not None
        if how == "ring":
            _pass_on(em, t)
        else:
            _prefetch(em, t)
        size, _ = _length(em, t)
        arrived = em.w.narrow(t.current, d, 0, size)
        if em.homes.home[t.out] == em.path:
            em.stored[t.out] = Stored(arrived, em.chunks(t.out, em.path))
        elif not t.whole:
            em.w.copy(arrived, em.target(t.out, t.writes))
        return
    target = em.target(t.out, t.writes)
    y = target if same(target.type.dims[d], t.most) else target.base if target.base is not None and em.homes.home[t.out] == em.path else None
    if y is None:  # short chunks kept outside: through a buffer of full length
        dims = list(target.type.dims)
        dims[d] = t.most
        y = em.w.alloc(identifier(t.out.name), TensorType(target.type.dtype, tuple(dims)))
    if isinstance(t.loop.axis.trips, int) and isinstance(t.size, int) and t.loop.axis.trips < t.size:
        _several(em, t, y, fetch=True)
    else:
        owner, inner = _member(em, t)
        em.w.comm("broadcast", y, _own(em, t, inner), source=owner, team=(t.part.axis,))
    if y is not target and y is not target.base:
        em.w.copy(em.w.narrow(y, d, 0, target.type.dims[d]), target)


def _member(em: Emitter, t: Travelling) -> tuple[Operand, Operand]:
    """Whose chunk this trip's is, and which of that member's."""
    index = em.index[t.loop.axis]
    return (index, 0) if same(t.per, 1) else (binary("//", index, t.per), binary("%", index, t.per))


def _pass_on(em: Emitter, t: Travelling) -> None:
    """The chunk of this trip goes to the neighbour, which has it in its next round."""
    r = t.loop.rotation
    assert r is not None and t.current is not None and t.next is not None
    me = Rank(t.part.axis)
    with em.w.when(Cmp("<", t.step, binary("-", t.size, 1))):
        em.w.comm("permute", t.next, t.current, to=_shift(me, r.step, t.size), source=_shift(me, -r.step, t.size), team=(t.part.axis,))


def _shift(me: Operand, by: Operand, size: Dim) -> Operand:
    if isinstance(by, int) and by < 0:
        return binary("%", binary("-", me, -by), size)
    return binary("%", binary("+", me, by), size)


def _prefetch(em: Emitter, t: Travelling) -> None:
    """The chunk of the next trip comes from its owner; this rank sends its own to whoever needs it then."""
    from hostir.passes.emit import position

    r = t.loop.rotation
    assert r is not None and t.next is not None
    after = binary("+", em.vars[t.loop.axis], 1)
    owner, inner, per = position(t.loop, after)
    step: Operand = after if same(per, 1) else binary("//", after, per)
    to = binary("%", binary("+" if r.step == 1 else "-", Rank(t.part.axis), step), t.size)
    with em.w.when(Cmp("<", em.vars[t.loop.axis], binary("-", t.loop.axis.trips, 1))):
        if same(per, 1):
            em.w.comm("permute", t.next, _own(em, t, inner), to=to, source=owner, team=(t.part.axis,))
        else:
            with em.w.when(Cmp(">", step, 0)):
                em.w.comm("permute", t.next, _own(em, t, inner), to=to, source=owner, team=(t.part.axis,))
            if not t.whole:
                with em.w.otherwise():
                    em.w.copy(_own(em, t, inner), t.next)


def _several(em: Emitter, t: Travelling, y: Buffer, *, fetch: bool) -> None:
    """A chunk that holds several members' shards: one communication for each of them."""
    assert isinstance(t.loop.axis.trips, int) and isinstance(t.size, int)
    many, d = t.size // t.loop.axis.trips, t.part.dim
    whole = t.source.known.dims[d] if fetch else t.out.known.dims[d]
    shard = ceil_div(whole, t.size)
    with em.w.group():
        for q in range(many):
            member = plus(times(em.index[t.loop.axis], many), q)
            piece = em.w.narrow(y, d, times(q, shard), shard)
            if fetch:
                em.w.comm("broadcast", piece, t.buffer, source=member, team=(t.part.axis,))
            else:
                em.w.comm("reduce", t.buffer, piece, to=member, op=t.op, team=(t.part.axis,))


def _reduce(em: Emitter, t: Travelling) -> None:
    d = t.part.dim
    if t.part.segment.how == "ring":
        assert t.current is not None
        if not t.fused:
            term = em.read(t.source, t.reads)
            em.add_into(term, em.w.narrow(t.current, d, 0, term.type.dims[d]), t.op)
        _pass_on(em, t)
        return
    term = em.read(t.source, t.reads)
    if isinstance(t.loop.axis.trips, int) and isinstance(t.size, int) and t.loop.axis.trips < t.size:
        _several(em, t, term, fetch=False)
        return
    owner, inner = _member(em, t)
    if not same(term.type.dims[d], t.most):
        from hostir.passes.emit_moves import padded

        term = padded(em, term, {d: t.most})
    em.w.comm("reduce", em.w.narrow(t.buffer, d, times(inner, t.most), t.most), term, op=t.op, to=owner, team=(t.part.axis,))


def after(em: Emitter, t: Travelling | None) -> None:
    """What the loop has put together becomes the result."""
    from hostir.passes.emit import Stored

    if t is None or t.part.fetch:
        return
    em.terms.pop(t.source, None)
    result = t.buffer
    d = t.part.dim
    mine = local_dims(t.out)[d]
    if t.part.segment.how == "ring":
        r = t.loop.rotation
        assert r is not None
        last = binary("%", binary("-", t.size, 1), 2)
        result = em.w.select(t.buffer, last)
        if r.offset == 0:  # the last stop is the neighbour of the owner
            me = Rank(t.part.axis)
            other = em.w.select(t.buffer, binary("%", t.size, 2))
            em.w.comm("permute", other, result, to=_shift(me, r.step, t.size), source=_shift(me, -r.step, t.size), team=(t.part.axis,))
            result = other
    result = em.w.narrow(result, d, 0, mine)
    if t.out in em.stored or t.out in em.homes.results or result.type.dtype is not t.out.dtype:
        em.cast(result, em.target(t.out, t.writes))
    else:
        em.stored[t.out] = Stored(result, em.chunks(t.out, em.path))
