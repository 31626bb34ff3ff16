"""Ranks agree: every team makes the same collectives in the same order, every message is received, and nobody waits forever.

When all ranks take one path the answer is a few comparisons of arrays: each collective is then the same statement on all members, and
the first one that has not ended has everybody there. Otherwise, and to explain what is wrong, all ranks are run against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from hostir.ir.cohort import Cohort, Move, PerRank
from hostir.ir.diagnostics import Diagnostic, Findings, Place, Texts, show_ranks
from hostir.ir.kinds import COMMS
from hostir.ir.meet import After, Meeting, Observer, Part, Player, Slot
from hostir.ir.nodes import Call, Comm, Program
from hostir.ir.race import lane_text
from hostir.ir.teams import Ints, Teams

End: TypeAlias = tuple[int, int, Callable[[], After]]  # world rank, number of the move, what it came after

_LISTED = 4
_ROOTS: Final = {"reduce": "to", "gather": "to", "broadcast": "source", "scatter": "source"}


def find_disagreements(p: Program, cohorts: Sequence[Cohort], teams: Teams, findings: Findings, texts: Texts, ends: list[End] | None = None) -> None:
    """Communications that ranks of ``cohorts`` (all ranks of a mesh, walked without error) do not agree on, and deadlocks. ``ends`` gets
    what ended, in an order in which it can happen."""
    if ends is None and len(cohorts) == 1 and agree_at_once(cohorts[0], teams):
        return
    watch = _Agreement(findings, texts, ends)
    meeting = Meeting(cohorts, teams, watch)
    meeting.run()
    for q, part in meeting.unreceived:
        watch.unreceived(q, part)
    stuck = meeting.stuck
    if stuck and not watch.broken & {r for q in stuck for r in (q.rank, *_missing(q))}:
        _deadlock(p, meeting, stuck, findings, texts)


# ------------------------------------------------------------------------------------------------------------- all on one path


def agree_at_once(c: Cohort, teams: Teams) -> bool:
    """Whether ranks that all take one path certainly agree. False says nothing."""
    seats: dict[object, tuple[Ints, Ints]] = {}
    place = {r: k for k, r in enumerate(c.ranks)}
    known: set[tuple[object, ...]] = set()
    for m in c.moves:
        op = m.step.op
        if isinstance(op, Call) and op.awaits is not None:
            return False
        if not isinstance(op, Comm) or op.kind == "copy":
            continue
        if not COMMS[op.kind].collective:
            return False
        key = (id(op), _bytes(m.to), _bytes(m.source), m.sizes, None if m.counts is None else tuple(map(_bytes, (*m.counts[0], *m.counts[1]))))
        if key in known:
            continue
        known.add(key)
        if op.team not in seats:
            rows = [teams.of(op.team, r) for r in c.ranks]
            if any(r not in row for r, row in zip(c.ranks, rows, strict=True)):
                return False
            seats[op.team] = np.array([[place[r] for r in row] for row in rows]), teams.positions(op.team, c.ranks)
        if not _mirrored(op, m, *seats[op.team]):
            return False
    return True


def _bytes(x: PerRank | None) -> object:
    return x.tobytes() if isinstance(x, np.ndarray) else x


def _mirrored(op: Comm, m: Move, seat: Ints, position: Ints) -> bool:
    """``seat[k, j]`` is the place of member j of the team of rank k, ``position[k]`` where k stands in it."""
    every = np.arange(len(seat))
    if op.kind == "permute":
        to, source = seat[every, m.to], seat[every, m.source]
        return m.sizes[0] == m.sizes[1] and bool((to[source] == every).all() and (source[to] == every).all())
    if op.kind in _ROOTS:
        root = seat[every, m.to if _ROOTS[op.kind] == "to" else m.source]
        return bool((root == root[seat[:, 0]]).all())
    if m.counts is not None:
        send, recv = (np.stack([np.broadcast_to(x, every.shape) for x in side], axis=1) for side in m.counts)
        return send.shape[1] == recv.shape[1] == seat.shape[1] and bool((send == recv[seat, position[:, None]]).all())
    return True


# ---------------------------------------------------------------------------------------------------------- run against each other


class _Agreement(Observer):
    """Compares what meets."""

    def __init__(self, findings: Findings, texts: Texts, ends: list[End] | None) -> None:
        self.findings = findings
        self.texts = texts
        self.ends = ends
        self.broken: set[int] = set()

    def ended(self, player: Player, part: Part, after: Callable[[], After]) -> None:
        if self.ends is not None:
            self.ends.append((player.rank, part.index, after))

    def _add(self, kind: str, message: str, pairs: Sequence[tuple[Player, Part, str]], cure: str, key: object) -> None:
        self.broken |= {q.rank for q, _, _ in pairs}
        places = tuple(self.texts.place(part.op, part.move.at, f"rank {q.rank}{': ' + role if role else ''}") for q, part, role in pairs)
        ops = tuple(id(part.op) for _, part, _ in pairs)
        self.findings.add((kind, key, ops), [q.rank for q, _, _ in pairs], lambda: Diagnostic("mismatch", message, places, cure=cure))

    def outside(self, player: Player, part: Part, team: tuple[int, ...]) -> None:
        self._add(
            "outside", f"this communication is of {show_ranks(team)}, and a rank executes it that is not among them", [(player, part, "")],
            "let only the members reach it, under an if", "outside",
        )  # fmt: skip

    def unreceived(self, player: Player, part: Part) -> None:
        self._add("self", "a message to oneself is never received", [(player, part, "")], "add the recv, or use copy", "self")

    def gathered(self, slot: Slot, players: dict[int, Player]) -> None:
        first = slot.team[0]
        one = slot.parts[first]
        for r in slot.team[1:]:
            other = slot.parts[r]
            if other is not one and self.broken.isdisjoint((first, r)) and (differ := _difference(one, other)):
                name, a, b = differ
                self._add(
                    "agree", f"the members of a team disagree on its collective number {slot.number + 1}: {name}",
                    [(players[first], one, a), (players[r], other, b)],
                    "all members make the same collectives in the same order, with the same types and on the same stream", name,
                )  # fmt: skip
                return
        if not self.broken.isdisjoint(slot.team):
            return
        if one.kind in _ROOTS:
            self._roots(slot, players)
        elif one.kind == "permute":
            self._permute(slot, players)
        elif one.kind == "alltoallv":
            self._counts(slot, players)

    def _roots(self, slot: Slot, players: dict[int, Player]) -> None:
        roots = {r: players[r].mine(getattr(slot.parts[r].move, _ROOTS[slot.parts[r].kind])) for r in slot.team}
        first = slot.team[0]
        for r in slot.team[1:]:
            if roots[r] != roots[first]:
                pairs = [(players[q], slot.parts[q], f"root {roots[q]}") for q in (first, r)]
                self._add("root", "the members of a team disagree on the root", pairs, "the root is the same expression on all members", "root")
                return

    def _permute(self, slot: Slot, players: dict[int, Player]) -> None:
        for r in slot.team:
            part = slot.parts[r]
            to = slot.team[players[r].mine(part.move.to) or 0]
            theirs = slot.parts[to]
            source = slot.team[players[to].mine(theirs.move.source) or 0]
            pairs = [(players[r], part, f"sends to rank {to}"), (players[to], theirs, f"receives from rank {source}")]
            if source != r:
                self._add(
                    "mirror", "`to` and `from` of a permute do not mirror", pairs,
                    "whoever is named in `to` names the sender in `from`: to (rank + 1) % n, from (rank + n - 1) % n", "mirror",
                )  # fmt: skip
                return
            if (part.move.sizes[0], _dtype(part)) != (theirs.move.sizes[1], _dtype(theirs)):
                self._sizes(pairs, part, theirs)
                return

    def _counts(self, slot: Slot, players: dict[int, Player]) -> None:
        for i, r in enumerate(slot.team):
            sends, part = slot.parts[r].move.counts, slot.parts[r]
            for j, s in enumerate(slot.team):
                recvs = slot.parts[s].move.counts
                if sends is None or recvs is None:
                    return
                given = players[r].mine(sends[0][j]) if j < len(sends[0]) else None
                taken = players[s].mine(recvs[1][i]) if i < len(recvs[1]) else None
                if given != taken:
                    pairs = [(players[r], part, f"sends {given} rows to rank {s}"), (players[s], slot.parts[s], f"receives {taken} from rank {r}")]
                    self._add("counts", "the counts of an alltoallv do not match", pairs, "recv[i] of rank j is send[j] of rank i", "counts")
                    return

    def paired(self, sender: Player, send: Part, receiver: Player, recv: Part) -> None:
        if (send.move.sizes[0], _dtype(send)) != (recv.move.sizes[0], _dtype(recv)):
            pairs = [(sender, send, f"sends to rank {receiver.rank}"), (receiver, recv, f"receives from rank {sender.rank}")]
            self._sizes(pairs, send, recv)

    def _sizes(self, pairs: Sequence[tuple[Player, Part, str]], send: Part, recv: Part) -> None:
        sent = f"{_dtype(send)}{list(send.move.sizes[0])}"
        taken = f"{_dtype(recv)}{list(recv.move.sizes[-1])}"
        cure = "sender and receiver use buffers of the same shape and dtype"
        self._add("message", f"a message of {sent} is received as {taken}", pairs, cure, "sizes")


def _dtype(part: Part) -> str:
    assert isinstance(part.op, Comm)
    return (*part.op.ins, *part.op.outs)[0].type.dtype.name


def _difference(a: Part, b: Part) -> tuple[str, str, str] | None:
    if a.op is b.op and a.move.sizes == b.move.sizes and a.move.step.stream == b.move.step.stream:
        return None
    one, other = a.agreed, b.agreed
    for name in one:
        if one[name] != other[name]:
            return name, _shown(name, one[name]), _shown(name, other[name])
    return None


def _shown(name: str, value: object) -> str:
    if name == "stream" and isinstance(value, tuple):
        return f"on {lane_text(value)}"
    if isinstance(value, tuple):
        value = ", ".join(str(list(v) if isinstance(v, tuple) else v) for v in value)
    return f"{name} {value}"


# -------------------------------------------------------------------------------------------------------------------- deadlock


def _missing(q: Player) -> list[int]:
    return sorted({r for _, missing in q.open.values() for r in missing() if r != q.rank})


def _deadlock(p: Program, meeting: Meeting, stuck: Sequence[Player], findings: Findings, texts: Texts) -> None:
    """One finding: where every rank stands, whom it waits for, and what it did last."""
    waits = {q.rank: _missing(q) for q in stuck}
    circle = _circle(waits)
    groups: dict[tuple[object, ...], list[Player]] = {}
    for q in sorted(stuck, key=lambda q: (q.rank not in circle, q.rank)):
        part, _ = next(iter(q.open.values()))
        groups.setdefault((id(part.op), part.move.at, bool(q.next)), []).append(q)
    places: list[Place] = []
    details: list[str] = []
    for members in list(groups.values())[:_LISTED]:
        q = members[0]
        part, _ = next(iter(q.open.values()))
        for_whom = f" for {show_ranks(waits[q.rank])}" if waits[q.rank] else " for a signal"
        verb = "waits" if len(members) == 1 else "wait"
        whom = for_whom if len(members) == 1 or not waits[q.rank] else f", rank {q.rank}{for_whom}"
        places.append(texts.place(part.op, part.move.at, f"{show_ranks([m.rank for m in members])} {verb} here{whom}"))
        if q.next:
            last = q.units[q.next - 1][-1]
            details.append(f"rank {q.rank} came from: {texts.place(last.op, last.move.at)}")
    if len(groups) > _LISTED:
        details.append(f"{len(stuck)} ranks stand in {len(groups)} different places")
    gone = sorted({r for rs in waits.values() for r in rs if r not in waits})
    if circle:
        message = f"ranks {' -> '.join(map(str, (*circle, circle[0])))} wait for each other"
    elif gone:
        message = f"{show_ranks(sorted(waits))} wait{'s' if len(waits) == 1 else ''} for {show_ranks(gone)}, which ended without it"
    else:
        message = "a rank waits for a signal that never comes"
    lanes = {part.move.step.stream for q in stuck if q.rank in circle for part, _ in q.open.values()}
    if len(lanes) > 1:
        details.append("these are different streams, but two communicators may wait for one device, and overlap off runs all on one")
    ops = tuple(sorted({id(part.op) for q in stuck for part, _ in q.open.values()}))
    diagnostic = Diagnostic("deadlock", message, tuple(places), cure=_cure(stuck), details=tuple(details))
    findings.add(("deadlock", ops), [q.rank for q in stuck], lambda: diagnostic)


def _circle(waits: dict[int, list[int]]) -> list[int]:
    """Ranks that wait for each other in a circle, smallest first; empty when there is none."""
    state: dict[int, int] = {}
    for start, first in waits.items():
        if start in state:
            continue
        path: list[int] = []
        stack = [(start, iter(first))]
        while stack:
            rank, rest = stack[-1]
            if rank not in state:
                state[rank] = 1
                path.append(rank)
            for r in rest:
                if state.get(r) == 1:
                    found = path[path.index(r) :]
                    at = found.index(min(found))
                    return found[at:] + found[:at]
                if r in waits and r not in state:
                    stack.append((r, iter(waits[r])))
                    break
            else:
                stack.pop()
                path.pop()
                state[rank] = 2
    return []


def _cure(stuck: Sequence[Player]) -> str:
    kinds = {part.kind for q in stuck for part, _ in q.open.values()}
    if kinds <= {"send", "recv"}:
        return "post what meets together, group { send …  recv … }, or let one side receive first"
    if "wait" in kinds:
        return "signal before the wait that needs it, with a value that is large enough"
    return "all members of a team must reach its communications, and all teams in one order on every rank"
