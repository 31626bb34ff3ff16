"""Ranks as processes of this machine, started in milliseconds: a server that has torch loaded forks them,
because forking this process would copy torch's threads in an unusable state.

A crew is N such processes in one World. It gets its work
by value, so a function may be a lambda and nothing of the caller's main module is imported again, and one piece after another, until a
piece fails or leaves something under way. Nothing outlives ``end``.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from hostir.launch import child, report
from hostir.launch.server import start_process, start_server
from hostir.runtime.comms.board import Board, Failure

GRACE: Final = 5.0  # seconds for the other ranks to end by themselves after one has failed
_STACKS: Final = 1.0  # seconds for a rank that is stuck to print where


@dataclass
class Outcome:
    """What became of one piece of work: results by rank, reports of the ranks that failed, and what each rank printed."""

    values: dict[int, Any] = field(default_factory=dict)
    reports: dict[int, report.Report] = field(default_factory=dict)
    printed: dict[int, tuple[str, str]] = field(default_factory=dict)


class Crew:
    """``num_ranks`` processes. ``captures``: what they print goes into ``Outcome.printed``, else where this process prints.

    ``transport``: gloo, nccl, symm, or None for what suits the devices; ``variables`` are added to each rank's environment.
    """

    def __init__(
        self, num_ranks: int, *, device: str | None = None, transport: str | None = "gloo", variables: Mapping[str, str] | None = None,
        captures: bool = False,
    ) -> None:  # fmt: skip
        self.num_ranks = num_ranks
        self.is_usable = True
        self._captures = captures
        self._variables = dict(variables or {})
        self._folder = tempfile.TemporaryDirectory(prefix="hostir-")
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._number = 0
        self._read: dict[Path, int] = {}
        try:
            start_server()
            for rank in range(num_ranks):
                arguments = (self._folder.name, rank, num_ranks, device, transport, captures)
                self._processes[rank], self._pipes[rank] = start_process(child.main, arguments, f"rank {rank}")
        except BaseException:
            self.end()
            raise

    def run(self, payload: bytes, *, timeout: float, limit: float | None = None, grace: float | None = None, is_last: bool = False) -> Outcome:
        """One piece of work: ``payload`` holds a function, its arguments and keywords (``by_value.dumps_call``).

        ``timeout`` (seconds) bounds each communication, ``limit`` the whole; after a failure the other ranks have ``grace`` seconds (``GRACE``).
        Ranks that do not end are reported, with where they are. ``is_last``: the ranks leave their World before they report.
        """
        assert self.is_usable, "a crew that has failed is replaced"
        self._number += 1
        message = pickle.dumps(child.Piece(self._number, payload, os.environ | self._variables, os.getcwd(), timeout, is_last))
        for pipe in self._pipes.values():
            try:
                pipe.send_bytes(message)
            except OSError:
                continue  # it has died; its sentinel says so
        out = Outcome()
        states: dict[int, Any] = {}
        open_ranks = set(self._processes)
        deadline = None if limit is None else time.monotonic() + limit
        try:
            while open_ranks:
                watched: dict[Any, int] = {self._pipes[r]: r for r in open_ranks} | {self._processes[r].sentinel: r for r in open_ranks}
                ready = wait(list(watched), None if deadline is None else max(deadline - time.monotonic(), 0.0))
                if not ready and (out.reports or not self.is_usable):
                    break
                for rank in sorted({watched[r] for r in ready}):
                    open_ranks.discard(rank)
                    self._take(rank, out, states)
                if not ready:
                    self._tell(Failure(min(open_ranks), "CommTimeout", f"the ranks had {limit:g} s", tuple(open_ranks)))
                if (out.reports or not ready) and self.is_usable:
                    self.is_usable = False
                    deadline = time.monotonic() + (GRACE if grace is None else grace)
            out.reports |= {r: report.of_stuck(r, None if out.reports else limit, self._where(r)) for r in sorted(open_ranks)}
        finally:
            self.is_usable = self.is_usable and not is_last and len(out.values) == self.num_ranks and can_go_on(states)
            if self._captures:
                out.printed = {rank: (self._text(f"out{rank}"), self._text(f"err{rank}")) for rank in self._processes}
        return out

    def _take(self, rank: int, out: Outcome, states: dict[int, child.State]) -> None:
        try:
            message = self._pipes[rank].recv_bytes() if self._pipes[rank].poll() else b""
        except (EOFError, OSError):
            message = b""
        if message[:1] == b"+":
            states[rank], value = pickle.loads(message[1:])
            out.values[rank] = pickle.loads(value)
        elif message[:1] == b"-":
            out.reports[rank] = child.report_of(message[1:])
        else:
            self._processes[rank].join(GRACE)
            gone = report.of_exit(rank, self._processes[rank].exitcode or 0)
            out.reports[rank] = gone
            self._tell(Failure(rank, "PeerError", gone.headline, (rank,)))  # a process that died cannot say so itself

    def _tell(self, failure: Failure) -> None:
        if self.num_ranks > 1:
            store = dist.FileStore(os.path.join(self._folder.name, "store"), -1)
            Board.leave_failure(dist.PrefixStore("hostir/0", store), failure)

    def _where(self, rank: int) -> str:
        """Where a rank is that does not end: its stacks, or why it cannot say."""
        pid = self._processes[rank].pid
        state = _state(pid or 0)
        if state == "T":
            return "its process is stopped (SIGSTOP)"
        if not self._captures or pid is None or state in ("", "Z"):
            return ""
        path = Path(self._folder.name, f"err{rank}")
        before = path.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        Board.poll(lambda: path.stat().st_size > before, _STACKS)
        time.sleep(0.05)  # it prints all of it at once
        with path.open("rb") as file:
            file.seek(before)
            stacks = file.read().decode(errors="replace")
        os.truncate(path, before)
        return report.users_part(stacks)

    def _text(self, name: str) -> str:
        """What has been printed there since the last time."""
        path = Path(self._folder.name, name)
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
            self._read[path] = file.tell()
        return text.decode(errors="replace")

    def end(self, patience: float = 1.0) -> None:
        """No process is left when this returns; they have ``patience`` seconds to leave by themselves."""
        self.is_usable = False
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes.values():
            if process.is_alive() and _state(process.pid or 0) == "T":
                process.kill()
        deadline = time.monotonic() + patience
        for process in self._processes.values():
            process.join(max(deadline - time.monotonic(), 0.05))
        for process in self._processes.values():
            if process.is_alive():
                process.terminate()
        for process in self._processes.values():
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.end(1.0 if kind is None or issubclass(kind, Exception) else 0.0)


def can_go_on(states: dict[int, child.State]) -> bool:
    """Whether all ranks have done equally much with all of their partners, and nothing is under way."""
    for state in states.values():
        if state is None:
            return False
        for key, number in state.items():
            if any((states[other] or {}).get(key) != number for other in key[1]):
                return False
    return True


def _state(pid: int) -> str:
    """One letter: ``T`` for stopped, ``Z`` for a zombie; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
