"""What a simulation found: when every statement of every rank began and ended, and the pictures of it.

Ranks that run alike are kept once. The same events that a profile records come out here, so a simulated and a measured run are drawn
and saved by the same code and can be laid side by side.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from hostir.errors import InputError
from hostir.ir.diagnostics import show_ranks
from hostir.ir.race import lane_text
from hostir.ir.walk import Lane
from hostir.sim.draw import gantt, plot, show_time
from hostir.sim.events import Kind, TraceEvent, save_trace

_KINDS: Final[Mapping[str, Kind]] = {"call": "segment", "comm": "communication", "copy": "copy", "flag": "host", "fill": "host", "host": "host"}


@dataclass(frozen=True, slots=True)
class Row:
    """One statement of one rank in time. ``kind`` is call, comm, copy (within one memory), flag (signal, wait), fill (a buffer's initial
    value) or, on a critical path only, host: the time until the host had issued what comes next."""

    rank: int
    lane: Lane
    start: float
    end: float
    text: str
    indices: Mapping[str, int]
    kind: str

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rank": self.rank, "lane": lane_text(self.lane), "start_s": self.start, "end_s": self.end, "kind": self.kind, "text": self.text,
            "indices": dict(self.indices),
        }  # fmt: skip

    def __str__(self) -> str:
        trip = f"  [{', '.join(f'%{name} = {i}' for name, i in self.indices.items())}]" if self.indices else ""
        return f"{show_time(self.start):>10} +{show_time(self.seconds):>9}  rank {self.rank} {lane_text(self.lane)}: {self.text}{trip}"


@dataclass(frozen=True, repr=False)
class Timeline:
    """Times are seconds (in unit cost: statements). ``paths`` holds the rows of one rank of each group of ranks that run alike, ``path``
    what decides the makespan, ``title`` what was simulated."""

    makespan: float
    paths: tuple[tuple[tuple[int, ...], tuple[Row, ...]], ...]
    path: tuple[Row, ...] = ()
    title: str = field(default="", compare=False)

    # ---- numbers

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all ranks, by rank and start."""
        found = [(rank, row) for ranks, rows in self.paths for rank in ranks for row in rows]
        found.sort(key=lambda item: (item[0], item[1].start, item[1].end))
        return tuple(Row(rank, r.lane, r.start, r.end, r.text, r.indices, r.kind) for rank, r in found)

    @cached_property
    def exposed_by_rank(self) -> dict[int, float]:
        """On each rank, the time in which a communication runs and no call does. Copies within one memory do not count."""
        return {rank: exposed for ranks, rows in self.paths for exposed in [_exposed(rows)] for rank in ranks}

    @property
    def exposed_comm(self) -> float:
        """Of the worst rank."""
        return max(self.exposed_by_rank.values(), default=0.0)

    @property
    def exposed_comm_mean(self) -> float:
        found = self.exposed_by_rank
        return sum(found.values()) / len(found) if found else 0.0

    @cached_property
    def utilization(self) -> dict[int, dict[str, float]]:
        """By rank and lane (``"main"``, ``"comm"``, ``"s[2]"``): the part of the makespan in which something runs there."""
        return {rank: busy for ranks, rows in self.paths for busy in [self._busy(rows)] for rank in ranks}

    def _busy(self, rows: Sequence[Row]) -> dict[str, float]:
        lanes: dict[str, list[tuple[float, float]]] = {}
        for r in rows:
            lanes.setdefault(lane_text(r.lane), []).append((r.start, r.end))
        return {lane: covered(spans) / self.makespan if self.makespan else 0.0 for lane, spans in lanes.items()}

    def critical_path(self) -> tuple[Row, ...]:
        """What decides the makespan, first to last: each row begins when the one before ends, so their times add up to the makespan.

        Of a communication the row is one rank's: the one from which the path goes on.
        """
        return self.path

    # ---- pictures

    def events(self, ranks: Sequence[int] | None = None) -> list[TraceEvent]:
        """The rows as the events that a profile also has, in ns; signals and other marks that take no time are left out.

        ``ranks``: by default one rank of each group of ranks that run alike.
        """
        return [_event(rank, r) for rank, rows in self._chosen(ranks) for r in rows if r.end > r.start]

    def _chosen(self, ranks: Sequence[int] | None) -> Iterator[tuple[int, tuple[Row, ...]]]:
        if ranks is None:
            yield from ((of[0], rows) for of, rows in self.paths)
            return
        by_rank = {rank: rows for of, rows in self.paths for rank in of}
        for rank in ranks:
            if rank not in by_rank:
                raise InputError(f"rank {rank} was not simulated", expected=show_ranks(sorted(by_rank)), got=rank)
            yield rank, by_rank[rank]

    def _names(self, ranks: Sequence[int] | None) -> dict[int, str]:
        return {} if ranks is not None else {of[0]: show_ranks(of) for of, _ in self.paths}

    def gantt(self, width: int = 100, *, ranks: Sequence[int] | None = None, height: int = 24) -> str:
        """A text picture, ``width`` columns wide and of at most ``height`` lanes: time to the right, a line for each lane of each rank."""
        return gantt(self.events(ranks), width, names=self._names(ranks), title=self.headline(), height=height, origin_ns=0)

    def save(self, path: str | os.PathLike[str], *, ranks: Sequence[int] | None = None) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing. ``ranks``: by default one of each group of ranks that run alike."""
        save_trace(path, self.events(ranks), names=self._names(ranks), origin_ns=0)

    def plot(self, path: str | os.PathLike[str], *, ranks: Sequence[int] | None = None) -> None:
        """Draw the timeline (PNG, or what the suffix says). UnsupportedError without matplotlib."""
        plot(self.events(ranks), path, names=self._names(ranks), title=self.headline(), origin_ns=0)

    def headline(self) -> str:
        """What was simulated, the makespan and the exposed communication."""
        parts = [self.title] if self.title else []
        return ", ".join([*parts, f"makespan {show_time(self.makespan)}", f"exposed communication {show_time(self.exposed_comm)}"])

    def report(self, width: int = 100, *, most: int = 8) -> str:
        """The text picture, how busy the lanes are, and the statements that the critical path spends most time in."""
        lines = [self.gantt(width)]
        if self.paths:
            ranks, rows = max(self.paths, key=lambda path: _exposed(path[1]))
            busy = ", ".join(f"{lane} {part:.0%}" for lane, part in self._busy(rows).items()) or "nothing"
            lines += ["", f"busy on {show_ranks(ranks)}: {busy}"]
        spent: dict[tuple[str, str], list[float]] = {}
        for r in self.path:
            spent.setdefault((lane_text(r.lane), r.text), []).append(r.seconds)
        if spent:
            lines += ["", "the critical path:"]
        order = sorted(spent.items(), key=lambda item: -sum(item[1]))
        for (lane, text), times in order[:most]:
            lines.append(f"  {sum(times) / self.makespan:>4.0%}  {show_time(sum(times)):>8} in {len(times):>4}  {lane}: {text}")
        if len(order) > most:
            rest = sum(sum(times) for _, times in order[most:])
            lines.append(f"  {rest / self.makespan:>4.0%}  {show_time(rest):>8} in {len(order) - most} other statements")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"<Timeline {self.headline()}>"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the numbers, and the critical path."""
        return {
            "title": self.title, "makespan_s": self.makespan, "exposed_comm_s": self.exposed_comm,
            "exposed_comm_mean_s": self.exposed_comm_mean, "num_ranks": sum(len(ranks) for ranks, _ in self.paths),
            "utilization": {str(of[0]): self._busy(rows) for of, rows in self.paths}, "critical_path": [r.as_dict() for r in self.path],
        }  # fmt: skip


def _event(rank: int, r: Row) -> TraceEvent:
    args: dict[str, Any] = {"statement": r.text}
    if r.indices:
        args["indices"] = dict(r.indices)
    return TraceEvent(_short(r.text), lane_text(r.lane), rank, round(r.start * 1e9), round(r.end * 1e9), _KINDS[r.kind], args)


def _short(text: str) -> str:
    """``%y <- @mm(%a, %b) on s`` is ``mm``, ``%y <- allgather(%x) over tp`` is ``allgather``."""
    head = text.partition(" <- ")[2] or text
    return head.partition("(")[0].removeprefix("@").strip() or text


def _exposed(rows: Sequence[Row]) -> float:
    calls = [(r.start, r.end) for r in rows if r.kind == "call"]
    comms = [(r.start, r.end) for r in rows if r.kind == "comm"]
    return covered(calls + comms) - covered(calls)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ``(start, end)`` spans."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total
