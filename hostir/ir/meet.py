"""Who meets whom: all ranks run their communications in program order, and each waits until the others are there.

Program order alone must not deadlock: streams are only permission to overlap, and a program that needs two of them to make progress
hangs when it runs in order or when two communicators compete for one device. So every rank posts one communication (or one whole
group) at a time. Send and receive end when both are posted, collectives when the whole team is there, a wait when its flag was set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from hostir.ir.cohort import Cohort, Move, PerRank, Use
from hostir.ir.kinds import COMMS
from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Group
from hostir.ir.regions import runs
from hostir.ir.teams import Teams

Flag: TypeAlias = tuple[int, Buffer, int, int]  # world rank, buffer, its how-manieth life, element
After: TypeAlias = Sequence[Sequence[tuple[int, int]]]  # (rank, move): one of each group has ended


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One communication of one cohort, move number ``index``; or a call that waits for flags."""

    index: int
    move: Move
    op: Comm | Call

    @property
    def kind(self) -> str:
        return self.op.kind if isinstance(self.op, Comm) else "wait"

    @property
    def agreed(self) -> dict[str, object]:
        """What all members of the team must have alike."""
        assert isinstance(self.op, Comm)
        op, num_ins = self.op, len(self.op.ins)
        buffers = op.outs if op.kind in ("broadcast", "scatter") else op.ins
        sizes = self.move.sizes[num_ins:] if op.kind in ("broadcast", "scatter") else self.move.sizes[:num_ins]
        stream = self.move.step.stream
        return {
            "kind": op.kind, "dtype": tuple(b.type.dtype.name for b in buffers), "op": op.op, "dim": (op.dim, op.split, op.cat),
            "sizes": None if op.kind in ("permute", "alltoallv") else sizes, "stream": stream,
        }  # fmt: skip


@dataclass(slots=True, eq=False)
class Player:
    """One rank: the parts of the unit that it has posted and that have not ended are ``open``, with whom each waits for."""

    rank: int
    cohort: Cohort
    place: int
    units: Sequence[Sequence[Part]]
    next: int = 0
    pending: int = 0
    open: dict[int, tuple[Part, Callable[[], Iterable[int]]]] = field(default_factory=dict)
    calls: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.next >= len(self.units)

    def mine(self, x: PerRank | None) -> int | None:
        """This rank's value of something that the cohort may not share."""
        return x if x is None or isinstance(x, int) else int(x[self.place])


@dataclass(slots=True, eq=False)
class Slot:
    """The k-th collective of one team: who is there, with which part."""

    team: tuple[int, ...]
    number: int
    parts: dict[int, Part] = field(default_factory=dict)
    _everyone: After | None = None

    @property
    def everyone(self) -> After:
        """All members' parts; one object for all of them."""
        if self._everyone is None:
            self._everyone = [[(r, part.index)] for r, part in self.parts.items()]
        return self._everyone


class Observer:
    """What a simulation tells: override what matters."""

    def outside(self, player: Player, part: Part, team: tuple[int, ...]) -> None:
        """``player`` executes a communication of a team that it is not in."""

    def gathered(self, slot: Slot, players: dict[int, Player]) -> None:
        """A whole team is there."""

    def paired(self, sender: Player, send: Part, receiver: Player, recv: Part) -> None:
        """A message is delivered."""

    def ended(self, player: Player, part: Part, after: Callable[[], After]) -> None:
        """``part`` has ended; its data or flags came from one move of each group in ``after()``."""


def units_of(c: Cohort) -> list[list[Part]]:
    """What a rank posts at once: single communications and whole groups. Local copies are not among them."""
    units: list[list[Part]] = []
    for i, m in enumerate(c.moves):
        op = m.step.op
        if isinstance(op, Group):
            units.append([])
        elif isinstance(op, Comm) and op.kind != "copy":
            if m.step.group is not None:
                units[-1].append(Part(i, m, op))
            else:
                units.append([Part(i, m, op)])
        elif isinstance(op, Call) and op.awaits is not None:
            units.append([Part(i, m, op)])
    return units


