"""Allgather + GEMM on several ranks that share ONE GPU (an MPS daemon of this script's own, symmetric memory), against the ideal.

For each world and size: T, the program as compiled; T_serial, the same with overlap="off"; G, the GEMM alone on gathered rows; C, the
communication alone; T* = max(G, C + G/d). hidden = 1 - (T - G) / (T_serial - G). torch's own symm_mem.fused_all_gather_matmul runs beside.

    python benchmarks/one_gpu.py [--ranks 2 4] [--rounds 30] [--copies plain | engine]

All versions run in turn, every rank at once, behind a barrier on the GPU; a time is the slowest rank's median. Results are checked
against fp32. One table and one JSON line for each row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import hostir as hir
from hostir.launch import World
from hostir.mesh import Mesh
from hostir.overlap.programs import collective_ag_gemm, ring_ag_gemm
from hostir.runtime.comms.protocol import CommCall

SIZES = (2048, 4096, 8192)
K = 4096
N_LOCAL = 4096
CHUNKS = 4
SETS = 2  # of tensors, in turn: the L2 cache does not serve them
LEAD = 4_000_000  # cycles that the GPU sleeps first, while the host queues the run


def ring_only(mesh: Mesh, m: int) -> hir.Program:
    """The communication of ``ring_ag_gemm``."""
    d = mesh.size
    with hir.Program("ring_only", mesh=mesh) as p:
        x = p.input("x", (m // d, K), torch.bfloat16)
        buf = p.empty((d, m // d, K), torch.bfloat16, name="buf")
        r = p.rank()
        p.copy(x, out=buf[0])
        with p.loop(d - 1, name="j") as j:
            p.permute(buf[j], out=buf[j + 1], to=(r + 1) % d, source=(r - 1) % d, on="comm")
        p.output(buf)
    return p


def allgathers_only(mesh: Mesh, m: int) -> hir.Program:
    """The communication of ``collective_ag_gemm``."""
    d = mesh.size
    with hir.Program("allgathers_only", mesh=mesh) as p:
        x = p.input("x", (CHUNKS, m // d // CHUNKS, K), torch.bfloat16)
        rows = p.empty((CHUNKS, m // CHUNKS, K), torch.bfloat16, name="rows")
        with p.loop(CHUNKS, name="i") as i:
            p.allgather(x[i], out=rows[i], on="comm")
        p.output(rows)
    return p


def timed(world: World, versions: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every version, round by round; all ranks start each at the same time."""
    barrier = CommCall("barrier", tuple(range(world.size)), agreed=True)
    times: dict[str, list[float]] = {name: [] for name in versions}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for i in range(rounds + 3):
        for name, run in versions.items():
            torch.cuda.synchronize()
            world.comms.issue(barrier).wait()
            torch.cuda._sleep(LEAD)
            start.record()
            run(i % SETS)
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                times[name].append(start.elapsed_time(end))
    return times


def host_us(run: Callable[[int], object], world: World) -> float:
    """Microseconds of the host for one call, in a queue that the GPU has not begun."""
    torch.cuda.synchronize()
    world.comms.issue(CommCall("barrier", tuple(range(world.size)), agreed=True)).wait()
    torch.cuda._sleep(8 * LEAD)
    begin = time.perf_counter()
    for i in range(10):
        run(i % SETS)
    spent = (time.perf_counter() - begin) / 10 * 1e6
    torch.cuda.synchronize()
    return spent


