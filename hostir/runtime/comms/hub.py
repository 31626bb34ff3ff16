"""Where rank threads meet: who has arrived at which communication, who waits, who has failed.

All state is under one lock. The rank whose arrival completes a communication carries it out, outside the lock; nobody polls. When
every live rank waits for something that has not happened, nothing ever will: that is a deadlock, found at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hostir.errors import CommTimeout, HostIrError, InputError, PeerError, RankMismatchError
from hostir.runtime.comms import agree
from hostir.runtime.comms.moves import run_collective, run_message
from hostir.runtime.comms.protocol import CommCall, show_call, show_type


class Arrival:
    """One rank's part in one communication; the Work that ``issue`` returns."""

    def __init__(self, hub: Hub, rank: int, call: CommCall) -> None:
        self.hub = hub
        self.rank = rank
        self.call = call
        self.meeting: Meeting | None = None
        self.finished = False
        self.ended_ns = 0  # by time.perf_counter_ns
        self.error: HostIrError | None = None
        self.thread = threading.get_ident()
        self.ready: Any = _record(call)  # the inputs are ready after this event
        self.moved: Any = None  # the outputs are ready after this event

    def wait(self) -> None:
        self.hub.wait(self)
        if self.moved is not None:
            torch.cuda.current_stream().wait_event(self.moved)

    def done(self) -> bool:
        return self.finished or self.hub.failure is not None

    def missing(self) -> list[int]:
        """World ranks that this one waits for."""
        if self.meeting is not None:
            return [r for r in self.call.team if r not in self.meeting.arrivals]
        position = self.call.to if self.call.kind == "send" else self.call.source
        return [self.call.team[position or 0]]

    def text(self) -> str:
        where = self.call.where()
        return f"{show_call(self.call)}{f'  [{where}]' if where else ''}"


class Reading:
    """A rank that waits for the texts of others (``exchange``)."""

    def __init__(self, rank: int, tag: str, ranks: tuple[int, ...], texts: dict[int, str]) -> None:
        self.rank = rank
        self.tag = tag
        self.ranks = ranks
        self.texts = texts

    @property
    def finished(self) -> bool:
        return len(self.texts) == len(self.ranks)

    def missing(self) -> list[int]:
        return [r for r in self.ranks if r not in self.texts]

    def text(self) -> str:
        return f"comparing {self.tag!r} among ranks {list(self.ranks)}"


@dataclass(eq=False)
class Meeting:
    """A collective that is not complete yet: the ``number``-th of its team."""

    number: int
    arrivals: dict[int, Arrival] = field(default_factory=dict)


