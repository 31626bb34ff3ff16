"""The main job, shown: two overlapped allgather + GEMM programs and a host-dimension sum on several ranks, checked against torch.

Integer-valued data must agree exactly, random data within the dtype's tolerance; both are checked on every rank.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hostir.dispatch.host_ir import HostIrExecutor, compile
from hostir.ir.nodes import Program
from hostir.launch.spawn import spawn
from hostir.overlap.programs import collective_ag_gemm, host_sum, ring_ag_gemm
from hostir.runtime.world import World

ROWS, INNER, COLUMNS, CHUNKS = 768, 256, 384, 4
TERMS, LENGTH = 8, 1 << 16


@dataclass(frozen=True)
class Shown:
    """What one program did on one rank. ``error`` is the largest |result - reference| / max |reference| on random data."""

    program: str
    text: str
    exact: bool
    error: float
    bound: float
    milliseconds: float
    device: str
    transport: str
    units: dict[str, str]

    @property
    def fine(self) -> bool:
        return self.exact and self.error <= self.bound


def _data(shape: tuple[int, ...], seed: int, integers: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=g).to(dtype) if integers else torch.randn(shape, generator=g).to(dtype)


def _inputs(name: str, world: World, integers: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's inputs and the result that torch computes in double precision."""
    if name == "host_sum":
        a, b = _data((TERMS, LENGTH), 1, integers, torch.bfloat16), _data((TERMS, LENGTH), 2, integers, torch.bfloat16)
        return [a, b], (a.double() * b.double()).sum(0)
    rows, w = _data((ROWS, INNER), 3, integers), _data((INNER, COLUMNS), 10 + world.rank, integers)
    mine, full = rows.chunk(world.size)[world.rank], rows.double() @ w.double()
    if name == "ring_ag_gemm":
        return [mine, w], full.reshape(world.size, -1, COLUMNS)
    parts = full.reshape(world.size, CHUNKS, -1, COLUMNS).transpose(0, 1)
    return [mine.reshape(CHUNKS, -1, INNER), w], parts.reshape(CHUNKS, -1, COLUMNS)


def show_on(world: World) -> list[Shown]:
    """Compile, run and check the three programs on this rank."""
    mesh = world.mesh(("tp",))
    programs: list[Program] = [
        ring_ag_gemm(mesh, ROWS, INNER, COLUMNS),
        collective_ag_gemm(mesh, ROWS, INNER, COLUMNS, CHUNKS),
        host_sum(TERMS, LENGTH),
    ]
    return [_show(compile(p, mesh if p.axes else None), p, world) for p in programs]


def _show(run: HostIrExecutor, p: Program, world: World) -> Shown:
    exact_in, exact_ref = _inputs(p.name, world, integers=True)
    exact = bool(torch.equal(run(*(t.to(world.device) for t in exact_in)).cpu().double(), exact_ref))
    random_in, reference = _inputs(p.name, world, integers=False)
    on_device = [t.to(world.device) for t in random_in]
    start = time.perf_counter()
    result = run(*on_device)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    seconds = time.perf_counter() - start
    error = float((result.cpu().double() - reference).abs().max() / reference.abs().max())
    transport = world.backend if p.axes else "none"
    return Shown(p.name, str(run.program), exact, error, 1e-5, seconds * 1e3, str(world.device), transport, dict(run.segments()))


def main(ranks: int = 4, transport: str | None = None, *, quiet: bool = False, as_json: bool = False) -> int:
    """Run the demo; 0 when every check on every rank passed, else 1."""
    start = time.perf_counter()
    reports: list[list[Shown]] = spawn(show_on, ranks, transport=transport or "gloo", timeout=60.0)
    seconds = time.perf_counter() - start
    fine = all(s.fine for report in reports for s in report)
    if as_json:
        rows = [{"rank": rank, **asdict(s), "fine": s.fine} for rank, report in enumerate(reports) for s in report]
        print(json.dumps({"fine": fine, "seconds": round(seconds, 2), "results": rows}))
    elif not quiet:
        _print(reports, seconds)
    return 0 if fine else 1


def _print(reports: list[list[Shown]], seconds: float) -> None:
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.table import Table

    console = Console()
    first: list[Any] = reports[0]
    for s in first:
        console.rule(f"@{s.program}")
        console.print(Syntax(s.text, "llvm", background_color="default", word_wrap=True))
    table = Table(title=f"what ran where: {len(reports)} ranks on {first[0].device}, {seconds:.1f} s with start-up", title_justify="left")
    for column in ("program", "units", "executor", "transport", "integers", "random (bound)", "ms"):
        table.add_column(column, overflow="fold")
    for i, s in enumerate(first):
        of_all = [r[i] for r in reports]
        exact = "exact" if all(o.exact for o in of_all) else "[red]WRONG[/red]"
        worst = max(o.error for o in of_all)
        error = f"{worst:.1e} ({s.bound:.0e})" if worst <= s.bound else f"[red]{worst:.1e} > {s.bound:.0e}[/red]"
        units, executors = "\n".join(f"@{u}" for u in s.units), "\n".join(e.removesuffix("Executor") for e in s.units.values())
        table.add_row(s.program, units, executors, s.transport, exact, error, f"{max(o.milliseconds for o in of_all):.1f}")
    console.print(table)
    console.print("integers: integer-valued data, every rank equal to torch; random: largest error of any rank; ms: slowest rank, one run")
