"""``with hir.profile() as prof:`` what ran in between, how long it took and how much of the communication was hidden.

A profile goes one way, Ready → Running → Finished → Processed, and says so when it is used otherwise. What runs is told where to leave
its marks (``recording``); rows, the table and the trace are made from them afterwards. Whoever runs something asks ``active_profile()``
once a run; nothing else happens when there is none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self

import torch

from hostir.errors import InputError
from hostir.runtime.recording import Clocks, Labels, Node, Run, copy_gbs
from hostir.runtime.world import current_world
from hostir.sim.events import Overlap, TraceEvent, overlap_of, save_trace

MAX_MARKS: Final = 16384  # marks that wait to be read; past it they are, which waits for the device once

_ACTIVE: Final[ContextVar[Profile | None]] = ContextVar("hostir_profile", default=None)
active_profile: Final = _ACTIVE.get


def running_profile() -> Profile | None:
    """The profile that wants to know what runs here, or None. A thread that outlives the profile it was born under is left alone."""
    found = _ACTIVE.get()
    if found is not None and found.state is not State.RUNNING:
        _ACTIVE.set(None)
        return None
    return found


class State(Enum):
    """Where a profile is in its life."""

    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    PROCESSED = "processed"


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank did ``calls`` times. Times, bytes and kernels are sums over the calls; ``events`` are the single ones.

    ``kernel_ms`` is time on the device between the marks around each call (on a CPU: time of the host). ``kernels`` counts what the
    executor launches for its operations: 0 for a segment that computes nothing.
    """

    name: str
    program: str
    rank: int
    executor: str
    scheduler: str
    device: str
    calls: int
    kernels: int
    compile_ms: float
    kernel_ms: float
    input_bytes: int
    output_bytes: int
    events: tuple[TraceEvent, ...]

    @property
    def gbs(self) -> float:
        """GB/s: bytes read and written by the time taken."""
        return (self.input_bytes + self.output_bytes) / self.kernel_ms / 1e6 if self.kernel_ms else 0.0


@dataclass(frozen=True, slots=True)
class CommunicationRow(Row):
    """A communication (or local copy) as a row: also which ``kind``, among which world ranks (``team``), over which ``transport``.

    ``input_bytes`` is what this rank gives, ``output_bytes`` what it gets.
    """

    kind: str
    team: tuple[int, ...]
    transport: str
    statement: str

    @property
    def ms(self) -> float:
        """From issue until the result is there, in milliseconds."""
        return self.kernel_ms

    @property
    def bytes(self) -> int:
        """The size of the message as collectives count it: the larger of what goes in and what comes out."""
        return max(self.input_bytes, self.output_bytes)

    @property
    def gbs(self) -> float:
        """GB/s: ``bytes`` by the time taken."""
        return self.bytes / self.kernel_ms / 1e6 if self.kernel_ms else 0.0


