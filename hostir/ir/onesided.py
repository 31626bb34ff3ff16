"""Ranks in each other's memory: what a rank writes or reads on a peer must be ordered with what the peer does there.

One vector clock spans the lanes of all ranks. A message carries what its sender had done when it sent; a wait learns what had been
done before the signals that may have ended it; a barrier makes everybody know everything. On that order, races are found as on one rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from hostir.ir.cohort import Cohort, Move, Use
from hostir.ir.diagnostics import Diagnostic, Findings, Texts
from hostir.ir.lifetimes import Remote
from hostir.ir.meet import After
from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Event, Free, Program, Sync, View
from hostir.ir.race import Order, Uses
from hostir.ir.ranks import End
from hostir.ir.regions import Layout, Written
from hostir.ir.teams import Ints
from hostir.ir.walk import Lane

Place: TypeAlias = tuple[int, Buffer, int]  # world rank, buffer, its how-manieth life


def _place(c: Cohort, u: Use) -> Place:
    return (c.ranks[0] if u.peer is None else u.peer, u.root.buffer, c.copies.get(u.root, 0))


def _data(m: Move) -> Sequence[Use]:
    """The uses of a move that are not of flags: signals and waits order, they do not race."""
    op = m.step.op
    if isinstance(op, Comm) and op.kind in ("signal", "wait"):
        return ()
    if isinstance(op, Call) and op.awaits is not None:
        num = sum(isinstance(a, Buffer) for a in op.args)
        return (*m.uses[:num], *m.uses[num + 1 :])
    return () if isinstance(op, Alloc) and op.init is None else m.uses


def _racing(m: Move) -> Sequence[Use]:
    """What may race. Signals and waits do not with each other, but with a statement that fills or overwrites the flag."""
    op = m.step.op
    if isinstance(op, Comm) and op.kind in ("signal", "wait"):
        return [u._replace(write=False) for u in m.uses]
    return () if isinstance(op, Alloc) and op.init is None else m.uses


def remote_writes(cohorts: Sequence[Cohort]) -> Remote:
    """What each rank's buffers get from peers in the whole run."""
    found: Remote = {}
    for c in cohorts:
        for m in c.moves:
            for u in _data(m):
                if u.write and u.peer is not None and u.peer != c.ranks[0]:
                    rank, buffer, life = _place(c, u)
                    found.setdefault((buffer, life, rank), []).append(u.layout)
    return found


# --------------------------------------------------------------------------------------------------------------- one clock for all


@dataclass(slots=True, eq=False)
class _Rank:
    """How far one rank's moves have been entered into the common clock."""

    cohort: Cohort
    next: int = 0
    events: dict[Event, tuple[int, int, Ints]] = field(default_factory=dict)
    ends: dict[int, After] = field(default_factory=dict)
    began: dict[int, tuple[int, int, Ints]] = field(default_factory=dict)


