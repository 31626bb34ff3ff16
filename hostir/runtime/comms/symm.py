"""Ranks that address each other's memory: communications as pulls, and programs that read, write and signal on peers.

On GPUs everything is in the order of the current stream and the host never waits, except where ranks must tell each other something
first: when a workspace grows, when a program's symmetric buffers are made, and for calls that no program has agreed on. On CPUs a
communication is done when ``issue`` returns. A world of processes over gloo stands behind for facts, failures and the end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from hostir.errors import HostIrError
from hostir.runtime.comms import agree
from hostir.runtime.comms.board import Failure
from hostir.runtime.comms.fabric import Fabric, Heap, Turn, Window
from hostir.runtime.comms.lane import Pending, Wire
from hostir.runtime.comms.moves import run_collective, share_memory
from hostir.runtime.comms.process import ProcessComms
from hostir.runtime.comms.protocol import CommCall, Work, show_call
from hostir.runtime.comms.symm_mail import Mail, Message, messages_of, run_messages
from hostir.runtime.comms.symm_moves import Runner, Team, collective_of, num_bytes, place_of
from hostir.runtime.comms.threads import GroupWork

MESSAGES: Final = ("permute", "send", "recv", "alltoallv")
ARENA_BYTES: Final = 1 << 30  # of each rank, for what teams smaller than the world need; HOSTIR_SYMM_BYTES overrides
_MAIL_BYTES: Final = 128 << 20  # of each rank, for all its slots
_MAX_SLOT: Final = 32 << 20
_LOOK: Final = 0.05  # seconds between two looks at the world


def slot_bytes(size: int, arena_bytes: int) -> int:
    """Bytes of one of the two slots that a rank has for each other: a power of two that suits the world and the arena."""
    budget = min(_MAIL_BYTES, arena_bytes // 4) // (2 * size)
    return max(min(_MAX_SLOT, 1 << (budget.bit_length() - 1)), 4096)


class _Ordered:
    """The Work of what is in a stream's order: waiting makes the current stream wait, not the host. ``met``: messages that must have been
    taken before their sender goes on."""

    def __init__(self, turn: Turn, met: Sequence[Message]) -> None:
        self._turn = turn
        self._met = met

    def wait(self) -> None:
        self._turn.take()
        for message in self._met:
            message.meet()
        self._met = ()

    def done(self) -> bool:
        return not self._met


class _Prepared:
    """A call that was checked, and what carries it out."""

    def __init__(
        self, owner: SymmComms, collective: Runner | None, messages: Sequence[Message], own: Callable[[], None] | None, *, meets: bool
    ) -> None:
        self.owner = owner
        self.collective = collective
        self.messages = messages
        self.own = own
        self.met = messages if meets else ()

    def between(self) -> None:
        if self.collective is not None:
            self.collective.run()
        if self.own is not None:
            self.own()


class _Compared:
    """The Work of a call that its members compare first. It is carried out when one such call is waited for, together with all that were
    issued before: one rank may send first and another receive first."""

    def __init__(self, comms: SymmComms, call: CommCall, members: tuple[int, ...], comparing: Work, table: torch.Tensor) -> None:
        self.call = call
        self.members = members
        self.comparing = comparing
        self.table = table
        self.error: HostIrError | None = None
        self.work: Work | None = None
        self.turn = comms.fabric.turn()
        self.turn.take()
        self._comms = comms

    def wait(self) -> None:
        if self.work is None and self.error is None:
            self._comms.settle()
        if self.error is not None:
            raise self.error
        assert self.work is not None
        self.work.wait()

    def done(self) -> bool:
        if self.work is None and self.error is None and self.comparing.done():
            self._comms.settle()
        return self.error is not None or (self.work is not None and self.work.done())


class SymmComms(ProcessComms):
    """One rank's end of a world whose ranks reach each other's memory; a world of processes over gloo that learned more."""

    fabric: Fabric
    heap: Heap

    def __init__(self, wire: Wire, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(wire, store, rank, size, timeout)
        self.name = "symm"
        self.num_waits = 0
        self.last_call: Callable[[], str] = lambda: "no communication yet"
        self.on_close: list[Callable[[], None]] = []
        self._teams: dict[tuple[tuple[int, ...], str], Team] = {}
        self._unheard: HostIrError | None = None
        self._open: list[_Compared] = []

    def connect(self, fabric: Fabric, arena_bytes: int | None = None) -> None:
        """Map each other's memory; all ranks of the world call this, and it blocks. ``arena_bytes``: of each rank (HOSTIR_SYMM_BYTES)."""
        wanted = int(os.environ.get("HOSTIR_SYMM_BYTES", ARENA_BYTES)) if arena_bytes is None else arena_bytes
        self.fabric = fabric
        self.heap = Heap(fabric, self.rank, self.size, wanted, self.exchange)
        self._mail = Mail(self.heap, slot_bytes(self.size, wanted))

    # ---- communications

    def issue(self, call: CommCall) -> Work:
        if call.channel:
            # memory of a team is handed out in the order of first use, which threads of one rank do not share with those of another:
            # a channel of its own travels over the host
            return super().issue(call)
        known = call.memo.get("symm")
        if not isinstance(known, _Prepared) or known.owner is not self or _is_open(call):
            self._check(call)
            if self._is_local(call):
                return self._local(call)
            if _is_open(call):
                return self._compare(call)
            known = self._prepare(call)
        elif self.broken is not None:
            self._refuse_if_broken(call)
        self.settle()
        self._note(call)
        with torch.inference_mode():
            run_messages(known.messages, known.between)
        return self._work(known.met)

    def issue_group(self, calls: Sequence[CommCall]) -> Work:
        if any(call.channel for call in calls):
            return super().issue_group(calls)
        for call in calls:
            self._check(call)
        local = [call for call in calls if self._is_local(call)]
        opened = [self._compare(call) for call in calls if _is_open(call) and call not in local]
        parts = [self._prepare(call) for call in calls if not _is_open(call) and call not in local]
        works: list[Work] = [self._local(call) for call in local]
        if parts:
            self.settle()
            works.append(self._run(parts))
        return GroupWork([*works, *opened])

    def _run(self, parts: Sequence[_Prepared]) -> Work:
        def between() -> None:
            for part in parts:
                part.between()

        with torch.inference_mode():
            run_messages([m for part in parts for m in part.messages], between)
        return self._work([m for part in parts for m in part.met])

    def _note(self, call: CommCall) -> None:
        self.num_waits += 1
        self.last_call = call.where

    def _work(self, met: Sequence[Message]) -> Work:
        turn = self.fabric.turn()
        turn.take()
        return _Ordered(turn, met)

    def _prepare(self, call: CommCall) -> _Prepared:
        """What carries ``call`` out; remembered with it."""
        if call.kind in MESSAGES:
            made = _Prepared(self, None, messages_of(self._mail, call), self._own_part(call), meets=call.kind == "send")
        else:
            made = _Prepared(self, collective_of(self._team(call.team, call.channel), call), (), None, meets=False)
        call.memo["symm"] = made
        self._note(call)
        return made

    def _is_local(self, call: CommCall) -> bool:
        here = call.team.index(self.rank)
        return len(call.team) == 1 or (call.kind == "send" and call.to == here) or (call.kind == "recv" and call.source == here)

    def _local(self, call: CommCall) -> Work:
        """Of this rank alone: a team of one, or a message to itself, which must meet its other end."""
        if call.kind in ("send", "recv"):
            return super().issue(call)
        run_collective([call])
        return GroupWork(())

    def _own_part(self, call: CommCall) -> Callable[[], None] | None:
        """The copy of what a rank sends to itself."""
        here = call.team.index(self.rank)
        if call.kind == "permute" and call.source == here:
            x, out = call.ins[0], call.outs[0]
        elif call.kind == "alltoallv" and call.send_counts is not None and call.recv_counts is not None:
            x = call.ins[0].narrow(0, sum(call.send_counts[:here]), call.send_counts[here])
            out = call.outs[0].narrow(0, sum(call.recv_counts[:here]), call.recv_counts[here])
        else:
            return None
        overlap = share_memory(x, out)

        def copy() -> None:
            out.copy_(x.clone() if overlap else x)

        return copy if num_bytes(x) else None

    def _team(self, ranks: tuple[int, ...], channel: str) -> Team:
        team = self._teams.get((ranks, channel))
        if team is None:
            team = self._teams[ranks, channel] = Team(self.heap, ranks)
        return team

    # ---- calls that no program has agreed on

    def _compare(self, call: CommCall) -> _Compared:
        """Ask the members whether they mean the same; the facts travel over gloo, while the host goes on."""
        members = call.team
        if call.kind in ("send", "recv"):
            other = call.team[(call.to if call.kind == "send" else call.source) or 0]
            members = (self.rank, other) if call.kind == "send" else (other, self.rank)
        facts = torch.tensor(agree.facts(call, self.rank), dtype=torch.int64, device="cpu")
        table = torch.empty((len(members), facts.numel()), dtype=torch.int64, device="cpu")
        channel = f"facts {call.kind in ('send', 'recv')} {call.channel}"
        gather = CommCall("allgather", members, (facts[None],), (table,), where=place_of(call), channel=channel, agreed=True)
        made = _Compared(self, call, members, super().issue(gather), table)
        self._open.append(made)
        return made

    def settle(self) -> None:
        """Carry out, together, all calls that are being compared, once their members have answered; those that disagree are not."""
        if not self._open:
            return
        opened, self._open = self._open, []
        for one in opened:
            self._await_facts(one)
        good = []
        for one in opened:
            one.turn.take()
            if (why := agree.complaint(one.table.tolist())) is None:
                good.append(one)
                continue
            text = show_text(one.call)
            texts = self.exchange("mismatch", text, one.members)
            one.error = agree.mismatch(why, None, one.members, texts, self.rank, statement=one.call.where() or None)
            if len(one.members) == self.size and one.call.kind not in ("send", "recv"):
                self._known_to_all = one.error
        parts = [self._prepare(one.call) for one in good]
        if parts:
            done = self._run(parts)
            for one in good:
                one.work = done

    def _await_facts(self, one: _Compared) -> None:
        start = last = time.monotonic()
        pending = one.comparing if isinstance(one.comparing, Pending) else None
        while not one.comparing.done():
            time.sleep(0.0001)
            now = time.monotonic()
            if now - last > _LOOK:
                last = now
                self._look(one.members, show_text(one.call), now - start)
                if now - start > self.timeout:
                    raise self.late(show_text(one.call), pending)
        one.comparing.wait()

    # ---- peers' memory, for programs

    def symmetric(self, ranks: Sequence[int], size: int, what: str) -> Window:
        """``size`` bytes of each of ``ranks`` that all of them can address, zeroed. They all call this, in the same order; it blocks."""
        return self.heap.take(ranks, size, what)

    def leave(self, window: Window) -> None:
        """The program that had ``window`` is gone."""
        self.heap.leave(window)

    def signal(self, address: int, value: int) -> None:
        """Write ``value`` into a flag, here or on a peer, after what the current stream has done so far."""
        self.fabric.write(address, value)

    def await_flag(self, address: int, value: int, where: Callable[[], str]) -> None:
        """Hold the current stream until the own flag is at least ``value``."""
        self.num_waits += 1
        self.last_call = where
        self.fabric.wait(address, value, where)

    # ---- failures and the end

    def look(self, where: Callable[[], str], seconds: float) -> None:
        """For waits that hold the host: raise when the world has failed, or after the timeout."""
        error = self.failed_elsewhere(where()) or (self.late(where()) if seconds > self.timeout else None)
        if error is not None:
            raise error

    def late(self, statement: str, pending: Pending | None = None) -> HostIrError:
        """Nothing came within the timeout: tell the others, and return what to raise."""
        self._post_progress(statement)
        failure = Failure(self.rank, "CommTimeout", f"rank {self.rank} waited {self.timeout:g} s in {statement}")
        return self._break(self._echo(self._board.post_failure(failure), statement, pending))

    def failed_elsewhere(self, statement: str) -> HostIrError | None:
        """The error to raise when the world has failed, or when a rank has died before it was done."""
        failure = self._board.failure()
        if failure is None:
            dead = [r for r in self._board.dead(range(self.size)) if self._board.read("closed", r) is None]
            if not dead:
                return None
            failure = self._failure_or(Failure(dead[0], "PeerError", f"rank {dead[0]} died: its process is gone", (dead[0],)))
        return self._break(self._echo(failure, statement))

    def remember(self, error: HostIrError) -> None:
        """The world failed while only the GPU was waiting: the caller must still hear of it."""
        self._unheard = error

    def _refuse_if_broken(self, call: CommCall) -> None:
        if self.broken is not None:
            self._unheard = None
        super()._refuse_if_broken(call)

    def fail(self, error: BaseException) -> None:
        self._unheard = None
        super().fail(error)

    def state(self) -> dict[tuple[str, tuple[int, ...], str], int] | None:
        known = super().state()
        if known is None or self._open:
            return None
        self.fabric.quiesce()
        known |= {("symm", ranks, channel): team.number for (ranks, channel), team in self._teams.items()}
        return known | {("window", ranks, ""): count for ranks, count in self.heap.counts().items()} | self._mail.counts()

    def close(self) -> None:
        """Leave, when all that was queued is done. An error that nobody has heard of yet is raised."""
        if self._closed:
            return
        self.fabric.quiesce()
        while self.on_close:
            self.on_close.pop()()
        super().close()
        if (unheard := self._unheard) is not None:
            self._unheard = None
            raise unheard


def _is_open(call: CommCall) -> bool:
    """Whether the members have still to compare this call: by hand, or with counts that may come from data."""
    return not call.agreed or call.kind == "alltoallv"


def show_text(call: CommCall) -> str:
    """The call and where it stands, for messages."""
    where = call.where()
    return f"{show_call(call)}{f'  [{where}]' if where else ''}"