class Profile:
    """A profile. ``with`` starts and stops it; results are there from then on."""

    def __init__(self) -> None:
        self.state = State.READY
        self.wall_ms = 0.0
        self._clocks = Clocks()
        self._lock = threading.Lock()
        self._runs: list[tuple[Run, str]] = []
        self._marks = 0
        self._events: list[tuple[TraceEvent, Node, str]] = []
        self._token: Token[Profile | None] | None = None
        self._start_ns = 0
        self._rows: list[Row] = []
        self._ceilings: dict[str, float] = {}

    # ---- states

    def _need(self, state: State, verb: str, cure: str) -> None:
        if self.state is not state:
            raise InputError(f"this profile cannot {verb}", expected=f"a {state.value} profile", got=f"a {self.state.value} one", cure=cure)

    def start(self) -> None:
        """Ready → Running. InputError when it was started before, or when another profile is running here."""
        self._need(State.READY, "start", "a profile is used once: make another with hir.profile()")
        if running_profile() is not None:
            raise InputError("a profile is running already", cure="stop it first: profiles do not nest")
        self._token = _ACTIVE.set(self)
        self.state = State.RUNNING
        self._start_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Running → Finished, when every device that was marked has come to its last mark."""
        self._need(State.RUNNING, "stop", "start it first, and stop it once")
        assert self._token is not None
        try:
            _ACTIVE.reset(self._token)
        except ValueError:
            raise InputError("a profile is stopped in the thread that started it", cure="with hir.profile() as prof: …") from None
        self.state = State.FINISHED
        self._clocks.settle()
        self.wall_ms = (time.perf_counter_ns() - self._start_ns) / 1e6

    def process(self) -> None:
        """Finished → Processed: marks become times and rows. Reading a result of a finished profile does this."""
        self._need(State.FINISHED, "process", "stop it first, and process it once")
        self._read_marks()
        self._rows = [_row(found) for found in _grouped(self._events)]
        self.state = State.PROCESSED

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # ---- recording

    @contextmanager
    def recording(self, device: torch.device, rank: int) -> Iterator[Run]:
        """Marks for one run on ``device``, to which all its segments belong. What it runs is not asked to record itself as well.

        A run that raises, or that ends after the profile did, is not counted.
        """
        if self.state is State.READY:
            raise InputError("this profile cannot record", expected="a running profile", got="a ready one", cure="start it first")
        run = Run(self._clocks.of(device), rank)
        token = _ACTIVE.set(None)
        try:
            yield run
        finally:
            _ACTIVE.reset(token)
            run.close()
        with self._lock:
            if self.state is State.RUNNING:
                self._runs.append((run, str(run.clock.device)))
                self._marks += run.num_marks
            full = self._marks > MAX_MARKS
        if full:
            self._read_marks()

    def call(
        self, labels: Labels, name: str, args: Sequence[Any], function: Callable[[], list[torch.Tensor]], about: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """``function()``, one run of an executor on its own with tensors among ``args``, as a segment; the trace shows ``about``."""
        tensors = list({id(a): a for a in args if isinstance(a, torch.Tensor)}.values())
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        world = current_world()
        with self.recording(device, 0 if world is None else world.rank) as run:
            run.nodes = [Node(name, "segment")]
            run.begin(0)
            results = function()
            run.end(0)
            sizes = sum(map(tensor_bytes, tensors)), sum(map(tensor_bytes, results))
            run.nodes = [Node(name, "segment", key=id(labels), input_bytes=sizes[0], output_bytes=sizes[1], labels=labels, args=about)]
        return results

    def _read_marks(self) -> None:
        with self._lock:
            runs, self._runs, self._marks = self._runs, [], 0
        self._clocks.settle()
        for run, device in runs:
            self._events += [(_event(node, run.rank, start, end), node, device) for node, start, end in run.spans()]

    # ---- results

    def _processed(self) -> None:
        if self.state is State.FINISHED:
            self.process()
        if self.state is not State.PROCESSED:
            raise InputError("a profile has no results before it is finished", got=f"a {self.state.value} one", cure="read it after the with")

    @property
    def events(self) -> list[TraceEvent]:
        """One for every statement that did something: a unit's call, a communication, a copy, a fill, a sync. By rank, then start."""
        self._processed()
        return sorted((e for e, _, _ in self._events), key=lambda e: (e.rank, e.start_ns, e.end_ns))

    @property
    def segments(self) -> list[Row]:
        """A row for each unit of each program (and each executor that ran on its own) on each rank, in order of first use."""
        self._processed()
        return [r for r in self._rows if not isinstance(r, CommunicationRow)]

    @property
    def communications(self) -> list[CommunicationRow]:
        """A row for each statement that communicates, on each rank, in order of first use."""
        self._processed()
        return [r for r in self._rows if isinstance(r, CommunicationRow) and r.kind != "copy"]

    @property
    def copies(self) -> list[CommunicationRow]:
        """A row for each ``copy`` within a rank's memory."""
        self._processed()
        return [r for r in self._rows if isinstance(r, CommunicationRow) and r.kind == "copy"]

    @property
    def overlap_by_rank(self) -> dict[int, Overlap]:
        """How much of its communication each rank hides behind segments."""
        events = self.events
        return {rank: overlap_of(e for e in events if e.rank == rank) for rank in sorted({e.rank for e in events})}

    @property
    def overlap(self) -> Overlap:
        """Of the rank with the most exposed communication."""
        return max(self.overlap_by_rank.values(), key=lambda o: o.exposed_ms, default=Overlap())

    def copy_ceiling(self, device: str) -> float:
        """GB/s (read and written) of the best large copy on ``device``: what memory allows. Measured when first asked for."""
        if device not in self._ceilings:
            self._ceilings[device] = copy_gbs(self._clocks.of(torch.device(device)))
        return self._ceilings[device]

    def table(self, *, ceiling: bool = False) -> str:
        """Segments, communications, copies and the overlap as plain text. ``ceiling`` adds each segment's share of ``copy_ceiling``."""
        ranks = len({r.rank for r in self.segments} | {r.rank for r in self.communications}) > 1
        parts = []
        if rows := self.segments:
            head: tuple[str, ...] = (
                "segment",
                "executor",
                "scheduler",
                "device",
                "calls",
                "kernels",
                "compile ms",
                "kernel ms",
                "bytes in",
                "bytes out",
                "GB/s",
            )
            cells: list[tuple[object, ...]] = [
                (r.name, r.executor, r.scheduler, r.device, r.calls, r.kernels, r.compile_ms, r.kernel_ms, r.input_bytes, r.output_bytes, r.gbs)
                for r in rows
            ]
            if ceiling:
                head += ("% of copy",)
                cells = [(*c, 100 * r.gbs / self.copy_ceiling(r.device)) for c, r in zip(cells, rows, strict=True)]
            parts.append(_columns(head, cells, [r.rank for r in rows] if ranks else None))
        for title, moved in (("communication", self.communications), ("copy", self.copies)):
            if moved:
                head = (title, "team", "transport", "device", "calls", "ms", "bytes", "GB/s", "statement")
                lines: list[tuple[object, ...]] = [
                    (c.name, _team(c.team), c.transport, c.device, c.calls, c.ms, c.bytes, c.gbs, c.statement) for c in moved
                ]
                parts.append(_columns(head, lines, [c.rank for c in moved] if ranks else None))
        o = self.overlap
        if self.communications:
            worst = " (worst rank)" if ranks else ""
            parts.append(f"communication {o.total_ms:.3f} ms, exposed {o.exposed_ms:.3f} ms: {o.ratio:.1%}{worst}")
        return "\n\n".join(parts) if parts else "nothing ran"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, for ui.perfetto.dev or chrome://tracing: a process for each rank, a thread for each stream."""
        save_trace(path, self.events)