@dataclass(eq=False)
class Lane:
    """The collectives of one team and channel: how many each member has issued, and those still open."""

    issued: dict[int, int] = field(default_factory=dict)
    open: dict[int, Meeting] = field(default_factory=dict)
    last: dict[int, Arrival] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why the ranks of a hub can no longer communicate."""

    rank: int
    error: BaseException


class Hub:
    """The shared state of ``size`` rank threads."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.failure: Failure | None = None
        self._changed = threading.Condition()
        self._lanes: dict[tuple[tuple[int, ...], str], Lane] = {}
        self._posts: dict[tuple[int, int, str], tuple[deque[Arrival], deque[Arrival]]] = {}
        self._texts: dict[tuple[str, tuple[int, ...], int], dict[int, str]] = {}
        self._exchanges: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._ended: dict[int, str] = {}  # rank -> "has finished" | "has failed"
        self._waiting: dict[int, dict[int, Arrival | Reading]] = {}  # rank -> thread -> what it waits for
        self._known_to_all: dict[int, RankMismatchError] = {}  # rank -> its last error that every rank of the world has raised
        self._threads_before = frozenset(threading.enumerate())
        self._rank_threads: set[threading.Thread] = set()

    # ---- life of a rank

    def enter(self) -> None:
        """The calling thread is a rank's own thread."""
        with self._changed:
            self._rank_threads.add(threading.current_thread())

    def finish(self, rank: int) -> None:
        """``rank`` will not communicate any more."""
        with self._changed:
            self._ended.setdefault(rank, "has finished")
            self._look_for_deadlock()

    def fail(self, rank: int, error: BaseException) -> None:
        """``rank`` stops because of ``error``; everybody who waits is woken. Nothing to tell if all ranks have raised it themselves."""
        if self._known_to_all.get(rank) is error:
            return
        with self._changed:
            self._ended[rank] = "has failed"
            self._break(rank, error)

    def _break(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = Failure(rank, error)
        self._changed.notify_all()

    def refuse_if_broken(self, rank: int, statement: str) -> None:
        if self.failure is not None:
            raise self._echo(rank, statement)

    def _echo(self, rank: int, statement: str) -> HostIrError:
        assert self.failure is not None
        error = self.failure.error
        if isinstance(error, CommTimeout):  # shared by all: not the fault of the one that noticed
            return CommTimeout(error.message, ranks=error.ranks, statement=statement, rank=rank)
        if isinstance(error, RankMismatchError):
            return RankMismatchError(error.message, statement=statement, rank=rank, expected=error.expected, got=error.got)
        headline = (str(error).splitlines() or [""])[0]
        return PeerError(
            f"rank {self.failure.rank} failed: {type(error).__name__}: {headline}", ranks=(self.failure.rank,), statement=statement, rank=rank
        )

    # ---- arriving

    def post(self, arrivals: Sequence[Arrival]) -> None:
        """Arrive at several communications at once; those that become complete are carried out by this thread."""
        complete: list[list[Arrival]] = []
        with self._changed:
            for a in arrivals:
                self.refuse_if_broken(a.rank, a.text())
                self._refuse_two_threads(a)
            for a in arrivals:
                matched = self._match(a) if a.call.kind in ("send", "recv") else self._join(a)
                if matched:
                    complete.append(matched)
        for group in complete:
            errors = self._carry_out(group)
            ended = time.perf_counter_ns()
            with self._changed:
                for a, error in zip(group, errors, strict=True):
                    a.error = error
                    a.ended_ns = ended
                    a.finished = True
                self._changed.notify_all()

    def _refuse_two_threads(self, a: Arrival) -> None:
        lane = self._lanes.get((a.call.team, a.call.channel))
        last = None if lane is None or a.call.kind in ("send", "recv") else lane.last.get(a.rank)
        if last is not None and not last.finished and last.thread != a.thread:
            raise two_threads(a.call.team, a.rank, a.text())

    def _match(self, a: Arrival) -> list[Arrival] | None:
        call, team = a.call, a.call.team
        is_send = call.kind == "send"
        ends = (a.rank, team[call.to or 0]) if is_send else (team[call.source or 0], a.rank)
        sends, recvs = self._posts.setdefault((*ends, call.channel), (deque(), deque()))
        mine, others = (sends, recvs) if is_send else (recvs, sends)
        if not others:
            mine.append(a)
            return None
        other = others.popleft()
        return [a, other] if is_send else [other, a]

    def _join(self, a: Arrival) -> list[Arrival] | None:
        lane = self._lanes.setdefault((a.call.team, a.call.channel), Lane())
        lane.last[a.rank] = a
        number = lane.issued.get(a.rank, 0)
        lane.issued[a.rank] = number + 1
        a.meeting = lane.open.setdefault(number, Meeting(number))
        a.meeting.arrivals[a.rank] = a
        if len(a.meeting.arrivals) < len(a.call.team):
            return None
        del lane.open[number]
        return [a.meeting.arrivals[r] for r in a.call.team]

    def _carry_out(self, group: list[Arrival]) -> Sequence[HostIrError | None]:
        """Compare, then move. Returns each member's error."""
        calls = [a.call for a in group]
        meeting = group[0].meeting
        if why := _complaint(group):
            team = tuple(a.rank for a in group)
            texts = [a.text() for a in group]
            number = None if meeting is None else meeting.number
            return [agree.mismatch(why, number, team, texts, a.rank, statement=a.call.where() or None) for a in group]
        events = [a.ready for a in group if a.ready is not None]
        for event in events:
            torch.cuda.current_stream().wait_event(event)
        try:
            if meeting is None:
                run_message(calls[0], calls[1])
            else:
                run_collective(calls)
        except Exception as error:  # noqa: BLE001  whatever it is, every member must hear of it
            why = f"{calls[0].kind} failed while it was carried out: {type(error).__name__}: {error}"
            return [PeerError(why, rank=a.rank, statement=a.text()) for a in group]
        if events:
            moved = torch.cuda.current_stream().record_event()
            for a in group:
                a.moved = moved
        return [None] * len(group)

    # ---- waiting

    def wait(self, a: Arrival) -> None:
        """Block until ``a`` is complete; raises its error, or why it will never be."""
        if not a.finished:
            with self._changed:
                self._block(a, self.timeout)
        if a.error is not None:
            if isinstance(a.error, RankMismatchError) and a.meeting is not None and len(a.call.team) == self.size:
                self._known_to_all[a.rank] = a.error
            raise a.error

    def is_quiet(self) -> bool:
        """Whether nothing waits to be met."""
        with self._changed:
            return self.failure is None and not any(lane.open for lane in self._lanes.values()) and not any(s or r for s, r in self._posts.values())

    def exchange(self, rank: int, tag: str, text: str, ranks: tuple[int, ...], patience: float | None = None) -> list[str]:
        with self._changed:
            number = self._exchanges.get((rank, tag, ranks), 0)
            self._exchanges[rank, tag, ranks] = number + 1
            texts = self._texts.setdefault((tag, ranks, number), {})
            reading = Reading(rank, tag, ranks, texts)
            self.refuse_if_broken(rank, reading.text())
            texts[rank] = text
            self._changed.notify_all()
            self._block(reading, self.timeout if patience is None else patience)
            self._texts.pop((tag, ranks, number), None)
            return [texts[r] for r in ranks]

    def _block(self, what: Arrival | Reading, patience: float) -> None:
        deadline = time.monotonic() + patience
        me = threading.get_ident()
        self._waiting.setdefault(what.rank, {})[me] = what
        try:
            if not what.finished:
                self._look_for_deadlock()
            while not what.finished:
                if self.failure is not None:
                    raise self._echo(what.rank, what.text())
                left = deadline - time.monotonic()
                if left <= 0:
                    self._break(what.rank, self._timed_out(what, patience))
                    continue
                self._changed.wait(left)
        finally:
            del self._waiting[what.rank][me]

    def _timed_out(self, what: Arrival | Reading, patience: float) -> CommTimeout:
        missing = what.missing()
        never = f"; never arrived: {_ranks(missing)}" if missing else ""
        lines = [f"rank {what.rank} waited {patience:g} s in {what.text()}{never}", *self._positions()]
        return CommTimeout("\n".join(lines), ranks=missing)

    def _look_for_deadlock(self) -> None:
        if self.failure is not None:
            return
        live = [r for r in range(self.size) if r not in self._ended]
        waits = [w for r in live for w in self._waiting.get(r, {}).values()]
        if not live or {w.rank for w in waits} != set(live) or any(w.finished for w in waits) or self._has_other_threads():
            return
        who = ", ".join(f"rank {w.rank} waits for {_ranks(w.missing())}" for w in waits)
        missing = sorted({r for w in waits for r in w.missing()})
        self._break(live[0], CommTimeout("\n".join([f"deadlock: {who}", *self._positions()]), ranks=missing))

    def _has_other_threads(self) -> bool:
        """Whether threads that are not a rank's own run: one of them may still communicate, so nothing is certain."""
        others = (t for t in threading.enumerate() if t not in self._threads_before and t not in self._rank_threads)
        return any(not t.name.startswith("hostir: ") for t in others)

    def _positions(self) -> list[str]:
        lines = []
        for r in range(self.size):
            waits = [w.text() for w in self._waiting.get(r, {}).values()]
            state = self._ended.get(r) or ("waits in " + "; ".join(waits) if waits else "is not in a communication")
            lines.append(f"    rank {r} {state}")
        return lines


def _complaint(group: Sequence[Arrival]) -> str | None:
    """Why these arrivals do not belong together, or None."""
    first = group[0].call
    if group[0].meeting is not None:
        return agree.complaint([agree.facts(a.call, a.rank) for a in group]) if len(group) > 1 or first.kind != "barrier" else None
    src, dst = group[0].rank, group[1].rank
    if agree.signature(first, src) == agree.signature(group[1].call, dst):
        return None
    return f"rank {src} sends {show_type(first.ins[0])} but rank {dst} receives {show_type(group[1].call.outs[0])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def two_threads(ranks: Sequence[int], rank: int, statement: str) -> InputError:
    """The error for two threads of one rank that communicate over one team at the same time."""
    return InputError(
        f"two threads communicate over team {list(ranks)} at the same time: which of them the other ranks would meet is chance",
        rank=rank,
        statement=statement,
        cure="give each thread its own channel (CommCall.channel), or run them one after another",
    )


def _record(call: CommCall) -> Any:
    for t in (*call.ins, *call.outs):
        if t.is_cuda:
            return torch.cuda.current_stream(t.device).record_event()
    return None