def rank_main(world: World, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The medians of one rank, a dict for each size."""
    return [one_size(world, m, rounds) for m in sizes]


def one_size(world: World, m: int, rounds: int) -> dict[str, Any]:
    d, device, mesh = world.size, world.device, world.mesh(("tp",))
    generator = torch.Generator(device=device).manual_seed(17 * world.rank + m)
    xs = [torch.randn(m // d, K, device=device, generator=generator).bfloat16() for _ in range(SETS)]
    ws = [(torch.randn(K, N_LOCAL, device=device, generator=generator) / 64).bfloat16() for _ in range(SETS)]
    gathered = [torch.empty(m, K, device=device, dtype=torch.bfloat16) for _ in range(SETS)]
    for x, full in zip(xs, gathered, strict=True):
        world.comms.issue(CommCall("allgather", tuple(range(d)), (x,), (full,))).wait()
    wanted = [full.float() @ w.float() for full, w in zip(gathered, ws, strict=True)]
    y = torch.empty(m, N_LOCAL, device=device, dtype=torch.bfloat16)
    ys = torch.empty(d, m // d, N_LOCAL, device=device, dtype=torch.bfloat16)
    zs = torch.empty(CHUNKS, m // CHUNKS, N_LOCAL, device=device, dtype=torch.bfloat16)
    buf = torch.empty(d, m // d, K, device=device, dtype=torch.bfloat16)
    rows = torch.empty(CHUNKS, m // CHUNKS, K, device=device, dtype=torch.bfloat16)
    chunked = [x.view(CHUNKS, m // d // CHUNKS, K) for x in xs]
    ring, chunks = ring_ag_gemm(mesh, m, K, N_LOCAL, torch.bfloat16), collective_ag_gemm(mesh, m, K, N_LOCAL, CHUNKS, torch.bfloat16)
    runs = {
        "ring": hir.compile(ring, mesh), "ring serial": hir.compile(ring, mesh, overlap="off"), "ring C": hir.compile(ring_only(mesh, m), mesh),
        "chunks": hir.compile(chunks, mesh), "chunks serial": hir.compile(chunks, mesh, overlap="off"),
        "chunks C": hir.compile(allgathers_only(mesh, m), mesh),
    }  # fmt: skip
    versions: dict[str, Callable[[int], object]] = {
        "G": lambda i: torch.mm(gathered[i], ws[i], out=y),
        "ring": lambda i: runs["ring"](xs[i], ws[i], out=ys),
        "ring serial": lambda i: runs["ring serial"](xs[i], ws[i], out=ys),
        "ring C": lambda i: runs["ring C"](xs[i], out=buf),
        "chunks": lambda i: runs["chunks"](chunked[i], ws[i], out=zs),
        "chunks serial": lambda i: runs["chunks serial"](chunked[i], ws[i], out=zs),
        "chunks C": lambda i: runs["chunks C"](chunked[i], out=rows),
    }
    fused = torch_fused(xs, ws, wanted)
    if callable(fused):
        versions["torch fused"] = fused
    with torch.no_grad():
        errors = {}
        for name in ("ring", "ring serial", "chunks", "chunks serial"):
            versions[name](0)
            got = ys.view(m, N_LOCAL) if "ring" in name else zs.view(CHUNKS, d, -1, N_LOCAL).transpose(0, 1).reshape(m, N_LOCAL)
            errors[name] = float((got.float() - wanted[0]).norm() / wanted[0].norm())
        times = timed(world, versions, rounds)
        host = {name: host_us(versions[name], world) for name in ("ring", "chunks")}
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {"m": m, "ms": medians, "errors": errors, "host_us": host, "fused": fused if isinstance(fused, str) else "ran"}


def torch_fused(xs: Sequence[torch.Tensor], ws: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Callable[[int], object] | str:
    """torch's fused operation on the same tensors, or why it does not run here."""
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name

    def run(i: int) -> torch.Tensor:
        return torch.ops.symm_mem.fused_all_gather_matmul(xs[i], [ws[i]], 0, name, return_A=False)[1][0]  # type: ignore[no-any-return]

    try:
        y = run(0)
    except (RuntimeError, TypeError, AssertionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    relative = float((y.float() - wanted[0]).norm() / wanted[0].norm())
    return run if relative < 1e-2 else f"wrong by {relative:.3g}"


def report(d: int, ranks: Sequence[Sequence[dict[str, Any]]]) -> bool:
    """The rows of one world; whether every result was right."""
    right = True
    for of_ranks in zip(*ranks, strict=True):
        m = of_ranks[0]["m"]
        ms = {name: max(one["ms"][name] for one in of_ranks) for name in of_ranks[0]["ms"]}
        for plan in ("ring", "chunks"):
            t, serial, g, c = ms[plan], ms[f"{plan} serial"], ms["G"], ms[f"{plan} C"]
            ideal = max(g, c + g / d)
            error = max(max(one["errors"][plan], one["errors"][f"{plan} serial"]) for one in of_ranks)
            right &= error < 1e-2
            row = {
                "ranks": d, "plan": plan, "M": m, "K": K, "N_local": N_LOCAL, "T_us": round(t * 1e3, 1), "T_serial_us": round(serial * 1e3, 1),
                "G_us": round(g * 1e3, 1), "C_us": round(c * 1e3, 1), "ideal_us": round(ideal * 1e3, 1), "T/ideal": round(t / ideal, 3),
                "serial/T": round(serial / t, 3), "hidden": round(1 - (t - g) / (serial - g), 3),
                "host_us": round(max(one["host_us"][plan] for one in of_ranks), 1),
                "torch_fused_us": round(ms["torch fused"] * 1e3, 1) if "torch fused" in ms else None, "error": float(f"{error:.2g}"),
            }  # fmt: skip
            torch_text = f"{row['torch_fused_us']:8.0f}" if row["torch_fused_us"] else "       -"
            print(
                f"{d:2} {plan:7} M {m:5}  T {row['T_us']:7.0f}  serial {row['T_serial_us']:7.0f}  G {row['G_us']:7.0f}  C {row['C_us']:7.0f}  "
                f"T* {row['ideal_us']:7.0f}  T/T* {row['T/ideal']:5.2f}  hidden {row['hidden']:6.0%}  host {row['host_us']:6.0f}  torch {torch_text}"
            )
            print(json.dumps(row))
        if of_ranks[0]["fused"] != "ran":
            print(f"   torch fused_all_gather_matmul: {of_ranks[0]['fused']}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="AG+GEMM on ranks that share one GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--copies", choices=("plain", "engine"), default="plain", help="how large tensors move (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 1
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {torch.cuda.get_device_name()}")
    print(f"K {K}, N_local {N_LOCAL}, bf16, copies: {options.copies}; µs")
    os.environ["HOSTIR_SYMM_COPIES"] = options.copies
    right = True
    for d in options.ranks:
        right &= report(d, hir.launch.spawn(rank_main, d, one_gpu=True, args=(options.sizes, options.rounds)))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