def profile() -> Profile:
    """A new profile: ``with hir.profile() as prof: run(a, b)``. It sees what runs in this thread and, as it was started before them, in
    rank threads; every process has its own."""
    return Profile()


def tensor_bytes(t: torch.Tensor) -> int:
    """Bytes of the elements of ``t``, each counted once where a dimension is expanded."""
    count = t.element_size()
    for size, stride in zip(t.shape, t.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


# ------------------------------------------------------------------------------------------------------------------- rows


def _event(node: Node, rank: int, start: int, end: int) -> TraceEvent:
    args: dict[str, Any] = dict(node.args)
    if node.program:
        args["program"] = node.program
    if node.labels is not None:
        args |= {"executor": node.labels.name, "scheduler": node.labels.scheduler}
    if node.comm:
        args |= {"team": list(node.team), "transport": node.transport}
    if node.kind != "host":
        args |= {"input_bytes": node.input_bytes, "output_bytes": node.output_bytes}
    return TraceEvent(node.name, node.lane, rank, start, end, node.kind, args)


_Found = tuple[TraceEvent, Node, str]


def _grouped(events: Sequence[_Found]) -> list[list[_Found]]:
    groups: dict[Hashable, list[_Found]] = {}
    for found in sorted(events, key=lambda found: (found[0].rank, found[0].start_ns)):
        e, node, device = found
        if node.kind != "host":
            executor = "" if node.labels is None else node.labels.name
            groups.setdefault((e.rank, device, node.kind, node.program, node.key, node.team, executor), []).append(found)
    return list(groups.values())


def _row(found: Sequence[_Found]) -> Row:
    """One row of what belongs together."""
    first, node, device = found[0]
    labels = node.labels
    facts: dict[str, Any] = {
        "name": node.name,
        "program": node.program,
        "rank": first.rank,
        "executor": "HostIrExecutor" if labels is None else labels.name,
        "scheduler": node.kind if labels is None else labels.scheduler,
        "device": device,
        "calls": len(found),
        "kernels": 0 if labels is None else labels.num_kernels * len(found),
        "compile_ms": 0.0 if labels is None else labels.compile_ms,
        "kernel_ms": sum(e.end_ns - e.start_ns for e, _, _ in found) / 1e6,
        "input_bytes": sum(n.input_bytes for _, n, _ in found),
        "output_bytes": sum(n.output_bytes for _, n, _ in found),
        "events": tuple(e for e, _, _ in found),
    }
    if labels is not None:
        return Row(**facts)
    return CommunicationRow(**facts, kind=node.comm, team=node.team, transport=node.transport, statement=str(node.args.get("statement", "")))


def _team(team: tuple[int, ...]) -> str:
    whole = len(team) > 4 and team == tuple(range(team[0], team[-1] + 1))
    return f"{team[0]}..{team[-1]}" if whole else ",".join(map(str, team))


def _columns(head: Sequence[str], rows: Sequence[Sequence[object]], ranks: Sequence[int] | None) -> str:
    """Text in columns: words to the left, numbers to the right. ``ranks`` becomes the first column."""
    if ranks is not None:
        head, rows = ("rank", *head), [(rank, *row) for rank, row in zip(ranks, rows, strict=True)]
    cells = [[f"{c:.3f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [not isinstance(c, str) for c in rows[0]]

    def line(texts: Sequence[str]) -> str:
        return "  ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)).rstrip()

    return "\n".join(map(line, [head, *cells]))
