"""A host-dimension sum on the GPU, S1: c = Σ_h a[h] · b[h] (bf16 terms, fp32 accumulator), the addition fused into each term's kernel.

Against the two-step form (mul, then add into c), addcmul_, torch.compile on the whole (no host loop) and, where it can be loaded,
nvFuser's fused term kernel. The rate counts the bytes of the formula n · (H (ea + eb) + ec (2 ceil(H / u) + 1)) and is compared with a
device copy in the same run.

    python benchmarks/host_sum.py [--log2n 26] [--terms 8] [--nvfuser ARCHIVE]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import gpu_ms, header, median, row

import hostir as hir
from hostir.overlap.programs import host_sum
from hostir.passes.jam import jam


def eager_form(terms: int, n: int) -> hir.Program:
    """The two-step form: each term is stored, then added."""
    with hir.Program("host_sum_eager") as p:
        a = p.input("a", (terms, n), torch.bfloat16)
        b = p.input("b", (terms, n), torch.bfloat16)
        c = p.zeros((n,), torch.float32, name="c")
        t = p.empty((n,), torch.float32, name="t")
        with p.loop(terms, name="h") as h:
            p.call(lambda x, y: x.float() * y.float(), a[h], b[h], out=t)
            p.add(c, t, out=c)
        p.output(c)
    return p


def nvfuser_loop(archive: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """nvFuser's kernel c + a · b, called once a term."""
    sys.path.insert(0, str(Path(archive).parent))
    nvfuser_peer: Any = importlib.import_module("nvfuser_peer")

    nv = nvfuser_peer.load(archive)
    with nv.FusionDefinition() as fd:
        x = fd.define_tensor(shape=[-1], contiguity=[True], dtype=nv.DataType.BFloat16)
        y = fd.define_tensor(shape=[-1], contiguity=[True], dtype=nv.DataType.BFloat16)
        z = fd.define_tensor(shape=[-1], contiguity=[True], dtype=nv.DataType.Float)
        fd.add_output(fd.ops.add(z, fd.ops.mul(fd.ops.cast(x, nv.DataType.Float), fd.ops.cast(y, nv.DataType.Float))))

    def run() -> torch.Tensor:
        c = torch.zeros(a.shape[1], device="cuda")
        for h in range(a.shape[0]):
            (c,) = fd.execute([a[h], b[h], c])
        return c

    return run


def memory() -> None:
    """What a run holds, for few and many terms."""
    for h in (4, 64):
        run = hir.compile(host_sum(h, 1 << 20), outputs="static")
        x, y = (torch.randn(h, 1 << 20, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        run(x, y)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(x, y)
        torch.cuda.synchronize()
        peak, planned = torch.cuda.max_memory_allocated() - before, hir.verify(host_sum(h, 1 << 20)).peak_bytes
        print(f"memory at H = {h:2}: {planned:,} bytes of program buffers (plan), {peak:,} more at the peak of a run (allocator)")
        row(terms=h, plan_peak_bytes=planned, run_extra_bytes=peak)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log2n", type=int, default=26)
    parser.add_argument("--terms", type=int, default=8)
    parser.add_argument("--nvfuser", default=None)
    options = parser.parse_args()
    terms, n = options.terms, 1 << options.log2n
    header(f"host-dimension sum, H = {terms}, n = 2^{options.log2n}")
    a, b = (torch.randn(terms, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    reference = (a[:, : 1 << 20].double() * b[:, : 1 << 20].double()).sum(0)
    out = torch.empty(n, device="cuda")
    runs = {
        "fused": hir.compile(host_sum(terms, n)),
        "fused, jam 2": hir.compile(jam(host_sum(terms, n), 2)),
        "fused, jam 4": hir.compile(jam(host_sum(terms, n), 4)),
        "mul + add_out (program)": hir.compile(eager_form(terms, n)),
    }
    print(runs["fused"].explain() if runs["fused"](a, b, out=out) is not None else "")
    versions: dict[str, Callable[[], Any]] = {name: functools.partial(r, a, b, out=out) for name, r in runs.items()}

    def addcmul() -> torch.Tensor:
        c = torch.zeros(n, device="cuda")
        for h in range(terms):
            c.addcmul_(a[h].float(), b[h].float())
        return c

    def rounded_terms() -> torch.Tensor:
        c, t = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda", dtype=torch.bfloat16)
        for h in range(terms):
            torch.mul(a[h], b[h], out=t)
            torch.add(c, t, out=c)
        return c

    def by_hand() -> torch.Tensor:
        c, t = torch.zeros(n, device="cuda"), torch.empty(n, device="cuda")
        for h in range(terms):
            torch.mul(a[h].float(), b[h].float(), out=t)
            torch.add(c, t, out=c)
        return c

    whole = torch.compile(lambda x, y: (x.float() * y.float()).sum(0))
    versions |= {
        "mul + add_out (torch)": by_hand,
        "mul to bf16 + add_out (torch)": rounded_terms,
        "addcmul_ (torch)": addcmul,
        "torch.compile, no host loop": lambda: whole(a, b),
    }
    if options.nvfuser:
        versions["nvFuser, fused term"] = nvfuser_loop(options.nvfuser, a, b)
    for name, run in versions.items():
        got = run()[: 1 << 20].double()
        error = float((got - reference).norm() / reference.norm())
        bound = 3e-3 if "to bf16" in name else 1e-5
        assert error < bound, f"{name}: relative error {error:.1e}"
    src, dst = (torch.empty(1 << 30, device="cuda", dtype=torch.uint8) for _ in range(2))
    src.random_(0, 255)
    versions["device copy of 1 GiB"] = lambda: dst.copy_(src)
    times = gpu_ms(versions)
    copy_rate = 2 * (1 << 30) / median(times["device copy of 1 GiB"]) / 1e6
    base = median(times["mul + add_out (torch)"])
    folded = {"fused": 1, "fused, jam 2": 2, "fused, jam 4": 4}
    print(f"{'version':32} {'median':>11}   speed against mul + add_out (torch)")
    for name, values in times.items():
        ms = median(values)
        facts = {"version": name, "ms": ms, "worst_ms": max(values), "speedup_vs_add_out": base / ms}
        text = f"{name:32} {ms:8.3f} ms   {base / ms:5.2f}x"
        if name in folded:
            moved = n * (terms * 4 + 4 * (2 * -(-terms // folded[name]) + 1))
            rate = moved / ms / 1e6
            facts |= {"bytes": moved, "gb_per_s": rate, "of_copy": rate / copy_rate}
            text += f"   {rate:7.0f} GB/s = {rate / copy_rate:.2f} of the copy rate ({copy_rate:.0f})"
        print(text)
        row(**facts)
    memory()
    fused = median(times["fused"])
    others = {name: median(times[name]) / fused for name in times if "add_out" in name}
    print("fused against: " + ", ".join(f"{name} {ratio:.2f}x" for name, ratio in others.items()))
    return 0 if others["mul + add_out (torch)"] >= 1.9 else 1


if __name__ == "__main__":
    sys.exit(main())
