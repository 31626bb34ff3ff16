"""Who communicates with whom: the k-th collective of a team on all its members, the k-th message from one rank to another.

Found by counting in program order, without running anything. What does not fit together (other kinds, roots, shapes) is ``Malformed``;
what nobody meets never ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hostir.ir.nodes import Comm
from tests.support.actions import NEVER, Malformed, Part
from tests.support.machine import moved

if TYPE_CHECKING:
    from tests.support.interleave import World


def meet(world: World) -> None:
    """Match communications by number: the k-th collective of a team, the k-th message from a to b, in program order."""
    slots: dict[tuple[Any, ...], dict[int, Part]] = {}
    for rank, parts in world.parts.items():
        count: dict[tuple[Any, ...], int] = {}
        for part in parts:
            c, team = part.step.op, part.step.team
            assert isinstance(c, Comm)
            if rank not in team:
                raise Malformed(f"rank {rank} is outside {team}")
            if c.kind in ("send", "recv"):
                ends = (rank, part.step.peer) if c.kind == "send" else (part.step.peer, rank)
                key: tuple[Any, ...] = ("message", team, *ends)
                mine = c.kind
            else:
                key, mine = ("collective", team), ""
            number = count.get((*key, mine), 0)
            count[*key, mine] = number + 1
            slot = slots.setdefault((*key, number), {})
            slot[(0 if c.kind == "send" else 1) if mine else rank] = part
    for (kind, team, *_), slot in slots.items():
        if kind == "message":
            _message(world, slot.get(0), slot.get(1))
        else:
            _collective(world, team, slot)


def _message(world: World, send: Part | None, recv: Part | None) -> None:
    if send is None or recv is None:
        lost = send or recv
        assert lost is not None
        lost.write.num_before += NEVER
        return
    if send.ins[0].shape != recv.outs[0].shape or send.step.op.ins[0].type.dtype != recv.step.op.outs[0].type.dtype:
        raise Malformed("a message of another type")
    recv.write.after(send.read)
    recv.write.run = lambda: world.into(recv.write, recv.outs[0], send.data[0])
    if not world.loose and send.step.peer != send.begin.rank:
        send.write.after(recv.begin)


def _collective(world: World, team: tuple[int, ...], slot: dict[int, Part]) -> None:
    missing = [r for r in team if r not in slot]
    parts = [slot[r] for r in team if r in slot]
    kinds = {(q.step.op.kind, q.step.op.op, q.step.op.dim, q.step.op.split, q.step.op.cat) for q in parts}  # type: ignore[union-attr]
    if len(kinds) > 1:
        raise Malformed(f"{kinds} meet")
    for q in parts:
        q.write.num_before += NEVER if missing else 0
    if missing:
        return
    _agreed(parts)
    for at, q in enumerate(parts):
        sources = _sources(parts, at)
        q.write.after(*(parts[i].read for i in sources if i != at))
        if not world.loose or q.step.op.kind == "barrier":  # type: ignore[union-attr]
            q.write.after(*(other.begin for other in parts if other is not q))
        q.write.run = _mover(world, parts, at)


def _mover(world: World, parts: list[Part], at: int) -> Callable[[], None] | None:
    q = parts[at]
    if not q.step.writes:
        return None
    move, out = moved(world.machine, [x.step for x in parts], at), q.outs[0]
    rows = q.step.counts is not None

    def run() -> None:
        x = move([x.data for x in parts])
        world.into(q.write, out[: len(x)] if rows else out, x if rows else x.reshape(out.shape))

    return run


def _agreed(parts: Sequence[Part]) -> None:
    """Everyone has the same root, knows from whom it receives, counts the rows that come."""
    steps = [q.step for q in parts]
    kind = steps[0].op.kind  # type: ignore[union-attr]
    if kind == "permute":
        if any(steps[s.to or 0].source != at for at, s in enumerate(steps)):
            raise Malformed("a permute that does not mirror")
        if any(q.outs[0].shape != parts[q.step.source or 0].ins[0].shape for q in parts):
            raise Malformed("a permute of other shapes")
    elif len({(s.to, s.source) for s in steps}) > 1:
        raise Malformed("several roots")
    elif kind == "alltoallv":
        counts = [s.counts for s in steps]
        if None in counts or any(a[0][j] != b[1][i] for i, a in enumerate(counts) for j, b in enumerate(counts)):  # type: ignore[index]
            raise Malformed("counts that do not match")
        if any(sum(n) > len(x) for s, q in zip(steps, parts, strict=True) for n, x in zip(s.counts or (), (q.ins[0], q.outs[0]), strict=True)):
            raise Malformed("more rows than there are")
    types = {(s.op.ins[0].type.dtype.name, s.op.outs[0].type.dtype.name) for s in steps if s.op.ins}  # type: ignore[union-attr]
    if len(types) > 1:
        raise Malformed("several dtypes")


def _sources(parts: Sequence[Part], at: int) -> Sequence[int]:
    """The members of a collective whose data member ``at`` gets."""
    step = parts[at].step
    assert isinstance(step.op, Comm)
    match step.op.kind:
        case "broadcast" | "scatter" | "permute":
            return [step.source or 0]
        case "reduce" | "gather":
            return range(len(parts)) if step.to == at else []
        case _:
            return range(len(parts))
