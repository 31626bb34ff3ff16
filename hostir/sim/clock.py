"""A discrete-event clock: when would every statement of every rank begin and end?

Streams are lanes of a rank, and issuing costs nothing: all that holds a statement back is the one before it on its stream, a sync, and
for a communication the others. Messages and collectives begin when everybody is there, as in ``hostir.ir.meet``. There is one link
for each ordered pair of ranks; what shares a link goes one after another. A message takes the link from its sender to its receiver; a
collective goes round its team, so it takes the links between neighbours. An unscheduled program runs in order, all on main.

With ``unit_cost`` every call and every communication takes 1 (``copy`` and ``barrier`` too), while views, allocations, syncs, signals
and waits take nothing. A permute sends and receives at once, so it takes 1 in all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from hostir.errors import VerifyError
from hostir.ir.cohort import Cohort, Move, cohorts
from hostir.ir.diagnostics import Texts, show_ranks
from hostir.ir.meet import After, Meeting, Observer, Part, Player, Slot
from hostir.ir.nodes import Buffer, Call, Comm, Event, Group, Program, Sync
from hostir.ir.ranks import agree_at_once
from hostir.ir.teams import Teams
from hostir.ir.walk import Lane, resolve_mesh
from hostir.mesh import Mesh

Cost: TypeAlias = Callable[[Move], float]


def unit_cost(m: Move) -> float:
    """1 for a call or communication, 0 for signals and waits."""
    op = m.step.op
    return 0.0 if isinstance(op, Comm) and op.kind in ("signal", "wait") else 1.0


@dataclass(frozen=True)
class BytesCost:
    """Bytes over a rate: calls and local copies over ``memory``, communications over ``link``, each after ``latency``.

    A collective moves the bytes of its ring algorithm: each member sends (n - 1) / n of the whole, an allreduce twice that.
    """

    memory: float = 1.0
    link: float = 1.0
    latency: float = 0.0

    def __call__(self, m: Move) -> float:
        op = m.step.op
        if isinstance(op, Call) or (isinstance(op, Comm) and op.kind == "copy"):
            return self.latency + sum(_bytes(u.root.buffer, u.layout.sizes) for u in m.uses) / self.memory
        assert isinstance(op, Comm)
        buffers = [*op.ins, *op.outs]
        if op.kind in ("signal", "wait", "barrier"):
            return self.latency
        n = len(m.step.team)
        most = max(_bytes(b, sizes) for b, sizes in zip(buffers, m.sizes, strict=True))
        share = {"permute": 1.0, "send": 1.0, "recv": 1.0, "allreduce": 2 * (n - 1) / n}.get(op.kind, (n - 1) / n)
        return self.latency + most * share / self.link


def _bytes(b: Buffer, sizes: tuple[int, ...]) -> float:
    return float(math.prod(sizes) * b.type.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Row:
    """One statement of one rank in time. ``kind`` is call, comm, copy (within one memory) or flag (signal, wait)."""

    rank: int
    lane: Lane
    start: float
    end: float
    text: str
    indices: Mapping[str, int]
    kind: str


@dataclass(frozen=True)
class Timeline:
    """What a simulation found. ``paths`` holds the rows of one rank of each group of ranks that run alike."""

    makespan: float
    paths: tuple[tuple[tuple[int, ...], tuple[Row, ...]], ...]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all ranks, by rank and start."""
        found = [(rank, row) for ranks, rows in self.paths for rank in ranks for row in rows]
        found.sort(key=lambda item: (item[0], item[1].start, item[1].end))
        return tuple(Row(rank, r.lane, r.start, r.end, r.text, r.indices, r.kind) for rank, r in found)

    @cached_property
    def exposed_by_rank(self) -> dict[int, float]:
        """On each rank, the time in which a communication runs and no call does. Copies within one memory do not count."""
        return {rank: exposed for ranks, rows in self.paths for exposed in [_exposed(rows)] for rank in ranks}

    @property
    def exposed_comm(self) -> float:
        """Of the worst rank."""
        return max(self.exposed_by_rank.values(), default=0.0)

    @property
    def exposed_comm_mean(self) -> float:
        found = self.exposed_by_rank
        return sum(found.values()) / len(found) if found else 0.0


def _exposed(rows: Sequence[Row]) -> float:
    calls = [(r.start, r.end) for r in rows if r.kind == "call"]
    comms = [(r.start, r.end) for r in rows if r.kind == "comm"]
    return _covered(calls + comms) - _covered(calls)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total


# ----------------------------------------------------------------------------------------------------------------------- tasks


@dataclass(slots=True, eq=False)
class _Task:
    """Something that takes ``cost``. It begins when all that it comes after (``first``: one of them) have ended and its links are free."""

    cost: float = 0.0
    links: tuple[Hashable, ...] = ()
    first: bool = False
    missing: int = 0
    start: float = 0.0
    end: float = 0.0
    next: list[_Task] = field(default_factory=list)

    def after(self, *before: _Task) -> None:
        for b in before:
            b.next.append(self)
        self.missing += len(before)


