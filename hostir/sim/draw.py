"""Pictures of events: a text one for the terminal and one for a file. Measured and simulated runs look alike.

A line for each lane of each rank, time to the right. Calls, communications and copies are told apart by shade in text and by colour in
the file; what the host does besides (fills, syncs) is thin.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hostir.errors import UnsupportedError
from hostir.sim.events import Kind, TraceEvent, lay_out, overlap_of

MAX_LANES: Final = 48  # of a picture; what is left out is said
_SHADES: Final[Mapping[Kind, str]] = {"segment": "█", "communication": "▒", "copy": "░", "host": "·"}
_WORDS: Final[Mapping[Kind, str]] = {"segment": "call", "communication": "communication", "copy": "copy", "host": "host"}
_COLOURS: Final[Mapping[Kind, str]] = {"segment": "#3b6fb6", "communication": "#e08a2e", "copy": "#7fb069", "host": "#9a9a9a"}
_ORDER: Final[Sequence[Kind]] = ("host", "copy", "communication", "segment")  # what is drawn later covers what was drawn before
_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def show_time(seconds: float) -> str:
    """``1.25 ms``: three digits and a fitting unit."""
    if not seconds:
        return "0 s"
    scale, unit = next(((s, u) for s, u in _UNITS if abs(seconds) >= s * 0.9995), _UNITS[-1])
    value = seconds / scale
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{min(digits, 2)}f} {unit}"


def summary(events: Sequence[TraceEvent]) -> str:
    """How long all took, and the exposed communication of the worst rank."""
    span = (max((e.end_ns for e in events), default=0) - min((e.start_ns for e in events), default=0)) / 1e9
    worst = max((overlap_of(e for e in events if e.rank == rank) for rank in {e.rank for e in events}), key=lambda o: o.exposed_ms, default=None)
    exposed = 0.0 if worst is None else worst.exposed_ms / 1e3
    return f"{show_time(span)}, exposed communication {show_time(exposed)}"


class _Picture:
    """The lanes to draw: (label, events), main first in each rank, and the time that they span."""

    def __init__(self, events: Sequence[TraceEvent], names: Mapping[int, str] | None, limit: int, origin_ns: int | None) -> None:
        names = names or {}
        lanes: list[tuple[str, str, list[TraceEvent]]] = []
        for rank in sorted({e.rank for e in events}):
            of_rank, name = lay_out(e for e in events if e.rank == rank), names.get(rank, f"rank {rank}")
            lanes += [(name, track.name, [e for e, _, _ in track.slices]) for track in of_rank if track.slices]
        self.left_out = max(0, len(lanes) - limit)
        self.lanes = lanes[:limit]
        self.start = min((e.start_ns for e in events), default=0) if origin_ns is None else origin_ns
        self.span = max((e.end_ns for e in events), default=0) - self.start
        self.kinds = [k for k in reversed(_ORDER) if any(e.kind == k for e in events)]


def gantt(
    events: Sequence[TraceEvent],
    width: int = 100,
    *,
    names: Mapping[int, str] | None = None,
    title: str = "",
    height: int = 24,
    origin_ns: int | None = None,
) -> str:
    """``events`` as text, ``width`` columns wide, at most ``height`` lanes. Time counts from ``origin_ns``, by default the first event."""
    picture = _Picture(events, names, height, origin_ns)
    if not picture.lanes:
        return "\n".join([*([title] if title else []), "nothing ran"])
    labels = [f"{rank} {lane}" for rank, lane, _ in picture.lanes]
    left = max(map(len, labels)) + 1
    room = max(width - left - 2, 10)
    lines = [title] if title else []
    for label, (_, _, found) in zip(labels, picture.lanes, strict=True):
        lines.append(f"{label.ljust(left)}│{_bar(found, picture, room)}│")
    end = show_time(picture.span / 1e9)
    lines.append(f"{' ' * left} 0{end.rjust(room - 1)}")
    lines.append("  ".join(f"{_SHADES[k]} {_WORDS[k]}" for k in picture.kinds))
    if picture.left_out:
        lines.append(f"{picture.left_out} more lanes are not shown")
    return "\n".join(lines)


def _bar(events: Sequence[TraceEvent], picture: _Picture, room: int) -> str:
    """A cell shows what takes most of it. What fills it partly is carried on to the next one, so that a lane that is busy half of the time
    looks half full; a short event that stands alone is seen all the same."""
    full: dict[Kind, list[float]] = {k: [0.0] * room for k in _ORDER}
    cell = max(picture.span, 1) / room
    for e in events:
        a, b = (e.start_ns - picture.start) / cell, (e.end_ns - picture.start) / cell
        first, last = min(int(a), room - 1), min(math.ceil(b), room)
        row = full[e.kind]
        for i in range(first, max(last, first + 1)):
            row[i] += max(min(b, i + 1) - max(a, i), 0.0)
        if len(events) <= room // 2:
            row[first] = max(row[first], 1.0 if b - a < 1 else 0.0)
    out, carry = [], 0.0
    for i in range(room):
        best = max(_ORDER, key=lambda k: full[k][i])
        carry = min(max(carry, -0.5), 0.5) + full[best][i]
        shown = carry >= 0.5 and full[best][i] > 0
        carry -= shown
        out.append(_SHADES[best] if shown else " ")
    return "".join(out)


# ------------------------------------------------------------------------------------------------------------------- a file


def plot(
    events: Sequence[TraceEvent],
    path: str | os.PathLike[str],
    *,
    names: Mapping[int, str] | None = None,
    title: str = "",
    origin_ns: int | None = None,
) -> None:
    """``events`` as a picture in ``path`` (PNG, or what its suffix says). UnsupportedError without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UnsupportedError(
            "pictures need matplotlib", refusals={"matplotlib": str(error)}, cure="pip install matplotlib, or use .gantt() and .save()"
        ) from None
    picture = _Picture(events, names, MAX_LANES, origin_ns)
    scale, unit = next(((s, u) for s, u in _UNITS if picture.span / 1e9 >= 2 * s), _UNITS[-1])
    per_ns = 1e-9 / scale
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(13, 1.8 + 0.36 * max(len(picture.lanes), 2)), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        heights, marks = _heights(picture)
        for y, (_, _, found) in zip(heights, picture.lanes, strict=True):
            _draw_lane(axes, y, found, picture, per_ns)
        axes.set_yticks(heights, [lane for _, lane, _ in picture.lanes])
        for y, text in marks:
            axes.text(-0.06, y, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontweight="bold")
        axes.invert_yaxis()
        axes.set_xlim(0, max(picture.span * per_ns, 1e-9))
        axes.set_xlabel(unit + (f"   ({picture.left_out} more lanes are not shown)" if picture.left_out else ""))
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_title(title or summary(events), loc="left", fontsize=10)
        patches = [Patch(facecolor=_COLOURS[k], label=_WORDS[k]) for k in picture.kinds]
        if patches:
            figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), frameon=False)
        figure.savefig(path)


