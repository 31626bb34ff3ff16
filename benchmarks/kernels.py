"""K1: device time of generated kernels against torch.compile, eager torch and the rate of a device copy; and the host cost of a launch.

    python benchmarks/kernels.py [--only NAME ...] [--quick]

Versions run in turn in one process; inputs are random and rotated so that the L2 cache does not serve them; every result is compared
with an f32 reference in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from timing import header, row

import hostir as hir
from hostir.dispatch import KernelExecutor

BF16, F32 = torch.bfloat16, torch.float32
Make = Callable[[], list[torch.Tensor]]


def r(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=F32).to(dtype)


CASES: dict[str, tuple[Callable[..., Any], Make]] = {
    "mul_add": (lambda a, b, c: a * b + c, lambda: [r(1 << 26), r(1 << 26), r(1 << 26)]),
    "bias_gelu": (lambda x, b: F.gelu(x + b), lambda: [r(8192, 8192), r(8192)]),
    "bias_gelu_tanh": (lambda x, b: F.gelu(x + b, approximate="tanh"), lambda: [r(8192, 8192), r(8192)]),
    "silu_mul": (lambda x, y: F.silu(x) * y, lambda: [r(8192, 14336), r(8192, 14336)]),
    "residual_scale": (lambda x, y, s: x + y * s, lambda: [r(8192, 8192), r(8192, 8192), r(8192)]),
    "cast_f32": (lambda x: x.float(), lambda: [r(1 << 26)]),
    "rotary": (lambda x, c, s: torch.cat([-x[..., 64:], x[..., :64]], -1) * s + x * c, lambda: [r(32, 4096, 128), r(4096, 128), r(4096, 128)]),
    "transpose": (lambda x: (x.t() * 2).contiguous(), lambda: [r(8192, 8192)]),
    "permute_0213": (lambda x: (x.permute(0, 2, 1, 3) + 1).contiguous(), lambda: [r(8, 2048, 32, 128)]),
    "sum_last": (lambda x: x.sum(1), lambda: [r(8192, 8192)]),
    "sum_first": (lambda x: x.sum(0), lambda: [r(8192, 8192)]),
    "sum_all": (lambda x: x.sum(), lambda: [r(8192, 8192)]),
    "sum_last_f32": (lambda x: x.sum(1), lambda: [r(4096, 16384, dtype=F32)]),
    "sum_partials": (lambda x: x.sum(0), lambda: [r(8, 1 << 23)]),
    "amax_last": (lambda x: x.amax(1), lambda: [r(16384, 4096)]),
    "mean_var": (lambda x: (x.mean(1), x.var(1)), lambda: [r(16384, 4096)]),
    "argmax": (lambda x: x.argmax(1), lambda: [r(4096, 32000)]),
    "softmax": (lambda x: F.softmax(x, 1), lambda: [r(8192, 8192)]),
    "softmax_long": (lambda x: F.softmax(x, 1), lambda: [r(1024, 65536)]),
    "softmax_short": (lambda x: F.softmax(x, 1), lambda: [r(1 << 18, 256)]),
    "log_softmax_vocab": (lambda x: F.log_softmax(x.float(), 1), lambda: [r(2048, 32000)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8192,), w, b), lambda: [r(8192, 8192), r(8192), r(8192)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8192,), w), lambda: [r(8192, 8192), r(8192)]),
    "residual_rms_norm": (lambda x, y, w: (x + y, F.rms_norm(x + y, (4096,), w)), lambda: [r(16384, 4096), r(16384, 4096), r(4096)]),
}


def outputs(fn: Callable[..., Any], args: list[torch.Tensor]) -> list[torch.Tensor]:
    y = fn(*args)
    return list(y) if isinstance(y, tuple) else [y]


def nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def device_us(versions: dict[str, list[Callable[[], object]]], rounds: int) -> dict[str, float]:
    """Median microseconds of device time for one call, versions interleaved, inputs rotated within each."""
    times: dict[str, list[float]] = {n: [] for n in versions}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for calls in versions.values():
        for call in calls:
            call()
    for _ in range(rounds):
        for name, calls in versions.items():
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000)  # the host gets ahead
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / len(calls))
    return {n: statistics.median(t) for n, t in times.items()}


def measure(name: str, rounds: int, copy_gb_s: float) -> dict[str, float]:
    fn, make = CASES[name]
    first = make()
    per_set = nbytes(first) + nbytes(outputs(fn, first))
    sets = [first, *(make() for _ in range(max(2, math.ceil(300e6 / per_set))))]
    f = hir.trace(fn, *(hir.spec(tuple(a.shape), a.dtype) for a in first))
    began = time.perf_counter()
    ex = KernelExecutor().compile(f, first)
    cold = time.perf_counter() - began
    want = outputs(fn, [a.float() for a in first])
    torch._dynamo.reset()
    compiled = torch.compile(fn, dynamic=False)
    for got, w in zip(ex.run(first), want, strict=True):
        if got.dtype.is_floating_point:
            torch.testing.assert_close(got.float(), w.float(), rtol=2e-2, atol=2e-2)
    outs = [outputs(fn, s) for s in sets]
    versions: dict[str, list[Callable[[], object]]] = {
        "hostir": [ex.bind(s, o) for s, o in zip(sets, outs, strict=True)],
        "compile": [partial(compiled, *s) for s in sets],
        "eager": [partial(fn, *s) for s in sets],
    }
    us = device_us(versions, rounds)
    floor = per_set / copy_gb_s / 1e3
    loaded = ex.segment.loaded
    facts = {
        "hostir_us": us["hostir"], "compile_us": us["compile"], "eager_us": us["eager"], "floor_us": floor,
        "speedup": us["compile"] / us["hostir"], "of_copy": floor / us["hostir"], "first_ms": cold * 1e3,
        "kernels": ex.num_kernels, "regs": max((k.num_regs or 0) for k in loaded), "spills": sum((k.num_spills or 0) for k in loaded),
    }  # fmt: skip
    print(f"{name:20} {us['hostir']:10.1f} {us['compile']:10.1f} {us['eager']:10.1f} {floor:9.1f} {facts['speedup']:8.2f}x {facts['of_copy']:8.0%}"
          f" {ex.scheduler}, {ex.num_kernels} kernels, {facts['regs']} regs, {facts['spills']} spills, first {facts['first_ms']:.0f} ms")  # fmt: skip
    return facts


def copy_rate() -> float:
    """GB/s of reading and writing in a device copy of 1 GB."""
    a, b = torch.empty(2, 1 << 29, dtype=torch.uint8, device="cuda")
    us = device_us({"copy": [lambda: b.copy_(a)]}, 20)["copy"]
    return float(2 * a.numel() / us / 1e3)


def host_cost() -> dict[str, float]:
    """Microseconds of host time for one cached launch of c + a * b over 64 x 64."""
    a, b, c, o = (r(64, 64, dtype=F32) for _ in range(4))
    ex = KernelExecutor().compile(hir.trace(lambda a, b, c: c + a * b, *(hir.spec((64, 64), F32) for _ in range(3))), [a, b, c])
    compiled = torch.compile(lambda a, b, c: c + a * b)
    versions: dict[str, Callable[[], object]] = {
        "bound": ex.bind([a, b, c], [o]),
        "run, out given": lambda: ex.run([a, b, c], [o]),
        "run, in place": lambda: ex.run([a, b, c], [c]),
        "run, fresh output": lambda: ex.run([a, b, c]),
        "torch.compile": lambda: compiled(a, b, c),
        "eager": lambda: c + a * b,
    }
    found = {}
    with torch.inference_mode():
        for name, call in versions.items():
            times = []
            for _ in range(5):
                call()
            for _ in range(30):
                torch.cuda.synchronize()
                began = time.perf_counter_ns()
                for _ in range(100):
                    call()
                times.append((time.perf_counter_ns() - began) / 1e5)
            found[name] = statistics.median(times)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    header("generated kernels")
    print("\nhost µs of one launch, 64 x 64:")
    for name, us in host_cost().items():
        print(f"  {name:20} {us:7.2f}")
        row(target="H3", version=name, host_us=us)
    rate = copy_rate()
    print(f"\ncopy: {rate:.0f} GB/s\n{'':20} {'hostir µs':>10} {'compile':>10} {'eager':>10} {'floor':>9} {'speedup':>9} {'of copy':>8}")
    found = {}
    for name in options.only:
        found[name] = measure(name, 10 if options.quick else 30, rate)
        row(target="K1", case=name, **found[name])
    speedups = {n: f["speedup"] for n, f in found.items()}
    worst = min(speedups, key=lambda n: speedups[n])
    mean = math.exp(statistics.mean(map(math.log, speedups.values())))
    share = math.exp(statistics.mean(math.log(f["of_copy"]) for f in found.values()))
    print(f"\nagainst torch.compile: geomean {mean:.3f}x, worst {worst} {speedups[worst]:.3f}x; of the copy rate: geomean {share:.0%}")
    return 0 if speedups[worst] >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