@dataclass(slots=True, eq=False)
class _Shown:
    """A move of a rank: its stream comes to it (``begin``), its ``work`` runs, it has ended."""

    move: Move
    begin: _Task
    end: _Task
    work: list[_Task] = field(default_factory=list)


def _run(tasks: Sequence[_Task]) -> None:
    """Begin tasks in the order in which they are ready; what shares a link goes one after another."""
    number = {id(t): i for i, t in enumerate(tasks)}
    free: dict[Hashable, float] = {}
    queue = [(0.0, i) for i, t in enumerate(tasks) if not t.missing]
    while queue:
        ready, i = heapq.heappop(queue)
        t = tasks[i]
        t.start = max([ready, *(free.get(link, 0.0) for link in t.links)])
        t.end = t.start + t.cost
        for link in t.links:
            free[link] = t.end
        for n in t.next:
            if n.first and n.missing <= 0:
                continue
            n.start = t.end if n.first else max(n.start, t.end)
            n.missing = 0 if n.first else n.missing - 1
            if not n.missing:
                heapq.heappush(queue, (n.start, number[id(n)]))
                n.missing = -1


class _Lanes:
    """The tasks of one rank: streams and syncs."""

    def __init__(self, new: Callable[..., _Task], cost: Cost, scheduled: bool) -> None:
        self.new = new
        self.cost = cost
        self.scheduled = scheduled
        self.shown: dict[int, _Shown] = {}
        self._last: dict[Lane, list[_Task]] = {}
        self._events: dict[Event, _Task] = {}
        self._group: tuple[_Task, _Task] | None = None

    def add(self, i: int, m: Move) -> None:
        op = m.step.op
        lane: Lane = m.step.stream if self.scheduled else ("main", None)
        if isinstance(op, Sync):
            self._sync(lane, m, op)
        elif isinstance(op, Group):
            begin, end = self.new(), self.new()
            begin.after(*self._last.get(lane, ()))
            end.after(begin)
            self._group, self._last[lane] = (begin, end), [end]
        elif isinstance(op, (Call, Comm)):
            if m.step.group is None:
                begin, end = self.new(), self.new()
                begin.after(*self._last.get(lane, ()))
                end.after(begin)
                self._last[lane] = [end]
            else:
                assert self._group is not None
                begin, end = self._group[0], self.new()
                end.after(begin)
                self._group[1].after(end)
            self.shown[i] = _Shown(m, begin, end)
            if op.event is not None:
                self._events[op.event] = end
            if isinstance(op, Call) or op.kind == "copy":
                self.work(i, self.new(self.cost(m)))

    def work(self, i: int, task: _Task) -> None:
        """``task`` is (part of) what move ``i`` does."""
        shown = self.shown[i]
        task.after(shown.begin)
        shown.end.after(task)
        shown.work.append(task)

    def _sync(self, lane: Lane, m: Move, op: Sync) -> None:
        if not self.scheduled:
            return
        if isinstance(op.what, Event):
            source = [self._events[op.what]] if op.what in self._events else []
        else:
            source = self._last.get(m.step.waits or lane, [])
        if source:
            self._last[lane] = [*self._last.get(lane, []), *(s for s in source if s not in self._last.get(lane, []))]

    def rows(self, rank: int, texts: Texts) -> Iterable[Row]:
        for s in self.shown.values():
            op = s.move.step.op
            start = min((t.start for t in s.work), default=s.end.end)
            indices = {texts.var(v): i for v, i in zip(texts.loops(op), s.move.at, strict=True)}
            lane: Lane = s.move.step.stream if self.scheduled else ("main", None)
            yield Row(rank, lane, start, s.end.end, texts.line(op), indices, _kind(s.move))


def _kind(m: Move) -> str:
    op = m.step.op
    if isinstance(op, Call):
        return "call"
    assert isinstance(op, Comm)
    if op.kind == "copy":
        local = all(u.peer is None and u.root.buffer.type.memory != "host" for u in m.uses)
        return "copy" if local else "comm"
    return "flag" if op.kind in ("signal", "wait") else "comm"


# ----------------------------------------------------------------------------------------------------------------- all the ranks


