"""Ranks as processes of this machine, started in milliseconds: a server that has torch loaded forks them.

Forking this process itself would copy torch's threads in an unusable state. The function travels by value, so it may be a lambda, and
nothing of the caller's main module is imported again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist

from hostir.launch import child, report
from hostir.launch.by_value import dumps_call
from hostir.runtime.comms.board import Board, Failure

GRACE: Final = 5.0  # seconds for the other ranks to end by themselves after one has failed
_PRELOAD: Final = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "hostir.dispatch", "hostir.launch.child"]
_STARTING: Final = threading.Lock()


def run_processes(
    fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout: float, device: str | torch.device | None
) -> list[Any]:
    """``fn(world, *args, **kwargs)`` in ``num_ranks`` processes over gloo; the results in rank order, or RankError."""
    payload = dumps_call(fn, (fn, args, kwargs, None if device is None else str(device), timeout))
    with tempfile.TemporaryDirectory(prefix="hostir-") as folder:
        ranks = _Ranks(payload, folder, num_ranks)
        try:
            return ranks.results()
        finally:
            ranks.end()


class _Ranks:
    """The processes of one call."""

    def __init__(self, payload: bytes, folder: str, num_ranks: int) -> None:
        self.folder = folder
        self.num_ranks = num_ranks
        self.processes: dict[int, ForkServerProcess] = {}
        self.pipes: dict[int, Connection] = {}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        environment = dict(os.environ)
        try:
            for rank in range(num_ranks):
                mine, theirs = context.Pipe(duplex=False)
                arguments = (payload, environment, folder, rank, num_ranks, theirs)
                process = context.Process(target=child.main, args=arguments, name=f"rank {rank}", daemon=True)
                _start(process)
                theirs.close()
                self.processes[rank] = process
                self.pipes[rank] = mine
        except BaseException:
            self.end()
            raise

    def results(self) -> list[Any]:
        """Wait for all; after a failure the others have GRACE seconds."""
        values: dict[int, Any] = {}
        reports: dict[int, report.Report] = {}
        deadline = None
        open_ranks = set(self.processes)
        while open_ranks:
            watched: dict[Any, int] = {self.pipes[r]: r for r in open_ranks} | {self.processes[r].sentinel: r for r in open_ranks}
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready = wait(list(watched), left)
            if not ready:
                break
            for rank in sorted({watched[r] for r in ready}):
                open_ranks.discard(rank)
                self._take(rank, values, reports)
            if reports and deadline is None:
                deadline = time.monotonic() + GRACE
        if reports:
            raise report.rank_error([*reports.values(), *(report.of_stuck(r, GRACE) for r in open_ranks)])
        return [values[r] for r in range(self.num_ranks)]

    def _take(self, rank: int, values: dict[int, Any], reports: dict[int, report.Report]) -> None:
        try:
            message = self.pipes[rank].recv_bytes() if self.pipes[rank].poll() else b""
        except (EOFError, OSError):
            message = b""
        if message[:1] == b"+":
            values[rank] = pickle.loads(message[1:])
        elif message[:1] == b"-":
            reports[rank] = child.report_of(message[1:])
        else:
            self.processes[rank].join(5.0)
            reports[rank] = report.of_exit(rank, self.processes[rank].exitcode or 0)
            self._tell(reports[rank])

    def _tell(self, gone: report.Report) -> None:
        """A process that died cannot say so itself."""
        if self.num_ranks > 1:
            store = dist.FileStore(os.path.join(self.folder, "store"), -1)
            failure = Failure(gone.rank, "PeerError", gone.headline, (gone.rank,))
            Board.leave_failure(dist.PrefixStore("hostir/0", store), failure)

    def end(self) -> None:
        """No process is left when this returns."""
        deadline = time.monotonic() + 1.0
        for process in self.processes.values():
            process.join(max(deadline - time.monotonic(), 0.05))
        for process in self.processes.values():
            if process.is_alive():
                process.terminate()
        for process in self.processes.values():
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self.pipes.values():
            pipe.close()


def _start(process: ForkServerProcess) -> None:
    """Start without telling the child which file is the main module: it must not run the caller's script again."""
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
