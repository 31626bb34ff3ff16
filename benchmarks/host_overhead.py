"""Host cost of the compiled mode against the same torch calls written by hand (CPU, one thread, tiny tensors).

H1: 64 calls of a tiny GEMM into an output. The same tensors again; two sets of tensors in turn; a fresh output at each run.
H2: a loop of 8 slices and GEMMs, against eager slicing.

    python benchmarks/host_overhead.py

Versions are run in turn; the table gives medians over the rounds, the ratio of medians, and the worst round.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import hostir as hir

CALLS, SIZE, REPEATS, ROUNDS = 64, 4, 40, 41


def chain(calls: int, n: int) -> hir.Program:
    """``calls`` GEMMs y[i] = x @ w[i]."""
    with hir.Program("chain") as p:
        x = p.input("x", (n, n), torch.float32)
        w = p.input("w", (calls, n, n), torch.float32)
        y = p.empty((calls, n, n), torch.float32, name="y")
        for i in range(calls):
            p.matmul(x, w[i], out=y[i])
        p.output(y)
    return p


def loop(chunks: int, rows: int, k: int, n: int) -> hir.Program:
    """y[i·rows : (i+1)·rows] = x[i·rows : (i+1)·rows] @ w, a chunk a trip."""
    with hir.Program("chunks") as p:
        x = p.input("x", (chunks * rows, k), torch.float32)
        w = p.input("w", (k, n), torch.float32)
        y = p.empty((chunks * rows, n), torch.float32, name="y")
        with p.loop(chunks) as i:
            p.matmul(x.chunk(i, chunks), w, out=y.chunk(i, chunks))
        p.output(y)
    return p


def interleaved(versions: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds of one call for every version, round by round."""
    times: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(ROUNDS):
        for name, run in versions.items():
            start = time.perf_counter_ns()
            for _ in range(REPEATS):
                run()
            times[name].append((time.perf_counter_ns() - start) / REPEATS / 1e3)
    return times


def report(target: str, times: dict[str, list[float]], hand: str, mine: str, bar: float, aim: float) -> bool:
    by_hand, own = statistics.median(times[hand]), statistics.median(times[mine])
    ratios = [b / a for a, b in zip(times[hand], times[mine], strict=True)]
    row = {
        "target": target, "hand_us": round(by_hand, 2), "hostir_us": round(own, 2), "ratio": round(own / by_hand, 3),
        "worst_round": round(max(ratios), 3), "bar": bar, "aim": aim,
    }  # fmt: skip
    print(
        f"{target:34} by hand {by_hand:8.2f} µs   hostir {own:8.2f} µs   ratio {own / by_hand:5.3f} (worst {max(ratios):5.3f})   bar {bar}, aim {aim}"
    )
    print(json.dumps(row))
    return own / by_hand <= bar


def main() -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {CALLS} calls of a {SIZE}x{SIZE} GEMM, {ROUNDS} rounds of {REPEATS}")
    sets = [(torch.randn(SIZE, SIZE), torch.randn(CALLS, SIZE, SIZE), torch.empty(CALLS, SIZE, SIZE)) for _ in range(2)]
    run = hir.compile(chain(CALLS, SIZE))
    static = hir.compile(chain(CALLS, SIZE), outputs="static")

    def views(t: torch.Tensor) -> list[torch.Tensor]:
        return list(t.unbind(0))

    prepared = [(x, views(w), views(y)) for x, w, y in sets]

    def by_hand(which: int) -> None:
        x, ws, ys = prepared[which]
        with torch.no_grad():
            for w, y in zip(ws, ys, strict=True):
                torch.mm(x, w, out=y)

    def by_hand_fresh() -> torch.Tensor:
        x, ws, _ = prepared[0]
        y = torch.empty(CALLS, SIZE, SIZE)
        with torch.no_grad():
            for i in range(CALLS):
                torch.mm(x, ws[i], out=y[i])
        return y

    turn = [0]

    def alternate(call: Callable[[int], object]) -> Callable[[], object]:
        def run_one() -> object:
            turn[0] ^= 1
            return call(turn[0])

        return run_one

    x, w, y = sets[0]
    run(x, w, out=y)
    torch.testing.assert_close(y, torch.stack([x @ m for m in w]))
    torch.testing.assert_close(run(x, w), y)
    fine = report("H1 same tensors again", interleaved({"hand": lambda: by_hand(0), "hostir": lambda: run(x, w, out=y)}), "hand", "hostir", 1.0, 0.95)
    both = interleaved({"hand": alternate(by_hand), "hostir": alternate(lambda i: run(*sets[i][:2], out=sets[i][2]))})
    fine &= report("H1 two sets in turn", both, "hand", "hostir", 1.3, 1.0)
    fine &= report("H1 fresh output", interleaved({"hand": by_hand_fresh, "hostir": lambda: run(x, w)}), "hand", "hostir", 1.25, 1.0)
    report("H1 static output", interleaved({"hand": lambda: by_hand(0), "hostir": lambda: static(x, w)}), "hand", "hostir", 1.0, 0.95)

    chunks, rows, k, n = 8, 4, 4, 4
    a, b, c = torch.randn(chunks * rows, k), torch.randn(k, n), torch.empty(chunks * rows, n)
    chunked = hir.compile(loop(chunks, rows, k, n))
    chunked(a, b, out=c)
    torch.testing.assert_close(c, a @ b)

    def eager() -> None:
        for i in range(chunks):
            torch.mm(a[i * rows : (i + 1) * rows], b, out=c[i * rows : (i + 1) * rows])

    fine &= report("H2 slice + GEMM, 8 chunks", interleaved({"hand": eager, "hostir": lambda: chunked(a, b, out=c)}), "hand", "hostir", 0.5, 0.35)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
