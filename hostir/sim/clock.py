"""A discrete-event clock: when would every statement of every rank begin and end?

Streams are lanes of a rank: what holds a statement back is the one before it on its stream, a sync, the time at which the host has
issued it, and for a communication the others. Messages and collectives begin when everybody is there, as in ``hostir.ir.meet``. What
shares a link goes one after another: there is one link for each ordered pair of ranks, unless the costs know of ports; a collective
goes round its team, so it takes the links between neighbours. An unscheduled program runs in order, all on main.

With ``unit_cost`` every call and every communication takes 1 (``copy`` and ``barrier`` too), while views, allocations, syncs, signals
and waits take nothing. A permute sends and receives at once, so it takes 1 in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from hostir.errors import VerifyError
from hostir.ir.cohort import Cohort, Move, cohorts
from hostir.ir.diagnostics import Texts, show_ranks
from hostir.ir.meet import After, Meeting, Observer, Part, Player, Slot
from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Event, Group, Program, Sync
from hostir.ir.ranks import agree_at_once
from hostir.ir.teams import Teams
from hostir.ir.walk import Lane, resolve_mesh
from hostir.mesh import Mesh
from hostir.sim.tasks import Task, critical, run
from hostir.sim.timeline import Row, Timeline

Cost: TypeAlias = Callable[[Move], float]
MAIN_LANE: Lane = ("main", None)


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


@dataclass(frozen=True)
class Costs:
    """All that a machine says of a move.

    ``seconds`` of a move; ``among``: of a communication among these world ranks (sender and receiver, or a team in order). ``wire``: over
    what two ranks talk, where that is a port of each of them, which all its messages share. ``copy_links``: what a local copy of a rank
    takes. ``share``: the part of a device's processors that a move uses. ``issue``: seconds of the host for each statement; ``launch``:
    from there until it can begin. ``fills``: whether initial values cost anything.
    """

    seconds: Cost
    among: Callable[[Move, tuple[int, ...]], float] | None = None
    wire: Callable[[int, int], Hashable] | None = None
    copy_links: Callable[[Move, int], tuple[Hashable, ...]] | None = None
    share: Cost | None = None
    issue: float = 0.0
    launch: float = 0.0
    fills: bool = False

    def of(self, m: Move, ranks: tuple[int, ...]) -> float:
        return self.seconds(m) if self.among is None else self.among(m, ranks)

    def part(self, m: Move) -> float:
        return 0.0 if self.share is None else self.share(m)

    def links(self, a: int, b: int) -> tuple[Hashable, ...]:
        """What a message from ``a`` to ``b`` takes."""
        if a == b:
            return ()
        if self.wire is None:
            return ((a, b),)
        wire = self.wire(a, b)
        return (("out", wire, a), ("in", wire, b))


# ---------------------------------------------------------------------------------------------------------------------- one rank


@dataclass(slots=True, eq=False)
class _Shown:
    """A move of a rank: its stream comes to it (``begin``), its ``work`` runs, it has ended."""

    move: Move
    begin: Task
    end: Task
    work: list[Task] = field(default_factory=list)


class _Lanes:
    """The tasks of one rank: streams and syncs."""

    def __init__(self, rank: int, tasks: list[Task], costs: Costs, scheduled: bool) -> None:
        self.rank = rank
        self.tasks = tasks
        self.costs = costs
        self.scheduled = scheduled
        self.shown: dict[int, _Shown] = {}
        self._last: dict[Lane, list[Task]] = {}
        self._events: dict[Event, Task] = {}
        self._group: tuple[Task, Task] | None = None
        self._issued = 0.0

    def new(self, cost: float = 0.0, links: tuple[Hashable, ...] = (), **more: Any) -> Task:
        task = Task(cost, links, **more)
        self.tasks.append(task)
        return task

    def add(self, i: int, m: Move) -> None:
        op = m.step.op
        lane: Lane = m.step.stream if self.scheduled else MAIN_LANE
        if isinstance(op, Sync):
            self._sync(lane, m, op)
        elif isinstance(op, Group):
            begin, end = self._begin(lane), self.new()
            end.after(begin)
            self._group, self._last[lane] = (begin, end), [end]
        elif isinstance(op, (Call, Comm)) or (isinstance(op, Alloc) and op.init is not None and self.costs.fills):
            if m.step.group is None:
                begin, end = self._begin(lane), self.new()
                end.after(begin)
                self._last[lane] = [end]
            else:
                assert self._group is not None
                begin, end = self._group[0], self.new()
                end.after(begin)
                self._group[1].after(end)
            self.shown[i] = _Shown(m, begin, end)
            if isinstance(op, Alloc):
                self.work(i, self._local(m, elastic=True))
                return
            if op.event is not None:
                self._events[op.event] = end
            if isinstance(op, Call):
                self.work(i, self._local(m, elastic=True))
            elif op.kind == "copy":
                links = () if self.costs.copy_links is None else self.costs.copy_links(m, self.rank)
                self.work(i, self._local(m, links))

    def _local(self, m: Move, links: tuple[Hashable, ...] = (), *, elastic: bool = False) -> Task:
        return self.new(self.costs.of(m, (self.rank,)), links, devices=(self.rank,), share=self.costs.part(m), elastic=elastic)

    def _begin(self, lane: Lane) -> Task:
        """The host issues one more statement, onto ``lane``."""
        self._issued += self.costs.issue
        begin = self.new(start=self._issued + self.costs.launch)
        begin.after(*self._last.get(lane, ()))
        return begin

    def work(self, i: int, task: Task) -> None:
        """``task`` is (part of) what move ``i`` does."""
        shown = self.shown[i]
        task.after(shown.begin)
        shown.end.after(task)
        shown.work.append(task)
        self.owns(i, task)

    def owns(self, i: int, task: Task) -> None:
        """On a critical path ``task`` is shown as move ``i`` of this rank."""
        task.owners.append((self, i))

    def _sync(self, lane: Lane, m: Move, op: Sync) -> None:
        if not self.scheduled:
            return
        self._issued += self.costs.issue
        if isinstance(op.what, Event):
            source = [self._events[op.what]] if op.what in self._events else []
        else:
            source = self._last.get(m.step.waits or lane, [])
        if source:
            self._last[lane] = [*self._last.get(lane, []), *(s for s in source if s not in self._last.get(lane, []))]

    def row(self, i: int, start: float, end: float, texts: Texts) -> Row:
        m = self.shown[i].move
        indices = {texts.var(v): k for v, k in zip(texts.loops(m.step.op), m.at, strict=True)}
        lane: Lane = m.step.stream if self.scheduled else MAIN_LANE
        return Row(self.rank, lane, start, end, texts.line(m.step.op), indices, _kind(m))

    def rows(self, texts: Texts) -> Iterable[Row]:
        for i, s in self.shown.items():
            start = min((t.start for t in s.work), default=s.end.end)
            yield self.row(i, start, s.end.end, texts)


def _kind(m: Move) -> str:
    op = m.step.op
    if isinstance(op, Call):
        return "call"
    if isinstance(op, Alloc):
        return "fill"
    assert isinstance(op, Comm)
    if op.kind == "copy":
        local = all(u.peer is None and u.root.buffer.type.memory != "host" for u in m.uses)
        return "copy" if local else "comm"
    return "flag" if op.kind in ("signal", "wait") else "comm"


def _path(tasks: Sequence[Task], texts: Texts) -> tuple[Row, ...]:
    """The critical path as rows. A task of several ranks is shown on the one from which the path goes on; what nobody owns is the host's."""
    chain = critical(tasks)
    found: list[Row] = []
    rank: int | None = None
    for t in reversed(chain):
        if t.owners and t.end > t.start:
            lanes, i = next(((lanes, i) for lanes, i in t.owners if lanes.rank == rank), t.owners[0])
            rank = lanes.rank
            found.append(lanes.row(i, t.start, t.end, texts))
    if chain and chain[0].start > 0:
        where = next((lanes.rank for t in chain for lanes, _ in t.owners), 0) if rank is None else rank
        found.append(Row(where, ("host", None), 0.0, chain[0].start, "the host issues what comes before", {}, "host"))
    return tuple(reversed(found))