class _Clock:
    """Enters the moves of all ranks in an order in which they can happen."""

    def __init__(self, p: Program, cohorts: Sequence[Cohort]) -> None:
        self.scheduled = p.scheduled
        self.lanes: dict[Hashable, int] = {}
        self.ranks = {c.ranks[0]: _Rank(c) for c in cohorts}
        for rank, state in self.ranks.items():
            self._lane(rank, ("main", None))
            for m in state.cohort.moves:
                self._lane(rank, m.step.stream)
                if m.step.waits is not None:
                    self._lane(rank, m.step.waits)
        self.count = [0] * len(self.lanes)
        self.known: list[Ints] = [np.zeros(len(self.lanes), np.int64) for _ in self.lanes]
        self.rows: list[Ints] = []
        self._joined: dict[int, tuple[After, Ints]] = {}
        self.entered: list[tuple[int, Move]] = []
        self.at: list[tuple[int, int, int]] = []

    def _lane(self, rank: int, lane: Lane) -> int:
        return self.lanes.setdefault((rank, lane if self.scheduled else "program"), len(self.lanes))

    def replay(self, ends: Sequence[End]) -> None:
        """All that a communication waited for has begun when it ends: enter it, and first what stands before it."""
        for rank, i, after in ends:
            self.ranks[rank].ends[i] = after()
            self._enter(rank, i)
        for rank, state in self.ranks.items():
            self._enter(rank, len(state.cohort.moves))

    def _enter(self, rank: int, last: int) -> None:
        """All moves before ``last``, and ``last`` if what it waits for is known."""
        state = self.ranks[rank]
        while state.next < len(state.cohort.moves) and (state.next < last or state.next in state.ends):
            i = state.next
            m = state.cohort.moves[i]
            if i not in state.ends and _meets(m):
                return
            state.next += 1
            self._move(rank, state, i, m)

    def _begin(self, rank: int, i: int) -> tuple[int, int, Ints]:
        """Lane, clock and knowledge of a communication when it begins."""
        state = self.ranks[rank]
        if i not in state.began:
            self._enter(rank, i)
            lane = self._lane(rank, state.cohort.moves[i].step.stream)
            done = self.count[lane] - (state.cohort.moves[i].step.group is not None)  # a group has counted itself already
            state.began[i] = (lane, done, self.known[lane])
        return state.began[i]

    def _learn(self, row: Ints, after: After) -> Ints:
        """``row`` and what is known after ``after``, which the members of a collective share."""
        if not after:
            return row
        if id(after) not in self._joined:
            heard = [np.minimum.reduce([self._done(rank, i) for rank, i in group]) for group in after]
            self._joined[id(after)] = (after, np.maximum.reduce(heard))
        return np.maximum(row, self._joined[id(after)][1])

    def _done(self, rank: int, i: int) -> Ints:
        """What is over when move ``i`` has told of it: all that began before it and, of a signal, the flag that it wrote."""
        lane, clock, known = self._begin(rank, i)
        op = self.ranks[rank].cohort.moves[i].step.op
        clock += isinstance(op, Comm) and op.kind == "signal"
        known = known.copy()
        known[lane] = max(int(known[lane]), clock)
        return known

    def _move(self, rank: int, state: _Rank, i: int, m: Move) -> None:
        op = m.step.op
        if isinstance(op, View):
            return
        lane = self._lane(rank, ("main", None) if isinstance(op, (Alloc, Free)) else m.step.stream)
        if isinstance(op, Sync):
            self._sync(rank, state, lane, m, op)
            return
        began = self._begin(rank, i) if _meets(m) else (lane, self.count[lane], self.known[lane])
        row = after = self._learn(began[2], state.ends.pop(i, ()))
        if isinstance(op, Comm):
            row = began[2]  # a communication itself may begin before the others are there
        if m.step.group is None:
            self.count[lane] += 1
        self.entered.append((rank, m))
        self.at.append((lane, self.count[lane], len(self.rows)))
        self.rows.append(row)
        self.known[lane] = np.maximum(self.known[lane], after)
        if isinstance(op, (Call, Comm)) and op.event is not None:
            state.events[op.event] = (lane, self.count[lane], self.known[lane])

    def _sync(self, rank: int, state: _Rank, lane: int, m: Move, op: Sync) -> None:
        if isinstance(op.what, Event):
            if op.what not in state.events:
                return
            source, clock, known = state.events[op.what]
        else:
            assert m.step.waits is not None
            source = self._lane(rank, m.step.waits)
            clock, known = self.count[source], self.known[source]
        row = np.maximum(self.known[lane], known)
        row[source] = max(int(row[source]), clock)
        self.known[lane] = row

    def order(self) -> Order:
        at = np.array(self.at or np.zeros((0, 3)), np.int64)
        known = np.array(self.rows or np.zeros((1, max(len(self.lanes), 1))), np.int64)
        lanes: tuple[Lane, ...] = tuple((str(lane), None) for lane in self.lanes)
        return Order(lanes, at[:, 0], at[:, 1], at[:, 2], known)


def _meets(m: Move) -> bool:
    """Whether the meeting of ranks says when this ends."""
    op = m.step.op
    return (isinstance(op, Comm) and op.kind != "copy") or (isinstance(op, Call) and op.awaits is not None)


