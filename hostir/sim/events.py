"""What happened when, on which lane of which rank, and the file that Perfetto and chrome://tracing open.

An event is the same whether a clock or a simulation gave its times. The viewers are strict without saying so: they merge lanes whose
ids meet anywhere in the file and drop a slice that begins a nanosecond before its predecessor ends, so ids are spread out here and
times are whole nanoseconds that survive the file's microseconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

Kind: TypeAlias = Literal["segment", "communication", "copy", "host"]

ROUNDING_NS: Final = 2000  # an overlap up to here is a clock's resolution; a longer one is two things under way at once
_RANK_IDS: Final = 4096  # ids set aside for each rank: its process, then its lanes


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One interval on one lane (``main``, ``comm``, ``s[2]``) of one rank; times in ns from any origin that all ranks share.

    ``segment`` is the run of a unit, ``communication`` involves other ranks, ``copy`` stays in this one's memory, and ``host`` is all
    that the program itself does: fills, syncs. ``args`` is shown by the viewer and holds what JSON holds.
    """

    name: str
    lane: str
    rank: int
    start_ns: int
    end_ns: int
    kind: Kind
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of one rank in milliseconds: all of it (times when at least one runs), and the part in which no segment runs."""

    exposed_ms: float = 0.0
    total_ms: float = 0.0

    @property
    def ratio(self) -> float:
        """The exposed share: 0 is hidden completely, 1 not at all. 0 where nothing communicates."""
        return self.exposed_ms / self.total_ms if self.total_ms else 0.0


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of ``(start, end)`` spans."""
    total, reach = 0, -math.inf
    for start, end in sorted(spans):
        if end > reach:
            total += end - int(max(start, reach))
            reach = end
    return total


def overlap_of(events: Iterable[TraceEvent]) -> Overlap:
    """How much of one rank's communication no segment hides. Copies and what the host does hide nothing and need no hiding."""
    spans: dict[str, list[tuple[int, int]]] = {"segment": [], "communication": []}
    for e in events:
        if e.kind in spans:
            spans[e.kind].append((e.start_ns, e.end_ns))
    segments, communications = spans["segment"], spans["communication"]
    exposed = covered_ns(segments + communications) - covered_ns(segments)
    return Overlap(exposed / 1e6, covered_ns(communications) / 1e6)


# ------------------------------------------------------------------------------------------------------------------ the file


@dataclass(slots=True)
class Track:
    """A row of the picture. ``end_ns``: where its last slice ends."""

    lane: str
    name: str
    end_ns: int
    slices: list[tuple[TraceEvent, int, int]] = field(default_factory=list)

    def put(self, e: TraceEvent) -> None:
        start = max(e.start_ns, self.end_ns) if self.slices else e.start_ns
        self.end_ns = max(e.end_ns, start)
        self.slices.append((e, start, self.end_ns))


def lay_out(events: Iterable[TraceEvent]) -> list[Track]:
    """The events of one rank, laid out so that no two slices of a track overlap: a lane whose events do gets a second track."""
    lanes: dict[str, list[Track]] = {"main": []}
    for e in sorted(events, key=lambda e: (e.start_ns, e.end_ns)):
        tracks = lanes.setdefault(e.lane, [])
        free = [t for t in tracks if t.end_ns <= e.start_ns] or [t for t in tracks if t.end_ns - e.start_ns <= ROUNDING_NS]
        if not free:
            free = [Track(e.lane, e.lane if not tracks else f"{e.lane} ({len(tracks) + 1})", 0)]
            tracks += free
        free[0].put(e)
    return [t for tracks in lanes.values() for t in tracks]


def _microseconds(ns: int) -> float:
    """``ns`` as the file's unit, such that a reader that multiplies by 1000 and drops the fraction is back at ``ns``."""
    value = ns / 1000
    return value if math.floor(value * 1000) == ns else math.nextafter(value, math.inf)


def _metadata(about: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": about, "pid": pid, "tid": tid, "args": args}


def chrome_trace(events: Sequence[TraceEvent], *, names: Mapping[int, str] | None = None, origin_ns: int | None = None) -> dict[str, Any]:
    """The trace as the JSON object of the Chrome trace format: one complete slice (``ph`` X) for each event, a process for each rank
    and a thread for each lane.

    ``names`` gives ranks another name than ``rank 3``. Times in the file count from ``origin_ns``, by default the first event's start:
    a machine's own clock has more digits than the file's numbers. Ranks that profiled in processes of one machine share a clock, so
    their events, gathered, make one file.
    """
    origin = min((e.start_ns for e in events), default=0) if origin_ns is None else origin_ns
    by_rank: dict[int, list[TraceEvent]] = {}
    for e in events:
        by_rank.setdefault(e.rank, []).append(e)
    tracks = {rank: lay_out(by_rank[rank]) for rank in sorted(by_rank)}
    stride = max([_RANK_IDS, *(len(t) + 1 for t in tracks.values())])
    rows: list[dict[str, Any]] = []
    for rank, of_rank in tracks.items():
        pid = (rank + 1) * stride
        rows.append(_metadata("process_name", pid, pid + 1, name=(names or {}).get(rank, f"rank {rank}")))
        rows.append(_metadata("process_sort_index", pid, pid + 1, sort_index=rank))
        for number, track in enumerate(of_rank):
            tid = pid + 1 + number
            rows.append(_metadata("thread_name", pid, tid, name=track.name))
            rows.append(_metadata("thread_sort_index", pid, tid, sort_index=number))
            for e, start, end in track.slices:
                begin, until = _microseconds(start - origin), _microseconds(end - start)
                rows.append({"ph": "X", "name": e.name, "cat": e.kind, "pid": pid, "tid": tid, "ts": begin, "dur": until, "args": dict(e.args)})
    return {"displayTimeUnit": "ns", "traceEvents": rows}


def save_trace(
    path: str | os.PathLike[str], events: Sequence[TraceEvent], *, names: Mapping[int, str] | None = None, origin_ns: int | None = None
) -> None:
    """Write ``chrome_trace(events, …)`` to ``path``; open it at ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(chrome_trace(events, names=names, origin_ns=origin_ns), default=str))