# ----------------------------------------------------------------------------------------------------------------- all the ranks


class _World(Observer):
    """Every rank has its lanes; what meets becomes one task that all of its members come before and after."""

    def __init__(self, p: Program, found: Sequence[Cohort], costs: Costs) -> None:
        self.tasks: list[Task] = []
        self.costs = costs
        self.lanes: dict[int, _Lanes] = {}
        for c in found:
            for rank in c.ranks:
                lanes = self.lanes[rank] = _Lanes(rank, self.tasks, costs, p.scheduled)
                for i, m in enumerate(c.moves):
                    lanes.add(i, m)

    def _task(self, cost: float, links: tuple[Hashable, ...] = (), **more: Any) -> Task:
        self.tasks.append(Task(cost, links, **more))
        return self.tasks[-1]

    def _message(self, one: tuple[int, Part], other: tuple[int, Part], devices: tuple[int, ...]) -> None:
        (a, send), (b, recv) = one, other
        cost = max(self.costs.of(part.move, (a, b)) for part in (send, recv))
        task = self._task(cost, self.costs.links(a, b), devices=devices, share=self.costs.part(send.move))
        self.lanes[a].work(send.index, task)
        if one != other:
            self.lanes[b].work(recv.index, task)

    def gathered(self, slot: Slot, players: dict[int, Player]) -> None:
        parts, team = slot.parts, slot.team
        if parts[team[0]].kind == "permute":
            for r in team:
                to = team[players[r].mine(parts[r].move.to) or 0]
                self._message((r, parts[r]), (to, parts[to]), (r,))  # one kernel sends and receives: it counts where it sends
            return
        ring = [link for a, b in zip(team, (*team[1:], team[0]), strict=True) for link in self.costs.links(a, b)]
        moves = {id(part.move): part.move for part in parts.values()}.values()
        task = self._task(max(self.costs.of(m, team) for m in moves), tuple(ring), devices=team, share=self.costs.part(parts[team[0]].move))
        for r in team:
            self.lanes[r].work(parts[r].index, task)

    def paired(self, sender: Player, send: Part, receiver: Player, recv: Part) -> None:
        a, b = sender.rank, receiver.rank
        self._message((a, send), (b, recv), (a,) if a == b else (a, b))

    def ended(self, player: Player, part: Part, after: Callable[[], After]) -> None:
        """Signals take their cost; a wait ends with the first signal that is enough, a call that waits for flags a share after the last."""
        lanes = self.lanes[player.rank]
        if part.kind == "signal":
            lanes.work(part.index, self._task(self.costs.seconds(part.move)))
        elif part.kind == "wait":
            flags = after()
            share = self.costs.seconds(part.move) / max(len(flags), 1) if isinstance(part.op, Call) else 0.0
            last = self._task(share)
            last.after(lanes.shown[part.index].begin)
            lanes.shown[part.index].end.after(last)
            lanes.owns(part.index, last)
            for group in flags:
                one = self._task(0.0, first=True)
                one.after(*(self.lanes[r].shown[i].end for r, i in group))
                last.after(one)


