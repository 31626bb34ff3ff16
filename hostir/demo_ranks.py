"""What each rank of the demo does: check the programs against torch, time one of them with and without overlap, sum with every executor.

Everything comes back as plain data, so that the parent can put the ranks together. The ranks of one machine share a clock, so their
events fit on one time axis.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hostir.dispatch.dispatch import ExecutorDispatch
from hostir.dispatch.expr_eval import ExprEvalExecutor
from hostir.dispatch.host_ir import HostIrExecutor, compile
from hostir.dispatch.kernel import KernelExecutor
from hostir.dispatch.marking import has_triton_target
from hostir.dispatch.protocol import Executor
from hostir.errors import InputError, UnsupportedError
from hostir.ir.nodes import Program
from hostir.overlap.programs import collective_ag_gemm, host_sum, ring_ag_gemm
from hostir.runtime.profile import profile
from hostir.runtime.world import World
from hostir.sim.events import TraceEvent

ROWS, INNER, COLUMNS, CHUNKS = 768, 256, 384, 4  # of the checks
TERMS, LENGTH = 8, 1 << 16
TIMED: Final = {"cpu": (2048, 1024, 512), "cuda": (8192, 4096, 4096)}  # rows, inner, columns of the timed AG+GEMM
ROUNDS, PROFILED = 7, 5


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


@dataclass(frozen=True)
class Timed:
    """AG+GEMM in one of its schedules on one rank: milliseconds of every round, and a few profiled runs."""

    schedule: str
    milliseconds: list[float]
    runs: list[list[TraceEvent]]


@dataclass(frozen=True)
class Summed:
    """The host-dimension sum through one executor and mode; ``refusal`` says why it cannot be here (``exact`` is None then)."""

    executor: str
    mode: str
    exact: bool | None = None
    milliseconds: float = 0.0
    refusal: str = ""


@dataclass(frozen=True)
class Report:
    """All that one rank has to say. ``same_bits``: both schedules gave identical results."""

    shown: list[Shown]
    timed: list[Timed]
    same_bits: bool
    sums: list[Summed]

    @property
    def fine(self) -> bool:
        return self.same_bits and all(s.fine for s in self.shown) and all(s.exact or s.refusal for s in self.sums)


def report_on(world: World) -> Report:
    """Everything that this rank does."""
    mesh = world.mesh(("tp",))
    programs: list[Program] = [
        ring_ag_gemm(mesh, ROWS, INNER, COLUMNS),
        collective_ag_gemm(mesh, ROWS, INNER, COLUMNS, CHUNKS),
        host_sum(TERMS, LENGTH),
    ]
    shown = [_show(compile(p, mesh if p.axes else None), p, world) for p in programs]
    timed, same_bits = _overlap(world)
    return Report(shown, timed, same_bits, _sums(world))


# --------------------------------------------------------------------------------------------------------------------- checks


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


def _show(run: HostIrExecutor, p: Program, world: World) -> Shown:
    exact_in, exact_ref = _inputs(p.name, world, integers=True)
    exact = bool(torch.equal(run(*(t.to(world.device) for t in exact_in)).cpu().double(), exact_ref))
    random_in, reference = _inputs(p.name, world, integers=False)
    on_device = [t.to(world.device) for t in random_in]
    result, seconds = _timed(world, lambda: run(*on_device))
    error = float((result.cpu().double() - reference).abs().max() / reference.abs().max())
    transport = world.backend if p.axes else "none"
    return Shown(p.name, str(run.program), exact, error, 1e-5, seconds * 1e3, str(world.device), transport, dict(run.segments()))


def _timed(world: World, run: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the seconds until the device has it."""
    start = time.perf_counter()
    result = run()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return result, time.perf_counter() - start


# -------------------------------------------------------------------------------------------------------------------- overlap


def _overlap(world: World) -> tuple[list[Timed], bool]:
    """The ring in order and overlapped, in turn on the same data; all ranks begin each run together."""
    rows, inner, columns = TIMED[world.device.type]
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    mesh = world.mesh(("tp",))
    rows -= rows % world.size
    p = ring_ag_gemm(mesh, rows, inner, columns, dtype)
    runs = {name: compile(p, mesh, overlap=overlap) for name, overlap in (("in order", "off"), ("overlapped", "auto"))}
    g = torch.Generator().manual_seed(world.rank)
    x, w = (torch.randn(s, generator=g).to(dtype).to(world.device) for s in ((rows // world.size, inner), (inner, columns)))
    results = [run(x, w) for run in runs.values()]
    times: dict[str, list[float]] = {name: [] for name in runs}
    profiled: dict[str, list[list[TraceEvent]]] = {name: [] for name in runs}
    for i in range(ROUNDS):
        for name, run in runs.items():
            world.comms.exchange(f"demo {i} {name}", "", range(world.size))
            _, seconds = _timed(world, lambda run=run: run(x, w))  # type: ignore[misc]
            times[name].append(seconds * 1e3)
    for i in range(PROFILED + 1):
        for name, run in runs.items():
            world.comms.exchange(f"demo profiled {i} {name}", "", range(world.size))
            with profile() as prof:
                run(x, w)
            if i:  # the first one makes what profiling needs
                profiled[name].append(prof.events)
    return [Timed(name, times[name], profiled[name]) for name in runs], torch.equal(*results)


# ----------------------------------------------------------------------------------------------------------------------- sums


def _sums(world: World) -> list[Summed]:
    """c = Σ_h a[h] · b[h] by each executor that can be here, on integers: all must be exact."""
    (a, b), reference = _inputs("host_sum", world, integers=True)
    on_device = [a.to(world.device), b.to(world.device)]
    modes = ["checked", "compiled", *(["graph"] if world.device.type == "cuda" and world.backend != "threads" else [])]
    found = [_sum(world, ExprEvalExecutor, mode, on_device, reference) for mode in modes]
    if not has_triton_target(world.device.type):
        return [*found, Summed("Kernel", "any", refusal="no GPU to make kernels for; TRITON_INTERPRET=1 interprets them")]
    return [*found, *(_sum(world, KernelExecutor, mode, on_device, reference) for mode in modes)]


def _sum(world: World, executor: type[Executor], mode: str, inputs: Sequence[torch.Tensor], reference: torch.Tensor) -> Summed:
    name = executor.name.removesuffix("Executor")
    try:
        run = compile(host_sum(TERMS, LENGTH), mode=mode, dispatch=ExecutorDispatch((HostIrExecutor, executor)))
        exact = bool(torch.equal(run(*inputs).cpu().double(), reference))
        seconds = statistics.median(_timed(world, lambda: run(*inputs))[1] for _ in range(ROUNDS))
    except (InputError, UnsupportedError) as error:
        return Summed(name, mode, refusal=error.message)
    return Summed(name, mode, exact, seconds * 1e3)
