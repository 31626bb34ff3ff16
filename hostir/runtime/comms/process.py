"""Ranks as processes, over ``torch.distributed`` process groups: order, agreement, failures and timeouts; a wire moves the bytes.

Each team has its own group, made by its members only, at their first communication; messages from a to b have the group (a, b). A team
is a queue: a communication posts its backend works only after the one before has posted all of its own, so every member posts in the
same order whatever it waits for first. Nothing blocks in ``issue``; waits are short and look at the notice board in between, so a
failure elsewhere ends them, and a timeout can say who never came.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from hostir.errors import CommTimeout, HostIrError, InputError, PeerError, RankMismatchError
from hostir.runtime.comms import agree
from hostir.runtime.comms.board import Board, Failure, Progress
from hostir.runtime.comms.gloo import Steps
from hostir.runtime.comms.hub import Arrival, Hub, two_threads
from hostir.runtime.comms.lane import Lane, Opening, Pending, Wire, keep_forever
from hostir.runtime.comms.moves import run_collective
from hostir.runtime.comms.protocol import CommCall, Work, check_call, show_call
from hostir.runtime.comms.threads import GroupWork

_STEP: Final = timedelta(seconds=0.05)  # one wait; between two the board is read
_SHORT_STEP: Final = timedelta(seconds=0.001)  # the same while other teams need pushing on
_FIND_REASON: Final = 2.0  # seconds to find out why a connection broke
_ANSWER: Final = 1.0  # seconds for the others to say where they are after a timeout
_PART: Final = 5.0  # seconds to wait for the others when leaving
_IN_FLIGHT: Final = 2.0  # seconds that data of a rank that has finished may still take


class ProcessComms:
    """One rank's end of a world of processes."""

    def __init__(self, wire: Wire, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.name = wire.name
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.broken: HostIrError | None = None
        self.run_locks: dict[tuple[int, ...], threading.RLock] = {}
        self._wire = wire
        self._board = Board(store, rank, size)
        self._lanes: dict[tuple[tuple[int, ...], str, str], Lane] = {}
        self._busy: set[Lane] = set()  # those whose queue is not empty
        self._lock = threading.RLock()
        self._alone = Hub(1, timeout)  # messages to oneself meet here
        self._pid = os.getpid()
        self._closed = False
        self._last_issue = time.monotonic()
        self._known_to_all: RankMismatchError | None = None  # the last error that every rank of the world has raised
        self._exchanges: dict[tuple[str, tuple[int, ...]], int] = {}
        self._part = 0

    # ---- issuing

    def issue(self, call: CommCall) -> Work:
        self._check(call)
        return self._start(call)

    def issue_group(self, calls: Sequence[CommCall]) -> Work:
        for call in calls:
            self._check(call)
        return GroupWork([self._start(call) for call in calls])

    def _check(self, call: CommCall) -> None:
        check_call(call, self.rank, self.size)
        if os.getpid() != self._pid:
            raise InputError(
                "a forked child cannot use the world of its parent",
                rank=self.rank,
                expected=f"process {self._pid}",
                got=f"process {os.getpid()}",
                cure="start processes with hir.launch.spawn, or fork before hir.launch.init",
            )
        if self._closed:
            raise PeerError("this world is closed", rank=self.rank, statement=call.where() or None, cure="communicate inside `with world:`")
        self._refuse_if_broken(call)

    def _refuse_if_broken(self, call: CommCall) -> None:
        now = time.monotonic()
        if self.broken is None and now - self._last_issue > 1.0:  # late: the others may have given up
            with self._store_is_there(lambda: call.where() or show_call(call)):
                if (failure := self._board.failure()) is not None:
                    self._break(self._echo(failure, call.where() or show_call(call)))
        self._last_issue = now
        if self.broken is not None:
            headline = self.broken.message.splitlines()[0]
            kind = type(self.broken) if isinstance(self.broken, (CommTimeout, PeerError)) else PeerError
            raise kind(
                f"this world has failed: {headline}",
                ranks=getattr(self.broken, "ranks", ()),
                rank=self.rank,
                statement=call.where() or show_call(call),
                cure="make a new world: leave this one and call hir.launch.init (or spawn) again",
            )

    def _start(self, call: CommCall) -> Work:
        is_message = call.kind in ("send", "recv")
        ranks = call.team
        if is_message:
            other = call.team[(call.to if call.kind == "send" else call.source) or 0]
            ranks = (self.rank, other) if call.kind == "send" else (other, self.rank)
        if is_message and ranks[0] == ranks[1]:
            arrival = Arrival(self._alone, self.rank, call)
            self._alone.post([arrival])
            return arrival
        if len(ranks) == 1:
            run_collective([call])
            return GroupWork(())
        with self._lock:
            lane = self._lane(ranks, call.channel, "message" if is_message else "team")
            last = lane.last
            if last is not None and last.thread != threading.get_ident() and not last.finished and not self.poll(last):
                raise two_threads(ranks, self.rank, call.where() or show_call(call))
            pending = Pending(self, lane, call)
            lane.issued += 1
            lane.last = pending
            lane.queue.append(pending)
            self._busy.add(lane)
            self._advance(lane)
            return pending

    def _lane(self, ranks: tuple[int, ...], channel: str, kind: str) -> Lane:
        lane = self._lanes.get((ranks, channel, kind))
        if lane is None:
            name = "-".join(map(str, ranks))
            clone = getattr(self._board.store, "clone", None)  # a blocked store answers nobody else
            store = dist.PrefixStore(f"{kind}/{name}/{channel}", clone() if clone else self._board.store)
            lane = Lane(ranks, channel, Opening(self._wire, store, ranks.index(self.rank), len(ranks)))
            self._lanes[ranks, channel, kind] = lane
        return lane

    # ---- progress

    def poll(self, pending: Pending) -> bool:
        """Push the queue on without blocking; whether ``pending`` has ended."""
        with self._lock:
            if self.broken is not None:
                return True
            for lane in list(self._busy):
                self._advance(lane)
            if not pending.finished and pending.is_posted and pending.current.is_completed():
                self._step(pending)
            return pending.finished

    def _advance(self, lane: Lane) -> None:
        if not lane.opening.is_completed() or lane.opening.error is not None:
            return
        while lane.queue:
            head = lane.queue[0]
            if not head.is_posted:
                self._step(head)
            if not head.is_posted:
                return
            lane.queue.popleft()
        self._busy.discard(lane)

    def _step(self, pending: Pending) -> None:
        """Resume as long as the posted work is done; under the lock."""
        if pending.steps is None:
            pending.steps = self._steps(pending)
        with torch.inference_mode():
            while not pending.finished and (pending.current is None or pending.current.is_completed()):
                what = "lost the connection to one of"
                try:
                    if pending.current is not None:
                        pending.current.wait()
                    what = "could not go on with"
                    pending.current, pending.is_posted = next(pending.steps)
                except StopIteration:
                    pending.finished = pending.is_posted = True
                except HostIrError as error:
                    pending.error = error
                    pending.finished = pending.is_posted = True
                except RuntimeError as error:
                    self._lost(pending, error, what)

    def _steps(self, pending: Pending) -> Steps:
        """Compare with the other members unless that is done already, then move."""
        call, lane, num = pending.call, pending.lane, len(pending.lane.ranks)
        if not call.agreed or call.kind == "alltoallv":
            work, table = self._wire.compare(lane.opening.group, agree.facts(call, self.rank), num)
            yield work, False
            if why := agree.complaint(table.tolist()):
                raise self._mismatch(pending, why)
        yield from self._wire.steps(lane.opening.group, call, lane.ranks.index(self.rank))

    def _mismatch(self, pending: Pending, why: str) -> RankMismatchError:
        """All members have seen the same table, so all come here; nothing was moved and the team remains usable."""
        lane = pending.lane
        key = f"mismatch/{lane.key}/{pending.number}/{pending.call.kind in ('send', 'recv')}"
        self._board.post(key, pending.text())
        self._board.poll(lambda: all(self._board.read(key, r) is not None for r in lane.ranks), _ANSWER * 5)
        texts = [self._board.read(key, r) or "?" for r in lane.ranks]
        number = None if pending.call.kind in ("send", "recv") else pending.number
        error = agree.mismatch(why, number, lane.ranks, texts, self.rank, statement=pending.call.where() or None)
        if len(lane.ranks) == self.size and number is not None:
            self._known_to_all = error
        return error

    # ---- waiting

    def wait_for(self, pending: Pending) -> None:
        """Block until ``pending`` has ended, whatever the reason."""
        with self._store_is_there(pending.text):
            self._wait_for(pending)

    @contextlib.contextmanager
    def _store_is_there(self, statement: Callable[[], str]) -> Iterator[None]:
        """The store lives in rank 0's process, or in the launcher: it is gone when that one is."""
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            what = f"rank {self.rank} lost the store of this job: rank 0 or the launcher has ended ({reason})"
            raise self._break(PeerError(what, ranks=(0,), rank=self.rank, statement=statement())) from error

    def _wait_for(self, pending: Pending) -> None:
        start = last_look = time.monotonic()
        while True:
            with self._lock:
                self.poll(pending)
                if pending.finished:
                    return
                if self.broken is not None:
                    raise self._again(self.broken, pending.text())
                step = _SHORT_STEP if self._busy - {pending.lane} else _STEP
                blocker: Any = pending.lane.opening
                if blocker.is_completed() and blocker.error is None:
                    blocker = pending.current if pending.is_posted else pending.lane.queue[0].current
            if blocker is None:  # connected just now
                continue
            try:
                blocker.wait(step)
            except RuntimeError as error:  # not yet, or it failed: the next step raises that
                if isinstance(blocker, Opening) and blocker.error is not None:
                    self._lost(pending, error)
            now = time.monotonic()
            if now - last_look >= _STEP.total_seconds():
                last_look = now
                self._look(pending.lane.ranks, pending.text(), now - start)
                if now - start > self.timeout:
                    self._give_up(pending)

    def _look(self, ranks: Sequence[int], statement: str, waited: float) -> None:
        """Raise when the world has failed, or when one of ``ranks`` has died or will not come any more."""
        failure = self._board.failure()
        if failure is None and waited > 0.5 and (dead := self._board.dead(ranks)):
            failure = self._failure_or(self._gone(dead[0]))
        if failure is None and waited > _IN_FLIGHT and (finished := [r for r in ranks if r != self.rank and self._has_finished(r)]):
            text = f"rank {finished[0]} has finished: it does not take part any more"
            failure = self._failure_or(Failure(finished[0], "PeerError", text, (finished[0],)))
        if failure is not None:
            raise self._break(self._echo(failure, statement))

    def _has_finished(self, rank: int) -> bool:
        return self._board.read("closed", rank) is not None or int(self._board.read("finished", rank) or -1) >= self._part

    def _gone(self, rank: int) -> Failure:
        what = "has finished and is gone" if self._has_finished(rank) else "died: its process is gone"
        return Failure(rank, "PeerError", f"rank {rank} {what}", (rank,))

    def _failure_or(self, guess: Failure) -> Failure:
        """The failure on the board, giving its author a moment; else ``guess`` becomes it."""
        self._board.poll(lambda: self._board.failure() is not None, 0.2)
        return self._board.post_failure(guess)

    def _lost(self, pending: Pending, error: Exception, what: str = "cannot reach all of") -> None:
        """The backend failed. Find out why: a reason on the board, a process that is gone, or only what the backend says."""
        ranks = pending.lane.ranks
        self._board.poll(lambda: self._board.failure() is not None or bool(self._board.dead(ranks)), _FIND_REASON)
        dead = self._board.dead(ranks)
        others = [r for r in ranks if r != self.rank]
        if dead:
            guess = self._gone(dead[0])
        else:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            guess = Failure(self.rank, "PeerError", f"rank {self.rank} {what} ranks {others}: {reason}", tuple(others))
        raise self._break(self._echo(self._failure_or(guess), pending.text())) from error

    def _give_up(self, pending: Pending) -> None:
        text = f"rank {self.rank} waited {self.timeout:g} s in {pending.text()}"
        self._post_progress(pending.text())
        failure = self._board.post_failure(Failure(self.rank, "CommTimeout", text))
        raise self._break(self._echo(failure, pending.text(), pending))

    def _post_progress(self, statement: str) -> None:
        self._board.post_progress(Progress(statement, {lane.key: lane.issued for lane in self._lanes.values()}))

    # ---- failing

    def _echo(self, failure: Failure, statement: str, pending: Pending | None = None) -> HostIrError:
        """The error that this rank raises for a failure on the board."""
        facts: dict[str, Any] = {"rank": self.rank, "statement": statement}
        if failure.kind == "CommTimeout":
            self._post_progress(statement)
            everyone = range(self.size)
            progress = self._board.progress(everyone, _ANSWER)
            ranks = everyone if pending is None else pending.lane.ranks
            key, number = ("", -1) if pending is None else (pending.lane.key, pending.number)
            missing = [r for r in ranks if r not in progress or progress[r].issued.get(key, 0) <= number]
            lines = [f"    rank {r} {f'waits in {progress[r].text}' if r in progress else 'is not in a communication'}" for r in everyone]
            never = f"; never arrived: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else ""
            return CommTimeout("\n".join([failure.text + never, *lines]), ranks=missing, **facts)
        if failure.kind == "RankMismatchError":
            return RankMismatchError(failure.text, **facts)
        return PeerError(failure.text, ranks=failure.ranks or (failure.rank,), **facts)

    def _again(self, error: HostIrError, statement: str) -> HostIrError:
        if isinstance(error, (CommTimeout, PeerError)):
            return type(error)(error.message, ranks=error.ranks, rank=self.rank, statement=statement)
        return type(error)(error.message, rank=self.rank, statement=statement)

    def _break(self, error: HostIrError) -> HostIrError:
        """Nothing works on these groups any more. They are never destroyed: that would wait for works that cannot end."""
        if self.broken is None:
            self.broken = error
            for lane in self._lanes.values():
                keep_forever(lane.opening)
        return error

    def fail(self, error: BaseException) -> None:
        if self._closed or os.getpid() != self._pid or error is self._known_to_all:
            return
        headline = (str(error).splitlines() or [""])[0]
        text = f"rank {self.rank} failed: {type(error).__name__}: {headline}"
        kind = "PeerError"
        if isinstance(error, RankMismatchError):
            kind, text = "RankMismatchError", error.message
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it everybody who could read this
            self._board.post_failure(Failure(self.rank, kind, text, (self.rank,)))
        self._break(PeerError(text, ranks=(self.rank,), rank=self.rank))

    # ---- texts

    def exchange(self, tag: str, text: str, ranks: Sequence[int], patience: float | None = None) -> list[str]:
        members = tuple(ranks)
        number = self._exchanges.get((tag, members), 0)
        self._exchanges[tag, members] = number + 1
        key = f"text/{tag}/{'-'.join(map(str, members))}"
        statement = f"comparing {tag!r} among ranks {list(members)}"
        if self.broken is not None:
            raise self._again(self.broken, statement)
        wait = self.timeout if patience is None else patience
        with self._store_is_there(lambda: statement):
            texts = self._board.meet(f"{key}/{number}", text, members, wait, lambda missing, waited: self._look(missing, statement, waited))
            if missing := [r for r in members if r not in texts]:
                self._post_progress(statement)
                never = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} never arrived"
                failure = Failure(self.rank, "CommTimeout", f"rank {self.rank} waited {wait:g} s in {statement}: {never}")
                raise self._break(self._echo(self._board.post_failure(failure), statement))
            if number > 0:
                self._board.forget(f"{key}/{number - 1}")  # whoever posted this one has read all of the one before
        return [texts[r] for r in members]

    # ---- several pieces of work, one after another

    def begin_part(self, number: int, timeout: float) -> None:
        """The ranks begin their ``number``-th piece of work in this world; communications of it wait up to ``timeout`` seconds."""
        self._part, self.timeout, self._last_issue = number, timeout, time.monotonic()

    def end_part(self) -> None:
        """This rank will not communicate any more in this piece of work; whoever waits for it need not wait for the timeout."""
        if self.broken is None and not self._closed:
            self._board.post("finished", str(self._part))

    def state(self) -> dict[tuple[str, tuple[int, ...], str], int] | None:
        """How often this rank has communicated, by kind, team and channel: members with equal numbers can go on together.

        None when nothing can follow: broken, closed, or something is still under way.
        """
        if self.broken is not None or self._closed or not self._alone.is_quiet():
            return None
        if any(lane.last is not None and not self.poll(lane.last) for lane in self._lanes.values()):
            return None
        lanes = {(kind, ranks, channel): lane.issued for (ranks, channel, kind), lane in self._lanes.items()}
        return lanes | {("text", members, tag): number for (tag, members), number in self._exchanges.items()}

    # ---- the end

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self.broken is not None:
            return
        try:
            self._board.post("closed", "")
            others = [r for r in range(self.size) if r != self.rank]

            def closed() -> list[int]:
                return [r for r in others if self._board.read("closed", r) is not None]

            def is_over() -> bool:
                return self._board.failure() is not None or len(gone := closed()) + len(self._board.dead(sorted({*others} - {*gone}))) == len(others)

            self._board.poll(is_over, min(self.timeout, _PART))
            if self._board.failure() is not None or len(closed()) < len(others):
                self._break(PeerError("this world is closed", rank=self.rank))
        except RuntimeError:  # the store's host has left already
            self._break(PeerError("this world is closed", rank=self.rank))
        self._lanes.clear()