def _folded(p: Program, c: Cohort, teams: Teams, costs: Costs) -> _Lanes | None:
    """The lanes of one rank that stands for all: all take one path, and every link is shared alike on every rank. None: not so.

    Where ranks reach each other over different wires, a communication takes as long as on the slowest of them.
    """
    links: list[tuple[int, Hashable, tuple[tuple[int, ...], ...]]] = []
    known: dict[object, tuple[Hashable, tuple[tuple[int, ...], ...]]] = {}
    used = set()
    for i, m in enumerate(c.moves):
        op = m.step.op
        if not isinstance(op, Comm) or op.kind == "copy":
            continue
        used.add(op.team)
        to = None if op.kind != "permute" else m.to.tobytes() if isinstance(m.to, np.ndarray) else m.to
        if (op.team, to) not in known:
            known[op.team, to] = _shift(m, c, teams, costs) if op.kind == "permute" else (1, tuple({teams.of(op.team, r) for r in c.ranks}))
        links.append((i, *known[op.team, to]))
    if len(used) > 1 or None in [shift for _, shift, _ in links] or not agree_at_once(c, teams):
        return None
    lanes = _Lanes(c.ranks[0], [], costs, p.scheduled)
    for i, m in enumerate(c.moves):
        lanes.add(i, m)
    for i, shift, among in links:
        m = c.moves[i]
        taken = () if len(m.step.team) == 1 or not shift else (shift,) if costs.wire is None else ("wire",)
        seconds = max(costs.of(m, ranks) for ranks in among)
        lanes.work(i, lanes.new(seconds, taken, devices=(lanes.rank,), share=costs.part(m)))
    run(lanes.tasks)
    return lanes


def _shift(m: Move, c: Cohort, teams: Teams, costs: Costs) -> tuple[Hashable, tuple[tuple[int, ...], ...]]:
    """By how many places all ranks send (None: not alike), and one pair of sender and receiver for each kind of wire."""
    op = m.step.op
    assert isinstance(op, Comm)
    steps = (np.asarray(m.to) - teams.positions(op.team, c.ranks)) % len(m.step.team)
    if not (steps == steps[0]).all():
        return None, ()
    pairs: dict[Hashable, tuple[int, ...]] = {}
    for r in c.ranks:
        team = teams.of(op.team, r)
        to = team[(team.index(r) + int(steps[0])) % len(team)]
        pairs.setdefault(costs.wire(r, to) if costs.wire is not None and r != to else None, (r, to))
    return int(steps[0]), tuple(pairs.values())


def makespan(
    p: Program,
    mesh: Mesh | int | Mapping[str, int] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    cost: Cost | Costs = unit_cost,
    title: str = "",
) -> Timeline:
    """Run ``p`` on all ranks of ``mesh`` in simulated time. VerifyError for a program that cannot end (``verify`` says why)."""
    sized = resolve_mesh(p, mesh)
    teams, texts = Teams(sized), Texts(p)
    costs = cost if isinstance(cost, Costs) else Costs(cost)
    found = cohorts(p, sized, dims=dims, scalars=scalars, teams=teams)
    for c in found:
        if c.error is not None:
            raise c.error
    if len(found) == 1 and (lanes := _folded(p, found[0], teams, costs)) is not None:
        rows = tuple(lanes.rows(texts))
        return Timeline(max((r.end for r in rows), default=0.0), ((found[0].ranks, rows),), _path(lanes.tasks, texts), title)
    world = _World(p, found, costs)
    meeting = Meeting(found, teams, world)
    meeting.run()
    if meeting.stuck:
        raise VerifyError(f"{show_ranks([q.rank for q in meeting.stuck])} never end", program=p.name, cure="hir.verify says who waits for whom")
    run(world.tasks)
    paths = tuple(((rank,), tuple(lanes.rows(texts))) for rank, lanes in sorted(world.lanes.items()))
    return Timeline(max((r.end for _, rows in paths for r in rows), default=0.0), paths, _path(world.tasks, texts), title)
