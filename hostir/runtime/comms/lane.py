"""One team's queue over a backend: the process group in the making, the communications in order, each with its posted work."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hostir.errors import HostIrError
from hostir.runtime.comms.gloo import Steps
from hostir.runtime.comms.protocol import CommCall, show_call


def keep_forever(group: object) -> None:
    """Never destroy ``group``, not even when the interpreter ends: a group in trouble would wait for its works."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Wire(Protocol):
    """What a backend must do for ``ProcessComms``."""

    name: str

    def open(self, store: dist.Store, position: int, num_members: int) -> Any: ...

    def compare(self, group: Any, numbers: Sequence[int], num_members: int) -> tuple[Any, torch.Tensor]: ...

    def steps(self, group: Any, call: CommCall, here: int) -> Steps: ...


class Opening:
    """A process group in the making, in a thread of its own because backends block until all members have come."""

    def __init__(self, wire: Wire, store: dist.Store, position: int, num_members: int) -> None:
        self.group: Any = None
        self.error: Exception | None = None
        self._ended = threading.Event()

        def make() -> None:
            try:
                self.group = wire.open(store, position, num_members)
            except Exception as error:  # noqa: BLE001  raised by whoever waits
                self.error = error
            self._ended.set()

        threading.Thread(target=make, name="hostir: connecting", daemon=True).start()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("still connecting")
        if self.error is not None:
            raise RuntimeError(f"cannot connect: {self.error}") from self.error


class Lane:
    """One team (or one pair, for messages) on one channel: its group, and its communications in order."""

    def __init__(self, ranks: tuple[int, ...], channel: str, opening: Opening) -> None:
        self.ranks = ranks
        self.key = "-".join(map(str, ranks)) + (f"/{channel}" if channel else "")
        self.opening = opening
        self.queue: deque[Pending] = deque()  # those that have not posted all their works
        self.issued = 0
        self.last: Pending | None = None


class Driver(Protocol):
    """Whoever pushes a communication on."""

    def poll(self, pending: Pending) -> bool: ...

    def wait_for(self, pending: Pending) -> None: ...


class Pending:
    """A communication under way."""

    def __init__(self, comms: Driver, lane: Lane, call: CommCall) -> None:
        self.comms = comms
        self.lane = lane
        self.call = call
        self.number = lane.issued
        self.thread = threading.get_ident()
        self.steps: Steps | None = None
        self.current: Any = None  # the posted backend work
        self.is_posted = False  # no further work will be posted
        self.finished = False
        self.error: HostIrError | None = None

    def wait(self) -> None:
        if not self.finished:
            self.comms.wait_for(self)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.comms.poll(self)

    def text(self) -> str:
        where = self.call.where()
        return f"{show_call(self.call)}{f'  [{where}]' if where else ''}"
