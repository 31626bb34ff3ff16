"""Races: what program order orders and streams do not.

A stream is a lane of a vector clock; syncs carry one lane's knowledge to another. Two uses of one element, one of them a write, race
when the later one's lane does not know of the earlier one. The clocks say which pairs are unordered at all (few, in a program that
syncs), and only those are asked whether they overlap. An unscheduled program cannot race: its streams are wishes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hostir.ir.cohort import Cohort, Mask, Move, Use, cohorts
from hostir.ir.diagnostics import Diagnostic, Findings, Place, Texts
from hostir.ir.nodes import Alloc, Call, Comm, Event, Free, Group, Program, Sync
from hostir.ir.regions import Layout, overlap
from hostir.ir.teams import Ints
from hostir.ir.walk import Lane, resolve_mesh
from hostir.mesh import Mesh

_CHUNK: Final = 1 << 20
_MAIN: Final[Lane] = ("main", None)


@dataclass(frozen=True, eq=False)
class Order:
    """Happens-before of one rank's moves. Move i runs on ``lane[i]`` as number ``clock[i]`` and knows ``known[version[i]]`` of every
    lane; -1 marks moves that run nowhere (views, syncs)."""

    lanes: tuple[Lane, ...]
    lane: Ints
    clock: Ints
    version: Ints
    known: Ints

    def before(self, i: int, j: int) -> bool:
        """Whether move ``i`` has ended when move ``j`` begins."""
        if self.lane[i] == self.lane[j]:
            return bool(self.clock[i] < self.clock[j])
        return bool(self.known[self.version[j], self.lane[i]] >= self.clock[i])


class Clocks:
    """Vector clocks, fed with moves in program order."""

    def __init__(self) -> None:
        self.index: dict[Lane, int] = {}
        self.count: list[int] = []
        self.version: list[int] = []
        self.rows: list[list[int]] = []
        self._events: dict[Event, tuple[int, int, int]] = {}

    def lane(self, lane: Lane) -> int:
        if (found := self.index.get(lane)) is None:
            found = self.index[lane] = len(self.count)
            self.count.append(0)
            self.version.append(len(self.rows))
            self.rows.append([])
        return found

    def run(self, m: Move) -> tuple[int, int, int]:
        """Lane, clock and version of a move; -1 where it takes no time. A group's parts share its clock."""
        op = m.step.op
        match op:
            case Sync(what):
                to = self.lane(m.step.stream)
                if isinstance(what, Event):
                    if (seen := self._events.get(what)) is not None:
                        self.learn(to, *seen)
                elif m.step.waits is not None:
                    source = self.lane(m.step.waits)
                    self.learn(to, source, self.count[source], self.version[source])
                return (-1, -1, -1)
            case Alloc() | Free():
                lane = self.lane(_MAIN)
            case Call() | Comm() | Group():
                lane = self.lane(m.step.stream)
            case _:
                return (-1, -1, -1)
        if m.step.group is None:
            self.count[lane] += 1
        at = (lane, self.count[lane], self.version[lane])
        if isinstance(op, (Call, Comm)) and op.event is not None:
            self._events[op.event] = at
        return at

    def learn(self, to: int, lane: int, clock: int, version: int) -> None:
        """``to`` has waited for number ``clock`` of ``lane``, which knew ``version``."""
        if lane == to:
            return
        old, other = self.rows[self.version[to]], self.rows[version]
        row = [max(a, b) for a, b in zip(_padded(old, len(self.count)), _padded(other, len(self.count)), strict=True)]
        row[lane] = max(row[lane], clock)
        if row != old:
            self.version[to] = len(self.rows)
            self.rows.append(row)


def _padded(row: list[int], length: int) -> list[int]:
    return row if len(row) == length else row + [0] * (length - len(row))


