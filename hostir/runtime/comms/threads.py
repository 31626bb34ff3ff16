"""N ranks as N threads of one process: the transport for tests, notebooks, one GPU, and a world of one.

Results are deterministic: the member that completes a communication carries it out for all, and reductions go in rank order. Two
calls meet as the language says: send and recv end together, a group posts all its parts at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from hostir.errors import HostIrError, InputError, PeerError
from hostir.runtime.comms.hub import Arrival, Hub
from hostir.runtime.comms.protocol import CommCall, Work, check_call


class GroupWork:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = tuple(works)

    def wait(self) -> None:
        """Wait for every part, also after one has failed; the first error is raised."""
        first: HostIrError | None = None
        for work in self.works:
            try:
                work.wait()
            except HostIrError as error:
                first = first or error
        if first is not None:
            raise first

    def done(self) -> bool:
        return all(work.done() for work in self.works)


class ThreadComms:
    """One rank's end of a ``Hub``."""

    def __init__(self, hub: Hub, rank: int, name: str = "threads") -> None:
        self.name = name
        self.rank = rank
        self.size = hub.size
        self.timeout = hub.timeout
        self.run_locks: dict[tuple[int, ...], threading.RLock] = {}
        self._hub = hub
        self._pid = os.getpid()
        self._closed = False

    def issue(self, call: CommCall) -> Work:
        self._check(call)
        arrival = Arrival(self._hub, self.rank, call)
        self._hub.post([arrival])
        return arrival

    def issue_group(self, calls: Sequence[CommCall]) -> Work:
        for call in calls:
            self._check(call)
        arrivals = [Arrival(self._hub, self.rank, call) for call in calls]
        self._hub.post(arrivals)
        return GroupWork(arrivals)

    def exchange(self, tag: str, text: str, ranks: Sequence[int], patience: float | None = None) -> list[str]:
        return self._hub.exchange(self.rank, tag, text, tuple(ranks), patience)

    def state(self) -> dict[tuple[str, tuple[int, ...], str], int] | None:
        """Nothing to compare between threads; None when nothing can follow: failed, closed, or something is still under way."""
        return {} if not self._closed and self._hub.is_quiet() else None

    def fail(self, error: BaseException) -> None:
        self._hub.fail(self.rank, error)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hub.finish(self.rank)

    def _check(self, call: CommCall) -> None:
        check_call(call, self.rank, self.size)
        if self._closed:
            raise PeerError("this world is closed", rank=self.rank, statement=call.where() or None, cure="communicate inside `with world:`")
        if os.getpid() != self._pid:
            raise InputError(
                "a forked child cannot use the world of its parent",
                rank=self.rank,
                expected=f"process {self._pid}",
                got=f"process {os.getpid()}",
                cure="start processes with hir.launch.spawn, or fork before hir.launch.init",
            )