class Meeting:
    """Runs all ranks until no one can go on. ``stuck`` are those that did not reach their end."""

    def __init__(self, cohorts: Sequence[Cohort], teams: Teams, observer: Observer) -> None:
        self.teams = teams
        self.observer = observer
        self.players: dict[int, Player] = {}
        self.initial: dict[tuple[int, Buffer, int], float] = {}  # what fills the flags of a rank's buffer at first
        for c in cohorts:
            units = units_of(c)
            for place, rank in enumerate(c.ranks):
                self.players[rank] = Player(rank, c, place, units)
            self._flags(c)
        self._slots: dict[tuple[tuple[int, ...], int], Slot] = {}
        self._sends: dict[tuple[Any, ...], deque[tuple[Player, Part]]] = {}
        self._recvs: dict[tuple[Any, ...], deque[tuple[Player, Part]]] = {}
        self.signals: dict[Flag, list[tuple[int, int, int]]] = {}  # flag -> (value, rank, move)
        self._waits: list[tuple[Player, Part]] = []
        self._ready: list[Player] = []

    @property
    def stuck(self) -> list[Player]:
        return [q for q in self.players.values() if not q.ended]

    def _flags(self, c: Cohort) -> None:
        for m in c.moves:
            op = m.step.op
            if isinstance(op, Alloc) and op.init is not None and op.out.type.dtype.name in ("i32", "i64"):
                for rank in c.ranks:
                    self.initial[rank, op.out, c.copies[m.uses[0].root]] = float(op.init)

    def run(self) -> None:
        """Waits are looked at when nothing else can go on, so that every signal that may end one is known by then."""
        self._ready = list(reversed(self.players.values()))
        while self._ready:
            self._advance(self._ready.pop())
            if not self._ready:
                self._look_at_flags()

    def _advance(self, q: Player) -> None:
        while not q.ended:
            q.pending = 1
            for part in q.units[q.next]:
                self._post(q, part)
            q.pending -= 1
            if q.pending:
                return
            q.next += 1

    def _hold(self, q: Player, part: Part, missing: Callable[[], Iterable[int]]) -> None:
        q.pending += 1
        q.open[part.index] = (part, missing)

    def _end(self, q: Player, part: Part, after: Callable[[], After] = tuple) -> None:
        self.observer.ended(q, part, after)
        if q.open.pop(part.index, None) is None:
            return
        q.pending -= 1
        if not q.pending:
            q.next += 1
            self._ready.append(q)

    def _post(self, q: Player, part: Part) -> None:
        if part.kind == "wait":
            self._waits.append((q, part))
            self._hold(q, part, list)
            return
        assert isinstance(part.op, Comm)
        team = self.teams.of(part.op.team, q.rank)
        if q.rank not in team:
            self.observer.outside(q, part, team)
            self._end(q, part)
        elif COMMS[part.kind].collective:
            self._collective(q, part, team)
        elif part.kind == "signal":
            flag = (team[q.mine(part.move.to) or 0], *self._flag(q, part.move.uses[0]))
            self.signals.setdefault(flag, []).append((q.mine(part.move.value) or 0, q.rank, part.index))
            self._end(q, part)
        else:
            self._message(q, part, team)

    # ---- collectives

    def _collective(self, q: Player, part: Part, team: tuple[int, ...]) -> None:
        number = q.calls.get(team, 0)
        q.calls[team] = number + 1
        slot = self._slots.setdefault((team, number), Slot(team, number))
        slot.parts[q.rank] = part
        self._hold(q, part, lambda: [r for r in slot.team if r not in slot.parts])
        if len(slot.parts) == len(team):
            del self._slots[team, number]
            self.observer.gathered(slot, self.players)
            for r in team:
                q = self.players[r]
                self._end(q, slot.parts[r], partial(self._sources, slot, q))

    def _sources(self, slot: Slot, q: Player) -> After:
        """Whose data a member gets: only that is certain to have been sent when the member has ended."""
        part = slot.parts[q.rank]
        match part.kind:
            case "broadcast" | "scatter" | "permute":
                givers: Iterable[int] = [slot.team[q.mine(part.move.source) or 0]]
            case "reduce" | "gather":
                if slot.team[q.mine(part.move.to) or 0] == q.rank:
                    return slot.everyone
                givers = []
            case _:
                return slot.everyone
        return [[(r, slot.parts[r].index)] for r in givers if r != q.rank]

    # ---- messages

    def _message(self, q: Player, part: Part, team: tuple[int, ...]) -> None:
        to, source = q.mine(part.move.to), q.mine(part.move.source)
        sends = to is not None
        peer = team[to if to is not None else source or 0]
        key = (team, q.rank, peer) if sends else (team, peer, q.rank)
        mine, theirs = (self._sends, self._recvs) if sends else (self._recvs, self._sends)
        if waiting := theirs.get(key):
            other, found = waiting.popleft()
            sender, send, receiver, recv = (q, part, other, found) if sends else (other, found, q, part)
            self.observer.paired(sender, send, receiver, recv)
            self._end(receiver, recv, lambda: [[(sender.rank, send.index)]])
            self._end(sender, send)
            return
        mine.setdefault(key, deque()).append((q, part))
        if not (sends and peer == q.rank):  # to oneself is a copy: the receive takes it from there
            self._hold(q, part, lambda: [peer])

    @property
    def unreceived(self) -> list[tuple[Player, Part]]:
        """Messages to oneself that nobody took."""
        return [item for (_, a, b), items in self._sends.items() if a == b for item in items]

    # ---- flags

    def _flag(self, q: Player, u: Use) -> tuple[Buffer, int, int]:
        return (u.root.buffer, q.cohort.copies.get(u.root, 0), u.layout.offset)

    def _look_at_flags(self) -> None:
        still = []
        for q, part in self._waits:
            if (after := self._satisfied(q, part)) is None:
                still.append((q, part))
            else:
                self._end(q, part, lambda after=after: after)  # type: ignore[misc]
        self._waits = still

    def _satisfied(self, q: Player, part: Part) -> After | None:
        """The signals that may have ended a wait, for each of its flags; None while one is missing."""
        if isinstance(part.op, Call):
            u, wanted = part.move.uses[len([a for a in part.op.args if isinstance(a, Buffer)])], 1
        else:
            u, wanted = part.move.uses[0], q.mine(part.move.value) or 0
        buffer, life, _ = self._flag(q, u)
        after = []
        for first, last in zip(*runs(u.layout), strict=True):
            for element in np.arange(first, last).tolist():
                flag = (q.rank, buffer, life, element)
                if self.initial.get(flag[:3], float("-inf")) >= wanted:
                    continue
                signals = [(rank, i) for value, rank, i in self.signals.get(flag, []) if value >= wanted]
                if not signals:
                    return None
                after.append(signals)
        return after
