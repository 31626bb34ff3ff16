"""Unscheduled to scheduled: the syncs that program order needs, each as early as the streams allow, and no more.

The race check of the dry run says what is missing: two statements on different streams that touch one element, unordered. For the
first such pair, s (stream A) before t (stream B), a sync goes in before the first statement on A that follows s, because a sync
waits for all that A has queued by then: just before t it would also wait for what was queued after s, and serialise. Where B has
work between that place and t, an event on s and a wait just before t hold B back less. Repeat until no pair is left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from hostir.errors import PlanError
from hostir.ir.cohort import Cohort, Move, Use, cohorts, one_sided
from hostir.ir.diagnostics import loops_of
from hostir.ir.nodes import MAIN, Alloc, Buffer, Call, Comm, Event, For, Group, If, Program, Stmt, Stream, Sync, blocks, every, rewrite
from hostir.ir.race import Order, Uses, order_of, uses_by_root
from hostir.ir.regions import dense
from hostir.ir.teams import Ints
from hostir.ir.walk import Instance
from hostir.mesh import Mesh
from hostir.types import Bin, Leaf, Operand, TensorType, Var, binary, dtype_of, leaves, substitute

MAX_SYNCS: Final = 2000

Block: TypeAlias = tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two statements that nothing orders. ``at`` and ``later`` are the values of the loops around each."""

    first: Stmt
    second: Stmt
    at: tuple[int, ...]
    later: tuple[int, ...]


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
    peers, written = one_sided(p), {id(s) for s in every(p.body) if isinstance(s, Sync)}
    if not peers and not any(isinstance(s, (Call, Comm, Group)) and s.stream.name != MAIN.name for s in every(p.body)):
        p = _comms_aside(p)
    p = add_syncs(p.with_(scheduled=True), mesh, dims=dims, scalars=scalars, peers=peers)
    return without_spare(p, mesh, written, dims=dims, scalars=scalars)


def add_syncs(
    p: Program, mesh: Mesh, *, dims: Mapping[str, int] | None = None, scalars: Mapping[str, Any] | None = None, peers: bool = False
) -> Program:
    """A scheduled program with one sync more for each pair that is not ordered yet. With ``peers`` what orders ranks (signals, waits,
    barriers) counts: what came before it in program order stays before it, and what came after it after."""
    for _ in range(MAX_SYNCS):
        pair = first_unordered(p, mesh, dims=dims, scalars=scalars, peers=peers)
        if pair is None:
            return p
        p = order(p, pair)
    raise PlanError(f"more than {MAX_SYNCS} syncs would be needed", program=p.name, cure='compile with overlap="off"')


def first_unordered(
    p: Program, mesh: Mesh, *, dims: Mapping[str, int] | None = None, scalars: Mapping[str, Any] | None = None, peers: bool = False
) -> Pair | None:
    """The conflicting pair without an order whose later statement comes first in program order, on any rank."""
    for c in cohorts(p, mesh, dims=dims, scalars=scalars):
        if c.error is not None:
            raise c.error
        clocks = order_of(c.moves)
        best: tuple[int, int] | None = None
        for earlier, later in _unordered(c, _uses(c, peers), clocks):
            k = np.lexsort((-earlier, later))[0]
            here = (int(later[k]), -int(earlier[k]))
            best = here if best is None else min(best, here)
        if best is not None:
            return _pair(c.moves[-best[1]], c.moves[best[0]])
    return None


def _uses(c: Cohort, peers: bool) -> list[Uses]:
    """The uses of every buffer that is written somewhere; with ``peers`` also those of what ranks rely on."""
    roots = [*uses_by_root(c).values(), *([_meetings(c)] if peers else [])]
    return [Uses(found, len(c.ranks)) for found in roots if any(u.write for _, u in found)]


def _unordered(c: Cohort, roots: Iterable[Uses], clocks: Order) -> Iterator[tuple[Ints, Ints]]:
    """Pairs of moves (earlier, later) that need an order and have none."""
    for uses in roots:
        if len(np.unique(clocks.lane[uses.move])) == 1:
            continue
        for a, b, _ in uses.unordered(clocks):
            earlier, later = uses.move[a], uses.move[b]
            if uses.found[0][1].root is _MEETING:
                kept = [_ordered_across(c.moves[i], c.moves[j]) for i, j in zip(earlier, later, strict=True)]
                earlier, later = earlier[kept], later[kept]
            if len(earlier):
                yield earlier, later


def without_spare(
    p: Program, mesh: Mesh, written: Collection[int], *, dims: Mapping[str, int] | None = None, scalars: Mapping[str, Any] | None = None
) -> Program:
    """``p`` without the syncs that later ones have made superfluous; those in ``written`` (by id) are the author's and stay."""
    peers = one_sided(p)
    found = [(c, _uses(c, peers)) for c in cohorts(p, mesh, dims=dims, scalars=scalars)]
    gone: set[int] = set()
    for s in [s for s in every(p.body) if isinstance(s, Sync) and id(s) not in written]:
        gone.add(id(s))
        if any(next(_unordered(c, uses, order_of(c.moves, gone)), None) is not None for c, uses in found):
            gone.remove(id(s))

    def go(body: Block) -> Block:
        out = []
        for s in body:
            new = _with_blocks(s, [go(inner) for inner in blocks(s)])
            if id(s) not in gone and (not isinstance(new, For) or new.body or new is s):
                out.append(new)
        return tuple(out)

    return p.with_(body=go(p.body)) if gone else p