def _heights(picture: _Picture) -> tuple[list[float], list[tuple[float, str]]]:
    """Where each lane stands, with a gap between ranks, and where each rank's name does."""
    heights: list[float] = []
    marks: list[tuple[float, str]] = []
    y = -1.0
    before = None
    for rank, _, _ in picture.lanes:
        y += 1.0 if rank == before else 1.35
        if rank != before:
            marks.append((y, rank))
        heights.append(y)
        before = rank
    return heights, marks


def _draw_lane(axes: Any, y: float, events: Sequence[TraceEvent], picture: _Picture, per_ns: float) -> None:
    for kind in _ORDER:
        found = [e for e in events if e.kind == kind]
        spans = [((e.start_ns - picture.start) * per_ns, (e.end_ns - e.start_ns) * per_ns) for e in found]
        height = 0.25 if kind == "host" else 0.8
        edge = "white" if len(found) < 400 else "none"
        axes.broken_barh(spans, (y - height / 2, height), facecolors=_COLOURS[kind], edgecolors=edge, linewidth=0.5)
        if kind == "host":
            continue
        for e, (start, length) in zip(found, spans, strict=True):
            if (e.end_ns - e.start_ns) >= picture.span * (0.011 * len(e.name) + 0.006):
                axes.text(start + length / 2, y, e.name, ha="center", va="center", color="white", fontsize=7.5, clip_on=True)
