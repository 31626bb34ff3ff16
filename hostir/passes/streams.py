"""Unscheduled to scheduled: the syncs that program order needs, each as early as the streams allow, and no more.

The race check of the dry run says what is missing: two statements on different streams that touch one element, unordered. For the
first such pair, s (stream A) before t (stream B), a sync goes in before the first statement on A that follows s, because a sync
waits for all that A has queued by then: just before t it would also wait for what was queued after s, and serialise. Where B has
work between that place and t, an event on s and a wait just before t hold B back less. Repeat until no pair is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hostir.errors import PlanError
from hostir.ir.nodes import MAIN, Call, Comm, Event, For, Group, If, Program, Stmt, Stream, Sync, blocks, every, rewrite
from hostir.ir.race import Race, find_races
from hostir.ir.walk import Lane
from hostir.mesh import Mesh
from hostir.types import Bin, Leaf, Operand, Var, binary, leaves, substitute

Place: TypeAlias = tuple[tuple[Stmt | None, int], ...]  # from the outside in: the statement whose block it is, the index in it

MAX_SYNCS = 2000


def streams(
    p: Program,
    mesh: Mesh,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    overlap: str = "auto",
) -> Program:
    """``p`` with the syncs that its streams need on every rank of ``mesh``; ``overlap="off"`` puts all on main."""
    if p.scheduled:
        return p
    if overlap == "off":
        return _all_on_main(p).with_(scheduled=True)
    if not _names_streams(p):
        p = _comms_aside(p)
    p = p.with_(scheduled=True)
    for _ in range(MAX_SYNCS):
        race = next(_races(p, mesh, dims, scalars), None)
        if race is None:
            return p
        p = order(p, race)
    raise PlanError(f"more than {MAX_SYNCS} syncs would be needed", program=p.name, cure='compile with overlap="off"')


def _races(p: Program, mesh: Mesh, dims: Mapping[str, int] | None, scalars: Mapping[str, Any] | None) -> Iterable[Race]:
    for rank in mesh.layout:
        yield from find_races(p, rank, mesh, dims=dims, scalars=scalars)


def _names_streams(p: Program) -> bool:
    return any(isinstance(s, (Call, Comm, Group)) and s.stream.name != MAIN.name for s in every(p.body))


def _comms_aside(p: Program) -> Program:
    """Whoever names no stream gets one for communication."""
    aside = Stream("comm")

    def move(s: Stmt) -> list[Stmt]:
        if isinstance(s, Comm) and s.kind not in ("copy", "signal", "wait"):
            return [replace(s, stream=aside)]
        if isinstance(s, Group):
            return [replace(s, stream=aside)]
        return [s]

    return p.with_(body=rewrite(p.body, move))


def _all_on_main(p: Program) -> Program:
    def move(s: Stmt) -> list[Stmt]:
        if isinstance(s, Sync):
            return []
        return [replace(s, stream=MAIN)] if isinstance(s, (Call, Comm, Group)) else [s]

    return p.with_(body=rewrite(p.body, move))


# ----------------------------------------------------------------------------------------------------------------- one order


@dataclass(frozen=True, slots=True)
class _Where:
    """A statement's place: the blocks around it, outermost first, each with the index of the child that leads on."""

    steps: tuple[tuple[Stmt | None, tuple[Stmt, ...], int], ...]


def _where(p: Program, target: Stmt) -> _Where:
    def find(owner: Stmt | None, block: tuple[Stmt, ...]) -> tuple[tuple[Stmt | None, tuple[Stmt, ...], int], ...] | None:
        for i, s in enumerate(block):
            if s is target:
                return ((owner, block, i),)
            for inner in blocks(s):
                if (rest := find(s, inner)) is not None:
                    return ((owner, block, i), *rest)
        return None

    found = find(None, p.body)
    assert found is not None, "the statement of a race is in the program"
    return _Where(found)


def _on_lane(s: Stmt, stream: str) -> bool:
    """Whether ``s``, or anything in it, runs on a stream of this name."""
    return any(isinstance(x, (Call, Comm, Group)) and x.stream.name == stream for x in every((s,)))


def order(p: Program, race: Race) -> Program:
    """``p`` with one more sync, which orders the two statements of ``race``."""
    s, t = race.first.op, race.second.op
    a_stream, b_stream = _stream(race.first.group or s), _stream(race.second.group or t)
    where_s, where_t = _where(p, s), _where(p, t)
    common = 0
    for (_, block_s, _), (_, block_t, _) in zip(where_s.steps, where_t.steps, strict=False):
        if block_s is not block_t:
            break
        common += 1
    # the loop that carries the dependence, if one does: the outermost common loop whose index differs
    carried = None
    for depth in range(common):
        owner = where_s.steps[depth][0]
        if isinstance(owner, For) and race.first.indices.get(owner.var.name) != race.second.indices.get(owner.var.name):
            carried = depth
            break
    depth = common - 1 if carried is None else carried
    owner, block, i = where_s.steps[depth]
    j = where_t.steps[depth][2]
    if carried is None:
        return _within(p, race, block, i, j, a_stream, b_stream)
    assert isinstance(owner, For)
    return _around(p, race, owner, block, i, j, a_stream, b_stream)


def _stream(s: Stmt) -> Stream:
    assert isinstance(s, (Call, Comm, Group))
    return s.stream