def order_of(moves: Sequence[Move], without: Collection[int] = ()) -> Order:
    """Happens-before of the moves of one rank (or cohort): lanes, syncs, events; every stream starts with the program. ``without``: as if
    the syncs with these ids were not there."""
    clocks = Clocks()
    at = np.array([(-1, -1, -1) if id(m.step.op) in without else clocks.run(m) for m in moves] or np.zeros((0, 3)), np.int64)
    num_lanes = len(clocks.count)
    known = np.zeros((max(len(clocks.rows), 1), max(num_lanes, 1)), np.int64)
    for i, row in enumerate(clocks.rows):
        known[i, : len(row)] = row
    return Order(tuple(clocks.index), at[:, 0], at[:, 1], at[:, 2], known)


# ------------------------------------------------------------------------------------------------------- uses of one root buffer


class Uses:
    """Every use of one root buffer by one cohort, as arrays: which move, read or write, and where."""

    def __init__(self, found: Sequence[tuple[int, Use]], num_ranks: int) -> None:
        self.found = found
        self.num_ranks = num_ranks
        self.move = np.array([i for i, _ in found], np.int64)
        self.write = np.array([u.write for _, u in found], np.bool_)
        shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.shape = np.array([shapes.setdefault((u.layout.sizes, u.layout.strides), len(shapes)) for _, u in found], np.int64)
        self._shapes = list(shapes)
        extents = [Layout(0, *s).last for s in self._shapes]
        self._extent = np.array(extents, np.int64)[self.shape]
        self._wide = any(u.offsets is not None or u.only is not None for _, u in found)
        if self._wide:
            self._start = np.array([np.broadcast_to(u.layout.offset if u.offsets is None else u.offsets, (num_ranks,)) for _, u in found])
            self._only = np.array([np.broadcast_to(True if u.only is None else u.only, (num_ranks,)) for _, u in found])
        else:
            self._start = np.array([u.layout.offset for _, u in found], np.int64)

    def meeting(self, a: Ints, b: Ints) -> Iterator[tuple[Ints, Ints, Mask]]:
        """Of the pairs (a[k], b[k]) those that share an element, with the ranks (one row a pair) where they do."""
        start, extent = self._start, self._extent
        delta = start[b] - start[a]
        near = (delta <= _column(extent[a], delta)) & (-delta <= _column(extent[b], delta))
        if self._wide:
            near &= self._only[a] & self._only[b]
        close = near.any(axis=1) if self._wide else near
        a, b, delta, near = a[close], b[close], delta[close], near[close]
        if not len(a):
            return
        hit = np.zeros(delta.shape, np.bool_)
        code = self.shape[a] * len(self._shapes) + self.shape[b]
        for c in np.unique(code):
            rows = code == c
            one, other = (self._shapes[int(k)] for k in divmod(c, len(self._shapes)))
            values, inverse = np.unique(delta[rows], return_inverse=True)
            answers = np.array([overlap(Layout(0, *one), Layout(int(v), *other)) for v in values], np.bool_)
            hit[rows] = answers[inverse].reshape(delta[rows].shape)
        hit &= near
        found = hit.any(axis=1) if self._wide else hit
        if found.any():
            yield a[found], b[found], hit[found] if self._wide else np.broadcast_to(True, (int(found.sum()), self.num_ranks))

    def expand(self, a: Ints, first: Ints, last: Ints, b: Ints) -> Iterator[tuple[Ints, Ints, Mask]]:
        """For each b[k] the pairs with a[first[k] : last[k]], checked for overlap, a chunk at a time."""
        counts = np.maximum(last - first, 0)
        some = np.flatnonzero(counts)
        while len(some):
            total = np.cumsum(counts[some])
            take = max(int(np.searchsorted(total, _CHUNK // self.num_ranks, side="right")), 1)
            part, some = some[:take], some[take:]
            n = counts[part]
            ends = np.cumsum(n)
            inside = np.arange(ends[-1]) - np.repeat(ends - n, n)
            yield from self.meeting(a[np.repeat(first[part], n) + inside], np.repeat(b[part], n))

    def unordered(self, order: Order) -> Iterator[tuple[Ints, Ints, Mask]]:
        """Conflicting pairs, in program order, of which the later does not know of the earlier."""
        lane, clock, version = order.lane[self.move], order.clock[self.move], order.version[self.move]
        for one in np.unique(lane):
            here = lane == one
            for earlier, later in ((self.write, True), (~self.write, self.write)):
                a, b = np.flatnonzero(here & earlier), np.flatnonzero(~here & later)
                if len(a) and len(b):
                    first = np.searchsorted(clock[a], order.known[version[b], one], side="right")
                    yield from self.expand(a, first, np.searchsorted(self.move[a], self.move[b]), b)

    def conflicts(self) -> Iterator[tuple[Ints, Ints, Mask]]:
        """All conflicting pairs of different moves, in program order."""
        for earlier, later in ((self.write, True), (~self.write, self.write)):
            a, b = np.flatnonzero(earlier), np.flatnonzero(np.broadcast_to(later, self.write.shape))
            yield from self.expand(a, np.zeros(len(b), np.int64), np.searchsorted(self.move[a], self.move[b]), b)


def _column(x: Ints, like: Ints) -> Ints:
    return x[:, None] if like.ndim > 1 else x


def uses_by_root(c: Cohort) -> dict[tuple[int, int | None], list[tuple[int, Use]]]:
    """The uses of each root buffer (by serial and peer), with the number of the move; those of no element are left out."""
    found: dict[tuple[int, int | None], list[tuple[int, Use]]] = {}
    for i, m in enumerate(c.moves):
        if isinstance(m.step.op, Alloc) and m.step.op.init is None:
            continue
        for u in m.uses:
            if u.layout.numel:
                found.setdefault((u.root.serial, u.peer), []).append((i, u))
    return found


# ----------------------------------------------------------------------------------------------------------------------- races


def find_races(c: Cohort, order: Order | None, findings: Findings, texts: Texts) -> None:
    """Races of the ranks of one cohort: between streams (``order`` is a scheduled program's), and between parts of one group, which run
    at once in every program."""
    roots = uses_by_root(c)
    runs = _group_runs(c.moves)
    grouped = any(r >= 0 for r in runs)
    for found in roots.values():
        if not any(u.write for _, u in found):
            continue
        if grouped:
            _in_groups(c, found, runs, findings, texts)
        if order is None or len({int(order.lane[i]) for i, _ in found}) == 1:
            continue
        uses = Uses(found, len(c.ranks))
        for a, b, where in uses.unordered(order):
            _report(c, uses, order, a, b, where, findings, texts)


def _report(c: Cohort, uses: Uses, order: Order, a: Ints, b: Ints, where: Mask, findings: Findings, texts: Texts) -> None:
    """One finding for each pair of statements: the pair that comes first in program order."""
    ops = np.array([id(c.moves[i].step.op) for i in uses.move], np.int64)
    _, group = np.unique(np.stack((ops[a], ops[b]), axis=1), axis=0, return_inverse=True)
    group = group.reshape(-1)
    for g in range(int(group.max()) + 1):
        rows = np.flatnonzero(group == g)
        first = rows[np.lexsort((uses.move[a[rows]], uses.move[b[rows]]))[0]]
        (i, u), (j, v) = uses.found[a[first]], uses.found[b[first]]
        ranks = [c.ranks[k] for k in np.flatnonzero(where[rows].any(axis=0))]
        one, other = c.moves[i], c.moves[j]
        key = ("race", id(one.step.op), id(other.step.op), u.root.buffer)

        def make(i: int = i, j: int = j, u: Use = u, v: Use = v) -> Diagnostic:
            lanes = lane_text(order.lanes[int(order.lane[i])]), lane_text(order.lanes[int(order.lane[j])])
            return Diagnostic(
                "race",
                f"nothing orders these two uses of %{u.root.buffer.name} on the streams {lanes[0]} and {lanes[1]}",
                (_place(c.moves[i], u, texts), _place(c.moves[j], v, texts)),
                cure=f"sync {lanes[0]} -> {lanes[1]} between them, or leave out `scheduled` and let the syncs be placed",
            )

        findings.add(key, ranks, make, len(rows))


def _in_groups(c: Cohort, found: Sequence[tuple[int, Use]], runs: Sequence[int], findings: Findings, texts: Texts) -> None:
    together: dict[int, list[tuple[int, Use]]] = {}
    for i, u in found:
        if runs[i] >= 0:
            together.setdefault(runs[i], []).append((i, u))
    for parts in together.values():
        if len(parts) < 2 or not any(u.write for _, u in parts):
            continue
        uses = Uses(parts, len(c.ranks))
        for a, b, where in uses.conflicts():
            (i, u), (j, v) = uses.found[a[0]], uses.found[b[0]]
            key = ("group", id(c.moves[i].step.op), id(c.moves[j].step.op))

            def make(i: int = i, j: int = j, u: Use = u, v: Use = v) -> Diagnostic:
                return Diagnostic(
                    "race", f"two parts of a group touch the same elements of %{u.root.buffer.name}",
                    (_place(c.moves[i], u, texts), _place(c.moves[j], v, texts)), cure="a group's parts run at once: move one of them out",
                )  # fmt: skip

            findings.add(key, [c.ranks[k] for k in np.flatnonzero(where.any(axis=0))], make, len(a))


def _group_runs(moves: Sequence[Move]) -> list[int]:
    """For each move that is part of a group, the number of the move that opened it; -1 for the others."""
    found, opened = [], -1
    for i, m in enumerate(moves):
        if isinstance(m.step.op, Group):
            opened = i
        found.append(opened if m.step.group is not None else -1)
    return found


def _place(m: Move, u: Use, texts: Texts) -> Place:
    return texts.place(m.step.op, m.at, f"{'writes' if u.write else 'reads'} %{u.root.buffer.name}")


def lane_text(lane: Lane) -> str:
    """``comm``, ``s[2]``."""
    return lane[0] if lane[1] is None else f"{lane[0]}[{lane[1]}]"


# ---------------------------------------------------------------------------------------------------------------- public functions


def races(
    p: Program,
    rank: int = 0,
    mesh: Mesh | int | Mapping[str, int] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> tuple[Diagnostic, ...]:
    """The races of one rank. Errors of the dry run (an index outside a buffer) are raised."""
    findings = Findings()
    (c,) = cohorts(p, resolve_mesh(p, mesh), [rank], dims=dims, scalars=scalars)
    if c.error is not None:
        raise c.error
    find_races(c, order_of(c.moves) if p.scheduled else None, findings, Texts(p))
    return findings.all()


def happens_before(
    p: Program,
    rank: int = 0,
    mesh: Mesh | int | Mapping[str, int] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> frozenset[tuple[str, str]]:
    """The conflict order of one rank: (earlier, later) for every two executions that share an element, one writing it, that are ordered.

    An execution is named by its text without stream and event and by its loop indices, so that two schedules of one program can be
    compared: a schedule is right when it has the conflict order of the program in order. Quadratic in the uses of a buffer.
    """
    (c,) = cohorts(p, resolve_mesh(p, mesh), [rank], dims=dims, scalars=scalars)
    if c.error is not None:
        raise c.error
    texts, seen = Texts(p), dict[str, int]()
    labels = []
    for m in c.moves:
        trip = ", ".join(f"%{texts.var(v)} = {i}" for v, i in zip(texts.loops(m.step.op), m.at, strict=True))
        label = texts.bare(m.step.op) + (f" [{trip}]" if trip else "")
        seen[label] = seen.get(label, 0) + 1
        labels.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    order = order_of(c.moves)
    edges = set()
    for found in uses_by_root(c).values():
        uses = Uses(found, 1)
        for a, b, _ in uses.conflicts():
            for i, j in zip(uses.move[a].tolist(), uses.move[b].tolist(), strict=True):
                if not p.scheduled or order.before(i, j):
                    edges.add((labels[i], labels[j]))
    return frozenset(edges)
