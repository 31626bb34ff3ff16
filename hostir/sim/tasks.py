"""Tasks in simulated time: each begins when what it comes after has ended and its links are free, and calls share the processors.

Most tasks take a fixed time. A call on a device is elastic: it slows down while communication kernels and other calls need the same
processors, so its end moves whenever one of those begins or ends. Every task remembers what held it back; walking that chain from
the last task gives the critical path.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MAX_LOAD: Final = 0.9  # communication never takes more of a device than this
_END, _LOAD, _READY = 0, 1, 2  # at one moment: first what ends, then what the load becomes, then what begins


@dataclass(slots=True, eq=False)
class Task:
    """Something that takes ``cost`` once all that it comes after (``first``: one of them) have ended and its ``links`` are free.

    ``start`` is at first the earliest that it may begin. ``devices`` are the ranks of whose processors it uses the part ``share``; an
    ``elastic`` task (a call) gets what the others leave, and takes longer.
    """

    cost: float = 0.0
    links: tuple[Hashable, ...] = ()
    first: bool = False
    devices: tuple[int, ...] = ()
    share: float = 0.0
    elastic: bool = False
    missing: int = 0
    start: float = 0.0
    end: float = 0.0
    cause: Task | None = None
    next: list[Task] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def after(self, *before: Task) -> None:
        for b in before:
            b.next.append(self)
        self.missing += len(before)


@dataclass(slots=True, eq=False)
class _Running:
    """An elastic task under way: how much of its cost is left, at which rate it goes, since when."""

    task: Task
    left: float
    since: float
    rate: float = 0.0
    version: int = 0


@dataclass(slots=True, eq=False)
class _Device:
    """The processors of one rank: what communication takes of them, and the calls that share the rest."""

    load: float = 0.0
    calls: list[_Running] = field(default_factory=list)

    def rate(self) -> float:
        taken, wanted = min(self.load, MAX_LOAD), sum(c.task.share for c in self.calls)
        return min(1.0, (1.0 - taken) / wanted) if wanted else 1.0


class _Run:
    """The queue of what happens next."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.number = {id(t): i for i, t in enumerate(tasks)}
        self.queue: list[tuple[float, int, int, Any]] = [(t.start, _READY, i, None) for i, t in enumerate(tasks) if not t.missing]
        self.serial = len(tasks)
        self.devices: dict[int, _Device] = {}
        self.free: dict[Hashable, Task] = {}
        heapq.heapify(self.queue)

    def push(self, time: float, what: int, about: Any) -> None:
        self.serial += 1
        heapq.heappush(self.queue, (time, what, self.serial, about))

    def run(self) -> None:
        while self.queue:
            now, what, number, about = heapq.heappop(self.queue)
            if what == _READY:
                self.begin(self.tasks[number], now)
            elif what == _LOAD:
                devices, share = about
                for rank in devices:
                    device = self.devices.setdefault(rank, _Device())
                    device.load += share
                    self.adjust(device, now)
            elif isinstance(about, Task):
                self.release(about)
            else:
                device, running, version = about
                self.finish(device, running, version, now)

    def begin(self, t: Task, ready: float) -> None:
        t.start = ready
        for link in t.links:
            holder = self.free.get(link)
            if holder is not None and holder.end > t.start:
                t.start, t.cause = holder.end, holder
        if t.elastic and t.share:
            (rank,) = t.devices
            device = self.devices.setdefault(rank, _Device())
            device.calls.append(_Running(t, t.cost, ready))
            self.adjust(device, ready)
            return
        t.end = t.start + t.cost
        for link in t.links:
            self.free[link] = t
        if t.share and t.cost:
            self.push(t.start, _LOAD, (t.devices, t.share))
            self.push(t.end, _LOAD, (t.devices, -t.share))
        if any(n.first for n in t.next):
            self.push(t.end, _END, t)  # who comes after the first of several must not be told before it has ended
        else:
            self.release(t)

    def adjust(self, device: _Device, now: float) -> None:
        """The rate of the calls on ``device`` may be another one from ``now`` on."""
        rate = device.rate()
        for c in device.calls:
            if c.rate != rate:
                c.left -= (now - c.since) * c.rate
                c.since, c.rate = now, rate
                c.version += 1
                self.push(now + max(c.left, 0.0) / rate, _END, (device, c, c.version))

    def finish(self, device: _Device, running: _Running, version: int, now: float) -> None:
        if version == running.version:
            running.task.end = now
            device.calls.remove(running)
            self.adjust(device, now)
            self.release(running.task)

    def release(self, t: Task) -> None:
        """``t`` has ended, or its end is known: who waited for it."""
        for n in t.next:
            if n.first and n.missing <= 0:
                continue
            if n.first or t.end > n.start or (t.end == n.start and n.cause is None):
                n.start, n.cause = max(n.start, t.end), t
            n.missing = 0 if n.first else n.missing - 1
            if not n.missing:
                heapq.heappush(self.queue, (n.start, _READY, self.number[id(n)], None))
                n.missing = -1


def run(tasks: Sequence[Task]) -> None:
    """Give every task its start and end, in the order in which they are ready; what shares a link goes one after another."""
    _Run(tasks).run()


def critical(tasks: Iterable[Task]) -> list[Task]:
    """The chain of tasks that decides when the last one ends, first to last: each begins when the one before ends, the first when it may."""
    t: Task | None = max(tasks, key=lambda t: t.end, default=None)
    chain = []
    while t is not None:
        chain.append(t)
        t = t.cause
    return chain[::-1]