def _within(p: Program, race: Race, block: tuple[Stmt, ...], i: int, j: int, a: Stream, b: Stream) -> Program:
    """s in child i, t in child j > i of one block, in the same trip of everything around."""
    early = next((k for k in range(i + 1, j) if _on_lane(block[k], a.name)), j)
    if early < j and any(_on_lane(block[k], b.name) for k in range(early, j)) and (named := _name(p, race)) is not None:
        p, event, block = named[0], named[1], _same_block(named[0], block, named[2])
        return _insert(p, block, j, [Sync(event, _at(b, block[j], p))])
    return _insert(p, block, early, _stream_syncs(p, a, b, block, early, race.first.op, 0))


def _around(p: Program, race: Race, loop: For, block: tuple[Stmt, ...], i: int, j: int, a: Stream, b: Stream) -> Program:
    """s in child i, t in child j of a later trip of ``loop``."""
    distance = abs(race.second.indices[loop.var.name] - race.first.indices[loop.var.name])
    step = loop.step if isinstance(loop.step, int) else 1
    after = next((k for k in range(i + 1, len(block)) if _on_lane(block[k], a.name)), None)
    if after is not None:
        return _insert(p, block, after, _stream_syncs(p, a, b, block, after, race.first.op, 0))
    last = j if distance == step else min(i, j) if i <= j else i
    last = j if distance == step else i
    before = next((k for k in range(last) if _on_lane(block[k], a.name)), last)
    return _insert(p, block, before, _stream_syncs(p, a, b, block, before, race.first.op, step, loop.var))


def _name(p: Program, race: Race) -> tuple[Program, Event, dict[int, Stmt]] | None:
    """``p`` with an event on s; None where s cannot carry one."""
    s = race.first.op
    if race.first.group is not None or not isinstance(s, (Call, Comm)) or race.first.stream[1] is not None:
        return None
    if s.event is not None:
        return p, s.event, {}
    event = Event("e")
    named = replace(s, event=event)
    swapped: dict[int, Stmt] = {id(s): named}

    def change(x: Stmt) -> list[Stmt]:
        return [named] if x is s else [x]

    return p.with_(body=rewrite(p.body, change)), event, swapped


def _same_block(p: Program, block: tuple[Stmt, ...], swapped: Mapping[int, Stmt]) -> tuple[Stmt, ...]:
    """The block of ``p`` that ``block`` has become after statements were swapped."""
    leaves_ = {id(x) for s in block for x in every((s,)) if not blocks(x)}
    wanted = {id(swapped[x]) if x in swapped else x for x in leaves_}

    def search(body: tuple[Stmt, ...]) -> tuple[Stmt, ...] | None:
        if len(body) == len(block) and {id(x) for s in body for x in every((s,)) if not blocks(x)} == wanted:
            return body
        for s in body:
            for inner in blocks(s):
                if (hit := search(inner)) is not None:
                    return hit
        return None

    found = search(p.body)
    assert found is not None
    return found


def _insert(p: Program, block: tuple[Stmt, ...], index: int, new: list[Stmt]) -> Program:
    """``p`` with ``new`` before child ``index`` of ``block`` (found by identity)."""

    def go(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        if body is block:
            return (*body[:index], *new, *body[index:])
        return tuple(_with_blocks(s, [go(inner) for inner in blocks(s)]) for s in body)

    return p.with_(body=go(p.body))


def _with_blocks(s: Stmt, inner: list[tuple[Stmt, ...]]) -> Stmt:
    old = blocks(s)
    if all(x is y for x, y in zip(old, inner, strict=True)):
        return s
    if isinstance(s, For):
        return replace(s, body=inner[0])
    if isinstance(s, If):
        return replace(s, then=inner[0], orelse=inner[1])
    assert isinstance(s, Group)
    return replace(s, body=inner[0])  # type: ignore[arg-type]


def _at(stream: Stream, _before: Stmt, _p: Program) -> Stream:
    return stream


def _stream_syncs(
    p: Program, a: Stream, b: Stream, block: tuple[Stmt, ...], index: int, s: Stmt, shift: int, var: Var | None = None
) -> list[Stmt]:
    """``sync a -> b`` at a place; an indexed stream whose loop does not reach there is joined index by index."""
    in_scope = _scope_of(p, block)

    def moved(stream: Stream, by: int) -> Stream:
        if stream.index is None or var is None or not by:
            return stream

        def swap(leaf: Leaf) -> Operand:
            return binary("-", leaf, by) if leaf is var else leaf

        return Stream(stream.name, substitute(stream.index, swap))

    source = moved(a, shift)
    loops: list[tuple[Var, int]] = []

    def reach(stream: Stream) -> Stream:
        if stream.index is None or all(not isinstance(x, Var) or x.role == "scalar" or x in in_scope for x in leaves(stream.index)):
            return stream
        if isinstance(stream.index, Bin) and stream.index.op == "%" and isinstance(stream.index.right, int):
            k = Var("k")
            loops.append((k, stream.index.right))
            return Stream(stream.name, k)
        raise PlanError(
            f"the streams {stream.name}[…] are joined outside the loop that indexes them", program=p.name,
            cure=f"index them modulo a number: {stream.name}[i % 4]",
        )  # fmt: skip

    del index, s
    sync: Stmt = Sync(reach(source), reach(b))
    for k, n in reversed(loops):
        sync = For(k, 0, n, 1, (sync,))
    return [sync]


def _scope_of(p: Program, block: tuple[Stmt, ...]) -> set[Var]:
    """Loop indices that are known in ``block``."""

    def find(body: tuple[Stmt, ...], known: frozenset[Var]) -> frozenset[Var] | None:
        if body is block:
            return known
        for s in body:
            for inner in blocks(s):
                if (hit := find(inner, known | ({s.var} if isinstance(s, For) else frozenset()))) is not None:
                    return hit
        return None

    return set(find(p.body, frozenset()) or ())


__all__ = ["Lane", "order", "streams"]