def _pair(a: Move, b: Move) -> Pair:
    def whole(m: Move) -> Stmt:
        return m.step.group if m.step.group is not None else m.step.op

    return Pair(whole(a), whole(b), a.at, b.at)


# ------------------------------------------------------------------------------------------------------------ order across ranks

_MEETING: Final = Instance(Buffer("peers", TensorType(dtype_of("bool"), (1,))), 0)  # stands for all that peers can touch


def _meetings(c: Cohort) -> list[tuple[int, Use]]:
    """What touches memory that peers address, as reads of one element, and what orders ranks, as writes of it."""
    layout = dense((1,))
    return [
        (i, Use(_MEETING, layout, write=_releases(m) or _acquires(m)))
        for i, m in enumerate(c.moves) if _releases(m) or _acquires(m) or _touches_peers(m)
    ]  # fmt: skip


def _ordered_across(a: Move, b: Move) -> bool:
    """Whether ranks rely on ``a`` before ``b``: uses stay before what tells of them, and after what told of the peers'."""
    return (_releases(b) and (_touches_peers(a) or _acquires(a))) or (_acquires(a) and _touches_peers(b))


def _touches_peers(m: Move) -> bool:
    flag = isinstance(m.step.op, Comm) and m.step.op.kind in ("signal", "wait")
    filled = not isinstance(m.step.op, Alloc) or m.step.op.init is not None
    return not flag and filled and any(u.root.buffer.type.memory == "symmetric" for u in m.uses)


def _releases(m: Move) -> bool:
    """Tells other ranks what was done before."""
    return isinstance(m.step.op, Comm) and m.step.op.kind not in ("copy", "wait", "recv")


def _acquires(m: Move) -> bool:
    """Knows what other ranks did before they told."""
    op = m.step.op
    return (isinstance(op, Comm) and op.kind not in ("copy", "signal", "send")) or (isinstance(op, Call) and op.awaits is not None)


def _comms_aside(p: Program) -> Program:
    """Whoever names no stream gets one for communication."""
    aside = Stream("comm")

    def move(s: Stmt) -> list[Stmt]:
        if (isinstance(s, Comm) and s.kind not in ("copy", "signal", "wait")) or isinstance(s, Group):
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


def _path(p: Program, target: Stmt) -> list[tuple[Stmt | None, Block, int]]:
    """The blocks around a statement, outermost first: whose block, the block, the index of the child that leads on."""

    def find(owner: Stmt | None, block: Block) -> list[tuple[Stmt | None, Block, int]] | None:
        for i, s in enumerate(block):
            if s is target:
                return [(owner, block, i)]
            for inner in blocks(s):
                if (rest := find(s, inner)) is not None:
                    return [(owner, block, i), *rest]
        return None

    found = find(None, p.body)
    assert found is not None, "both statements are in the program"
    return found


def _on(s: Stmt, stream: Stream) -> bool:
    """Whether ``s``, or anything in it, runs on a stream of this name. What allocates runs on main, the parts of a group on the group's."""
    if isinstance(s, (Call, Comm, Group)):
        return s.stream.name == stream.name
    if isinstance(s, Alloc):
        return s.init is not None and stream.name == MAIN.name
    return any(_on(x, stream) for inner in blocks(s) for x in inner)


def _stream(s: Stmt) -> Stream:
    return s.stream if isinstance(s, (Call, Comm, Group)) else MAIN


def order(p: Program, pair: Pair) -> Program:
    """``p`` with one more sync, which orders the two statements of ``pair``."""
    path_s, path_t = _path(p, pair.first), _path(p, pair.second)
    loops = loops_of(p)
    common = sum(1 for _ in _shared(path_s, path_t))
    # the loop that carries the dependence, if one does: the outermost common loop whose index differs
    depth, carried = common - 1, None
    for d in range(common):
        owner = path_s[d][0]
        if isinstance(owner, For):
            k = next(k for k, v in enumerate(loops[id(path_s[d][1][0])]) if v is owner.var)
            if pair.at[k] != pair.later[k]:
                depth, carried = d, (owner, pair.later[k] - pair.at[k])
                break
    _, block, i = path_s[depth]
    j = path_t[depth][2]
    a, b = _stream(pair.first), _stream(pair.second)
    if carried is not None:
        return _around(p, carried[0], carried[1], block, i, j, a, b)
    early = next((k for k in range(i + 1, j) if _on(block[k], a)), j)
    waits_long = any(_on(block[k], b) for k in range(early, j))
    if waits_long and isinstance(pair.first, (Call, Comm)) and _is_known(a, set()):
        return _by_event(p, pair.first, block[j] if _is_known(b, _known_in(p, block)) else pair.second, b)
    return _insert(p, block, early, _syncs(p, block, a, b))


