"""Marks in time while something runs, kept cheap: what they mean is worked out afterwards.

A CPU's clock gives nanoseconds at once. A GPU is marked with events on a stream, which become times only when the device has passed
them; they come from a pool, because making one costs more than recording it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from hostir.errors import InputError
from hostir.sim.events import Kind

Mark: TypeAlias = Any  # int on a CPU, torch.cuda.Event on a GPU


class Labels(Protocol):
    """What an executor says of itself in a profile. Read when the results are, so that late compilation counts."""

    scheduler: str
    compile_ms: float
    num_kernels: int

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Node:
    """What an interval stands for: a unit's run, a communication, a copy, or a deed of the host program.

    ``key`` joins what becomes one row. ``labels`` is there for segments, ``comm``, ``team`` (world ranks) and ``transport`` for
    communications and copies. Bytes are those of the elements that one execution reads and writes on this rank.
    """

    name: str
    kind: Kind
    lane: str = "main"
    key: Hashable = None
    program: str = ""
    input_bytes: int = 0
    output_bytes: int = 0
    labels: Labels | None = None
    comm: str = ""
    team: tuple[int, ...] = ()
    transport: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


class HostClock:
    """Nanoseconds of this machine, the same for all its processes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        return time.perf_counter_ns()

    def push(self, text: str) -> Any:
        return None

    def pop(self, handle: Any) -> None:
        pass

    def span(self, origin: Mark, start: Mark, end: Mark) -> tuple[int, int]:
        """``start`` and ``end`` in ns."""
        return start, max(start, end)

    def settle(self) -> None:
        """Return when every mark can be read."""

    def give_back(self, marks: Sequence[Mark]) -> None:
        pass


class DeviceClock(HostClock):
    """Events of one CUDA device. Its first use waits for the device once, to line up with the host's clock."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._free: list[torch.cuda.Event] = []
        torch.cuda.synchronize(device)
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device) if stream is None else stream)
        return event

    def push(self, text: str) -> Any:
        return torch.cuda.nvtx.range_start(text)

    def pop(self, handle: Any) -> None:
        torch.cuda.nvtx.range_end(handle)

    def span(self, origin: Mark, start: Mark, end: Mark) -> tuple[int, int]:
        # Milliseconds of an event pair are a 32-bit float: short distances are exact, so positions go by the run's own origin.
        begin = self._anchor_ns + round(self._anchor.elapsed_time(origin) * 1e6) + round(origin.elapsed_time(start) * 1e6)
        return begin, begin + max(0, round(start.elapsed_time(end) * 1e6))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def give_back(self, marks: Sequence[Mark]) -> None:
        self._free += marks


class Run:
    """The marks of one run on one rank and device; every interval is a number that leads to its Node in ``nodes``.

    An interval begins once and ends once, in any order among others: communications are under way at once. ``begin`` and ``end``
    mark the current stream unless one is given.
    """

    def __init__(self, clock: HostClock, rank: int) -> None:
        self.clock = clock
        self.rank = rank
        self.nodes: Sequence[Node] = ()
        self._starts: dict[int, Mark] = {}
        self._ends: dict[int, Mark] = {}
        self._ranges: dict[int, Any] = {}
        self._origin = clock.mark()

    @property
    def num_marks(self) -> int:
        return 1 + len(self._starts) + len(self._ends)

    def begin(self, number: int, stream: torch.cuda.Stream | None = None) -> None:
        if number in self._starts:
            raise InputError(f"interval {number} of this run has begun already")
        self._ranges[number] = self.clock.push(self.nodes[number].name)
        self._starts[number] = self.clock.mark(stream)

    def end(self, number: int, stream: torch.cuda.Stream | None = None) -> None:
        if number not in self._starts or number in self._ends:
            raise InputError(f"interval {number} of this run {'has ended already' if number in self._ends else 'has not begun'}")
        self._ends[number] = self.clock.mark(stream)
        self.clock.pop(self._ranges.pop(number))

    def ended(self, number: int, work: Any) -> None:
        """The wait for ``work`` has returned: the interval ended then, or earlier where the work knows (``ended_ns``)."""
        self.end(number)
        known = ended_ns(work)
        if known and isinstance(self._ends[number], int):
            self._ends[number] = min(self._ends[number], known)

    def close(self) -> None:
        """End the ranges that an error left open."""
        for handle in self._ranges.values():
            self.clock.pop(handle)
        self._ranges.clear()

    def spans(self) -> list[tuple[Node, int, int]]:
        """Every interval with its start and end in ns, in order of number. Its marks go back to the clock: call it once."""
        found = [(self.nodes[i], *self.clock.span(self._origin, start, self._ends[i])) for i, start in sorted(self._starts.items())]
        self.clock.give_back([self._origin, *self._starts.values(), *self._ends.values()])
        return found


def ended_ns(work: Any) -> int:
    """When a finished communication ended, on the clock of ``time.perf_counter_ns``; 0 where its transport does not say."""
    if (parts := getattr(work, "works", None)) is not None:
        times = [ended_ns(part) for part in parts]
        return max(times) if times and all(times) else 0
    return int(getattr(work, "ended_ns", 0))


class Clocks:
    """The clock of each device, made at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[torch.device, HostClock] = {}

    def of(self, device: torch.device) -> HostClock:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with self._lock:
            if device not in self._made:
                self._made[device] = DeviceClock(device) if device.type == "cuda" else HostClock(device)
            return self._made[device]

    def settle(self) -> None:
        """Wait for every device that was marked."""
        for clock in self._made.values():
            clock.settle()


def copy_gbs(clock: HostClock) -> float:
    """GB/s read and written by the fastest of several copies that fit no cache."""
    size = (256 if clock.device.type == "cuda" else 64) << 20
    a = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    b = torch.empty_like(a)
    best = 0.0
    for _ in range(6):
        start = clock.mark()
        b.copy_(a)
        end = clock.mark()
        clock.settle()
        since, until = clock.span(start, start, end)
        best = max(best, 2 * size / max(until - since, 1))
        clock.give_back([start, end])
    return best