class _World(Observer):
    """Every rank has its lanes; what meets becomes one task that all of its members come before and after."""

    def __init__(self, p: Program, found: Sequence[Cohort], cost: Cost) -> None:
        self.tasks: list[_Task] = []
        self.cost = cost
        self.lanes: dict[int, _Lanes] = {}
        for c in found:
            for rank in c.ranks:
                lanes = self.lanes[rank] = _Lanes(self.new, cost, p.scheduled)
                for i, m in enumerate(c.moves):
                    lanes.add(i, m)

    def new(self, cost: float = 0.0, links: tuple[Hashable, ...] = (), first: bool = False) -> _Task:
        task = _Task(cost, links, first)
        self.tasks.append(task)
        return task

    def _message(self, one: tuple[int, Part], other: tuple[int, Part]) -> None:
        (a, send), (b, recv) = one, other
        task = self.new(max(self.cost(send.move), self.cost(recv.move)), ((a, b),) if a != b else ())
        self.lanes[a].work(send.index, task)
        if one != other:
            self.lanes[b].work(recv.index, task)

    def gathered(self, slot: Slot, players: dict[int, Player]) -> None:
        parts, team = slot.parts, slot.team
        if parts[team[0]].kind == "permute":
            for r in team:
                to = team[players[r].mine(parts[r].move.to) or 0]
                self._message((r, parts[r]), (to, parts[to]))
            return
        ring = tuple(zip(team, (*team[1:], team[0]), strict=True)) if len(team) > 1 else ()
        task = self.new(max(self.cost(part.move) for part in parts.values()), ring)
        for r in team:
            self.lanes[r].work(parts[r].index, task)

    def paired(self, sender: Player, send: Part, receiver: Player, recv: Part) -> None:
        self._message((sender.rank, send), (receiver.rank, recv))

    def ended(self, player: Player, part: Part, after: Callable[[], After]) -> None:
        """Signals take their cost; a wait ends with the first signal that is enough, a call that waits for flags a share after the last."""
        lanes = self.lanes[player.rank]
        if part.kind == "signal":
            lanes.work(part.index, self.new(self.cost(part.move)))
        elif part.kind == "wait":
            flags = after()
            share = self.cost(part.move) / max(len(flags), 1) if isinstance(part.op, Call) else 0.0
            last = self.new(share)
            last.after(lanes.shown[part.index].begin)
            lanes.shown[part.index].end.after(last)
            for group in flags:
                one = self.new(first=True)
                one.after(*(self.lanes[r].shown[i].end for r, i in group))
                last.after(one)


def _folded(p: Program, c: Cohort, teams: Teams, cost: Cost) -> _Lanes | None:
    """The lanes of one rank that stands for all: all take one path, and every link is shared alike on every rank. None: not so."""
    links: list[tuple[int, Hashable]] = []
    shifts: dict[object, Hashable] = {}
    used = set()
    for i, m in enumerate(c.moves):
        op = m.step.op
        if not isinstance(op, Comm) or op.kind == "copy":
            continue
        used.add(op.team)
        shift: Hashable = 1
        if op.kind == "permute":
            to = m.to.tobytes() if isinstance(m.to, np.ndarray) else m.to
            key = (op.team, to)
            if key not in shifts:
                steps = (np.asarray(m.to) - teams.positions(op.team, c.ranks)) % len(m.step.team)
                shifts[key] = int(steps[0]) if (steps == steps[0]).all() else None
            shift = shifts[key]
        links.append((i, shift))
    if len(used) > 1 or None in [shift for _, shift in links] or not agree_at_once(c, teams):
        return None
    tasks: list[_Task] = []

    def new(cost: float = 0.0, links: tuple[Hashable, ...] = (), first: bool = False) -> _Task:
        tasks.append(_Task(cost, links, first))
        return tasks[-1]

    lanes = _Lanes(new, cost, p.scheduled)
    for i, m in enumerate(c.moves):
        lanes.add(i, m)
    for i, shift in links:
        lanes.work(i, new(cost(c.moves[i]), (shift,) if len(c.moves[i].step.team) > 1 and shift else ()))
    _run(tasks)
    return lanes


def makespan(
    p: Program,
    mesh: Mesh | int | Mapping[str, int] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    cost: Cost = unit_cost,
) -> Timeline:
    """Run ``p`` on all ranks of ``mesh`` in simulated time. VerifyError for a program that cannot end (``verify`` says why)."""
    sized = resolve_mesh(p, mesh)
    teams, texts = Teams(sized), Texts(p)
    found = cohorts(p, sized, dims=dims, scalars=scalars, teams=teams)
    for c in found:
        if c.error is not None:
            raise c.error
    if len(found) == 1 and (lanes := _folded(p, found[0], teams, cost)) is not None:
        rows = tuple(lanes.rows(found[0].ranks[0], texts))
        return Timeline(max((r.end for r in rows), default=0.0), ((found[0].ranks, rows),))
    world = _World(p, found, cost)
    meeting = Meeting(found, teams, world)
    meeting.run()
    if meeting.stuck:
        raise VerifyError(f"{show_ranks([q.rank for q in meeting.stuck])} never end", program=p.name, cure="hir.verify says who waits for whom")
    _run(world.tasks)
    paths = tuple(((rank,), tuple(lanes.rows(rank, texts))) for rank, lanes in sorted(world.lanes.items()))
    return Timeline(max((r.end for _, rows in paths for r in rows), default=0.0), paths)