def find_remote_races(p: Program, cohorts: Sequence[Cohort], ends: Sequence[End], findings: Findings, texts: Texts) -> None:
    """Races of a program whose ranks touch each other's memory, those on one rank included, and reads of symmetric memory that nobody
    has written by then. The ranks agree and do not deadlock: ``ends`` is how their communications end."""
    clock = _Clock(p, cohorts)
    clock.replay(ends)
    order = clock.order()
    places: dict[Place, list[tuple[int, Use]]] = {}
    for i, (rank, m) in enumerate(clock.entered):
        for u in _racing(m):
            if u.layout.numel:
                places.setdefault(_place(clock.ranks[rank].cohort, u), []).append((i, u))
    for (owner, buffer, _), found in places.items():
        if any(u.write for _, u in found) and len({int(order.lane[i]) for i, _ in found}) > 1:
            uses = Uses(found, 1)
            for a, b, _ in uses.unordered(order):
                for k, j in zip(a.tolist(), b.tolist(), strict=True):
                    _report(clock, owner, buffer, uses.found[k], uses.found[j], findings, texts)
    if not len(findings):
        _find_unwritten(p, clock, order, findings, texts)


def _report(clock: _Clock, owner: int, buffer: Buffer, one: tuple[int, Use], other: tuple[int, Use], findings: Findings, texts: Texts) -> None:
    (a, m), (b, n) = clock.entered[one[0]], clock.entered[other[0]]
    places = tuple(
        texts.place(x.step.op, x.at, f"rank {rank} {_verb(x, u)} %{buffer.name} of rank {owner}") for rank, x, u in ((a, m, one[1]), (b, n, other[1]))
    )
    remote = a != b
    cure = "signal and wait between them, or a barrier on both" if remote else "a sync between them"
    findings.add(
        ("race", frozenset({id(m.step.op), id(n.step.op)}), buffer, remote), {a, b},
        lambda: Diagnostic("race", f"nothing orders these two uses of %{buffer.name}", places, cure=cure),
    )  # fmt: skip


def _verb(m: Move, u: Use) -> str:
    return "signals" if isinstance(m.step.op, Comm) and m.step.op.kind == "signal" else "writes" if u.write else "reads"


def _find_unwritten(p: Program, clock: _Clock, order: Order, findings: Findings, texts: Texts) -> None:
    """Reads of symmetric memory that the writes before them do not cover. Without races every write is before a read or after it."""
    places: dict[Place, list[tuple[int, Use]]] = {}
    filled: set[Place] = {(rank, b, 0) for rank in clock.ranks for b in p.params if isinstance(b, Buffer)}
    for i, (rank, m) in enumerate(clock.entered):
        for u in _data(m):
            if u.root.buffer.type.memory == "symmetric" and not isinstance(m.step.op, Free):
                place = _place(clock.ranks[rank].cohort, u)
                places.setdefault(place, []).append((i, u))
                if isinstance(m.step.op, Alloc):
                    filled.add(place)
    for place, found in places.items():
        if place in filled:
            continue
        contents = _Contents([(i, u) for i, u in found if u.write], order)
        for i, u in found:
            if not u.write and u.layout.numel and not contents.covers(i, u.layout):
                rank, m = clock.entered[i]
                name, whose = u.root.buffer.name, "a peer's" if place[0] != rank else "its own"
                what = f"this reads elements of {whose} %{name} that nothing has written by then"
                where = texts.place(m.step.op, m.at, f"rank {rank} reads %{name} of rank {place[0]}")
                diagnostic = Diagnostic("unwritten", what, (where,), cure=f"write all of %{name} there first")
                findings.add(("peer", id(m.step.op), u.root.buffer), {rank}, lambda d=diagnostic: d)  # type: ignore[misc]


class _Contents:
    """What has been written of one buffer when a move begins."""

    def __init__(self, writes: Sequence[tuple[int, Use]], order: Order) -> None:
        self.order = order
        self.at = np.array([i for i, _ in writes], np.int64)
        self.layouts = [u.layout for _, u in writes]
        self._alike: dict[Layout, list[int]] = {}
        self._known: dict[bytes, Written] = {}
        for i, u in writes:
            self._alike.setdefault(u.layout, []).append(i)

    def covers(self, i: int, layout: Layout) -> bool:
        """Most reads are of what one write wrote; only the others look at all that are before them."""
        if any(self.order.before(k, i) for k in self._alike.get(layout, ())):
            return True
        order, at = self.order, self.at
        same = order.lane[at] == order.lane[i]
        done = np.where(same, order.clock[at] < order.clock[i], order.known[order.version[i], order.lane[at]] >= order.clock[at])
        if (written := self._known.get(done.tobytes())) is None:
            written = self._known[done.tobytes()] = Written()
            for one in {self.layouts[k] for k in np.flatnonzero(done)}:
                written.add(one)
        return written.covers(layout)
