"""Someone who looks while the GPU waits: a stream that holds for a flag cannot give up by itself, and the host may be waiting for it.

A thread looks at the world a few times a second. When another rank has failed or died, or when a stream has not moved for longer than
the timeout, it lets every wait of this rank end. What the streams then compute is garbage, and nobody gets it: the next communication,
or the end of the world, raises the reason.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from hostir.errors import HostIrError
from hostir.runtime.comms.symm_shim import stream_of

_PERIOD: Final = 0.25  # seconds between two looks


class Watched(Protocol):
    """What a ``Watch`` must know of a rank's comms."""

    timeout: float
    num_waits: int
    last_call: Callable[[], str]
    broken: HostIrError | None

    def failed_elsewhere(self, statement: str) -> HostIrError | None: ...

    def late(self, statement: str) -> HostIrError: ...

    def remember(self, error: HostIrError) -> None: ...


class Streams(Protocol):
    """What it must know of the fabric."""

    device: torch.device
    waiting: set[int]

    def release(self) -> None: ...


class Watch:
    """Runs until ``end``, or until the world has failed."""

    def __init__(self, comms: Watched, fabric: Streams) -> None:
        self._comms = comms
        self._fabric = fabric
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostir: watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self._fabric.device)
        seen, since = 0, time.monotonic()
        marks: list[torch.cuda.Event] = []
        while not self._over.wait(_PERIOD):
            comms = self._comms
            heard = comms.broken is not None
            if not heard:
                if comms.num_waits == seen and not marks:
                    continue
                with contextlib.suppress(RuntimeError):  # the store's host has left: the end is near, and says so itself
                    comms.failed_elsewhere(comms.last_call())
            if all(mark.query() for mark in marks):
                marks, since = [], time.monotonic()
                if comms.num_waits != seen:
                    seen = comms.num_waits
                    marks = [self._mark(stream) for stream in list(self._fabric.waiting)]
            elif comms.broken is None and time.monotonic() - since > comms.timeout:
                comms.late(comms.last_call())
            if comms.broken is not None:
                if not heard:
                    comms.remember(comms.broken)
                self._fabric.release()  # again and again: the host may queue more before it hears

    def _mark(self, stream: int) -> torch.cuda.Event:
        """An event that is over when ``stream`` has done all that it has been given so far."""
        event = torch.cuda.Event()
        event.record(stream_of(stream, self._fabric.device))
        return event
