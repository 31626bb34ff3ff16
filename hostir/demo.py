"""The main job, shown: allgather + GEMM programs and a host-dimension sum on several ranks, checked against torch, timed and drawn.

Integer-valued data must agree exactly, random data within the dtype's tolerance; both are checked on every rank. Then one program runs in
order and overlapped, and a picture and a trace show where its communication went.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from hostir.demo_ranks import Report, Shown, report_on
from hostir.errors import UnsupportedError
from hostir.launch.spawn import spawn
from hostir.sim.draw import gantt, plot, show_time
from hostir.sim.events import TraceEvent, overlap_of, save_trace

ORDER: Final = ("overlapped", "in order")


@dataclass(frozen=True)
class Measured:
    """One schedule over all ranks: the median round of the slowest rank, and the shortest profiled run (the least disturbed) with its
    communication: all of it and the part that no GEMM hides, on the rank where that part is largest."""

    schedule: str
    milliseconds: float
    communication_ms: float
    exposed_ms: float
    events: list[TraceEvent]


def main(
    ranks: int = 4,
    transport: str | None = None,
    *,
    out: str | None = None,
    one_gpu: bool = False,
    quiet: bool = False,
    as_json: bool = False,
) -> int:
    """Run the demo; 0 when every check on every rank passed, else 1. ``out``: the folder for picture and trace (default: a temporary one;
    none when ``quiet``)."""
    start = time.perf_counter()
    reports: list[Report] = spawn(report_on, ranks, transport=transport, timeout=60.0, one_gpu=one_gpu)
    seconds = time.perf_counter() - start
    fine = all(r.fine for r in reports)
    measured = [_measured(reports, name) for name in ORDER]
    files = _write(measured, out) if out is not None or not quiet else {}
    if as_json:
        print(json.dumps(_as_json(reports, measured, files, fine, seconds, transport)))
    elif not quiet:
        _print(reports, measured, files, seconds, transport, one_gpu)
    return 0 if fine else 1


def _measured(reports: list[Report], name: str) -> Measured:
    """All ranks together."""
    timed = [next(t for t in r.timed if t.schedule == name) for r in reports]
    rounds = [max(times) for times in zip(*(t.milliseconds for t in timed), strict=True)]
    runs = [[e for events in of_ranks for e in events] for of_ranks in zip(*(t.runs for t in timed), strict=True)]
    chosen = min(runs, key=_length)
    worst = max((overlap_of(e for e in chosen if e.rank == rank) for rank in range(len(reports))), key=lambda o: o.exposed_ms)
    return Measured(name, statistics.median(rounds), worst.total_ms, worst.exposed_ms, chosen)


def _length(events: list[TraceEvent]) -> int:
    return max(e.end_ns for e in events) - min(e.start_ns for e in events)


# ----------------------------------------------------------------------------------------------------------------------- files


def _side_by_side(measured: list[Measured]) -> tuple[list[TraceEvent], dict[int, str]]:
    """The events of both runs on one axis that begins at 0: each rank of each run has a number and a name of its own."""
    events: list[TraceEvent] = []
    names: dict[int, str] = {}
    for i, m in enumerate(measured):
        origin = min(e.start_ns for e in m.events)
        base = i * (max(e.rank for e in m.events) + 1)
        for e in m.events:
            names[base + e.rank] = f"{m.schedule}, rank {e.rank}"
            events.append(replace(e, rank=base + e.rank, start_ns=e.start_ns - origin, end_ns=e.end_ns - origin))
    return events, names


def _headline(measured: list[Measured]) -> str:
    parts = [f"{m.schedule} {show_time(_length(m.events) / 1e9)}, {show_time(m.exposed_ms / 1e3)} exposed" for m in measured]
    return f"AG+GEMM on a ring, measured: {'; '.join(parts)}"


def _write(measured: list[Measured], out: str | None) -> dict[str, str]:
    """Picture and trace; what could not be written is not in the answer."""
    folder = Path(tempfile.mkdtemp(prefix="hostir-demo-") if out is None else out)
    folder.mkdir(parents=True, exist_ok=True)
    events, names = _side_by_side(measured)
    files = {"trace": str(folder / "trace.json")}
    save_trace(files["trace"], events, names=names, origin_ns=0)
    try:
        plot(events, folder / "timeline.png", names=names, title=_headline(measured), origin_ns=0)
        files["picture"] = str(folder / "timeline.png")
    except UnsupportedError:
        pass
    return files


def _as_json(
    reports: list[Report], measured: list[Measured], files: dict[str, str], fine: bool, seconds: float, transport: str | None
) -> dict[str, Any]:
    rows = [{"rank": rank, **asdict(s), "fine": s.fine} for rank, r in enumerate(reports) for s in r.shown]
    overlap = {
        m.schedule: {"ms": round(m.milliseconds, 3), "communication_ms": round(m.communication_ms, 3), "exposed_ms": round(m.exposed_ms, 3)}
        for m in measured
    }
    sums = [{"rank": rank, **asdict(s)} for rank, r in enumerate(reports) for s in r.sums]
    first = reports[0].shown[0]
    return {
        "fine": fine, "seconds": round(seconds, 2), "device": first.device, "transport": first.transport, "asked_for": transport,
        "results": rows, "overlap": overlap, "same_bits": all(r.same_bits for r in reports), "host_sum": sums, "files": files,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------------- printing


def _found(first: Shown, num_ranks: int, transport: str | None, one_gpu: bool) -> str:
    """The devices that are here, and how the ranks talk."""
    if not torch.cuda.is_available():
        devices = "no GPU found"
    else:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        devices = f"{len(names)} GPU{'s' * (len(names) > 1)} found ({', '.join(dict.fromkeys(names))})"
    shared = ", sharing one GPU" if one_gpu else ""
    why = "as asked" if transport is not None else "chosen for these devices"
    return f"{devices}; {num_ranks} ranks on {first.device.partition(':')[0]}{shared}, transport {first.transport} ({why})"


def _print(reports: list[Report], measured: list[Measured], files: dict[str, str], seconds: float, transport: str | None, one_gpu: bool) -> None:
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console(highlight=False)
    shown = reports[0].shown
    for s in shown:
        console.rule(f"@{s.program}")
        console.print(Syntax(s.text, "llvm", background_color="default", word_wrap=True))
    console.rule("results")
    console.print(_found(shown[0], len(reports), transport, one_gpu), markup=False)
    console.print(_checks(reports, seconds))
    console.print("integers: integer-valued data, every rank equal to torch; random: largest error of any rank; ms: slowest rank, one run")
    console.print(_overlap_table(measured, all(r.same_bits for r in reports)))
    before, after = measured[1], measured[0]
    gained = before.milliseconds / after.milliseconds if after.milliseconds else 0.0
    console.print(f"overlapped is {gained:.2f}x as fast; exposed: communication while no GEMM runs, on the worst rank of the shortest profiled run")
    console.print(_sum_table(reports))
    events, names = _side_by_side(measured)
    width = min(shutil.get_terminal_size().columns, 120)
    console.print()
    console.print(_headline(measured), markup=False)
    console.print(gantt(events, width, names=names, height=24, origin_ns=0), markup=False, no_wrap=True, overflow="crop")
    console.print()
    if "picture" in files:
        console.print(f"picture: {files['picture']}", markup=False, soft_wrap=True)
    else:
        console.print("picture: none, matplotlib is missing (pip install matplotlib)")
    console.print(f"trace: {files['trace']} (open it at ui.perfetto.dev)", markup=False, soft_wrap=True)


def _table(title: str, columns: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _checks(reports: list[Report], seconds: float) -> Any:
    first = reports[0].shown
    title = f"what ran where: {len(reports)} ranks on {first[0].device}, {seconds:.1f} s with start-up"
    table = _table(title, ("program", "units", "executor", "transport", "integers", "random (bound)", "ms"))
    for i, s in enumerate(first):
        of_all = [r.shown[i] for r in reports]
        exact = "exact" if all(o.exact for o in of_all) else "[red]WRONG[/red]"
        worst = max(o.error for o in of_all)
        error = f"{worst:.1e} ({s.bound:.0e})" if worst <= s.bound else f"[red]{worst:.1e} > {s.bound:.0e}[/red]"
        units, executors = "\n".join(f"@{u}" for u in s.units), "\n".join(e.removesuffix("Executor") for e in s.units.values())
        table.add_row(s.program, units, executors, s.transport, exact, error, f"{max(o.milliseconds for o in of_all):.1f}")
    return table


def _overlap_table(measured: list[Measured], same_bits: bool) -> Any:
    title = f"AG+GEMM on a ring: results of both schedules {'are the same bits' if same_bits else '[red]DIFFER[/red]'}"
    table = _table(title, ("schedule", "ms (median)", "communication ms", "exposed ms", "hidden"))
    for m in reversed(measured):
        hidden = 1 - m.exposed_ms / m.communication_ms if m.communication_ms else 1.0
        table.add_row(m.schedule, f"{m.milliseconds:.1f}", f"{m.communication_ms:.1f}", f"{m.exposed_ms:.1f}", f"{hidden:.0%}")
    return table


def _sum_table(reports: list[Report]) -> Any:
    table = _table("the host-dimension sum by every executor and mode", ("executor", "mode", "integers", "ms (slowest rank)"))
    for of_all in zip(*(r.sums for r in reports), strict=True):
        s = of_all[0]
        exact = f"not here: {s.refusal}" if s.refusal else "exact" if all(o.exact for o in of_all) else "[red]WRONG[/red]"
        table.add_row(s.executor, s.mode, exact, "" if s.refusal else f"{max(o.milliseconds for o in of_all):.2f}")
    return table