def _shared(one: list[tuple[Stmt | None, Block, int]], other: list[tuple[Stmt | None, Block, int]]) -> list[Block]:
    return [x[1] for x, y in zip(one, other, strict=False) if x[1] is y[1]]


def _around(p: Program, loop: For, distance: int, block: Block, i: int, j: int, a: Stream, b: Stream) -> Program:
    """s in child i, t in child j of a later trip of ``loop``."""
    after = next((k for k in range(i + 1, len(block)) if _on(block[k], a)), None)
    if after is not None:  # in the trip of s
        return _insert(p, block, after, _syncs(p, block, a, _shifted(b, loop.var, distance)))
    step = loop.step
    if not isinstance(step, int) or distance == step:  # in the trip of t
        before = j if not isinstance(step, int) else next((k for k in range(j) if _on(block[k], a)), j)
        return _insert(p, block, before, _syncs(p, block, _shifted(a, loop.var, -distance), b))
    before = next((k for k in range(i) if _on(block[k], a)), i)  # in the trip after that of s
    return _insert(p, block, before, _syncs(p, block, _shifted(a, loop.var, -step), _shifted(b, loop.var, distance - step)))


def _shifted(stream: Stream, var: Var, by: int) -> Stream:
    """The stream that the same statement is on when ``var`` is larger by ``by``."""
    if stream.index is None or not by:
        return stream

    def swap(leaf: Leaf) -> Operand:
        return (binary("+", leaf, by) if by > 0 else binary("-", leaf, -by)) if leaf is var else leaf

    return Stream(stream.name, substitute(stream.index, swap))


def _syncs(p: Program, block: Block, a: Stream, b: Stream) -> list[Stmt]:
    """``sync a -> b`` for a place in ``block``; a stream whose index is not known there is joined index by index."""
    known = _known_in(p, block)
    loops: list[tuple[Var, int]] = []

    def reach(stream: Stream) -> Stream:
        if _is_known(stream, known):
            return stream
        assert stream.index is not None
        if isinstance(stream.index, Bin) and stream.index.op == "%" and isinstance(stream.index.right, int):
            k = Var("k")
            loops.append((k, stream.index.right))
            return Stream(stream.name, k)
        raise PlanError(
            f"the streams {stream.name}[…] are joined outside the loop that indexes them", program=p.name,
            cure=f'index them modulo a number: p.stream("{stream.name}", i % 4)',
        )  # fmt: skip

    sync: Stmt = Sync(reach(a), reach(b))
    for k, n in reversed(loops):
        sync = For(k, 0, n, 1, (sync,))
    return [sync]


def _is_known(stream: Stream, known: set[Var]) -> bool:
    """Whether the index of ``stream`` has a value where the loop indices ``known`` have one."""
    return stream.index is None or all(not isinstance(x, Var) or x.role == "scalar" or x in known for x in leaves(stream.index))


def _known_in(p: Program, block: Block) -> set[Var]:
    """Loop indices that have a value in ``block``."""

    def find(body: Block, known: frozenset[Var]) -> frozenset[Var] | None:
        if body is block:
            return known
        for s in body:
            for inner in blocks(s):
                if (hit := find(inner, known | ({s.var} if isinstance(s, For) else frozenset()))) is not None:
                    return hit
        return None

    return set(find(p.body, frozenset()) or ())


def _by_event(p: Program, s: Call | Comm, before: Stmt, b: Stream) -> Program:
    """Name ``s`` and let ``b`` wait for it right before ``before``."""
    event = s.event or Event("e")

    def change(x: Stmt) -> list[Stmt]:
        return [replace(s, event=event)] if x is s else [x]

    marked = _insert(p, *_place(p, before), [Sync(event, b)])
    return marked if s.event is not None else marked.with_(body=rewrite(marked.body, change))


def _place(p: Program, s: Stmt) -> tuple[Block, int]:
    _, block, i = _path(p, s)[-1]
    return block, i


def _insert(p: Program, block: Block, index: int, new: list[Stmt]) -> Program:
    """``p`` with ``new`` before child ``index`` of ``block`` (found by identity)."""

    def go(body: Block) -> Block:
        if body is block:
            return (*body[:index], *new, *body[index:])
        return tuple(_with_blocks(s, [go(inner) for inner in blocks(s)]) for s in body)

    return p.with_(body=go(p.body))


def _with_blocks(s: Stmt, inner: list[Block]) -> Stmt:
    if all(len(x) == len(y) and all(a is b for a, b in zip(x, y, strict=True)) for x, y in zip(blocks(s), inner, strict=True)):
        return s
    if isinstance(s, For):
        return replace(s, body=inner[0])
    if isinstance(s, If):
        return replace(s, then=inner[0], orelse=inner[1])
    assert isinstance(s, Group)
    return replace(s, body=inner[0])  # type: ignore[arg-type]
