"""C3: the simulator itself. How long it takes to simulate a ring AG+GEMM on many ranks (schedule and timeline), and what it predicts.

Every row is the median of several runs in this process; the machine is the H200 preset. The bar for 1,024 ranks is 30 s, the aim 3 s.

    python benchmarks/simulate.py [--ranks 8 64 1024] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time

import torch
from timing import header, median, row

import hostir as hir
from hostir.overlap.programs import ring_ag_gemm


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    header("simulating a ring AG+GEMM, M = 65536, K = 8192, N = 3584 a rank, bf16")
    p = ring_ag_gemm(hir.Mesh(("tp",)), 65536, 8192, 3584, torch.bfloat16)
    print(f"{'ranks':>6} {'simulate':>10} {'cpu':>10} {'predicted':>12} {'in order':>12} {'exposed':>12}")
    for ranks in options.ranks:
        wall, cpu = [], []
        for _ in range(options.rounds):
            start, used = time.perf_counter(), time.process_time()
            timeline = hir.simulate(p, hir.Machine.h200(), mesh=ranks)
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
        serial = hir.simulate(p, hir.Machine.h200(), mesh=ranks, overlap="off")
        times = f"{timeline.makespan * 1e3:>9.3f} ms {serial.makespan * 1e3:>9.3f} ms {timeline.exposed_comm * 1e3:>9.3f} ms"
        print(f"{ranks:>6} {median(wall):>8.3f} s {median(cpu):>8.3f} s {times}")
        row(
            bench="C3 simulate", ranks=ranks, seconds=median(wall), cpu_seconds=median(cpu), worst_seconds=max(wall),
            predicted_ms=timeline.makespan * 1e3, predicted_in_order_ms=serial.makespan * 1e3, exposed_ms=timeline.exposed_comm * 1e3,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
