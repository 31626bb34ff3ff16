"""Host cost of device segments on a GPU: H3, one cached Triton segment; H5, 12 chained segments of two operations each, kept apart.

    python benchmarks/segments.py [--nvfuser ARCHIVE]

Against eager torch, torch.compile (the 12 units as 12 compiled calls, and all 24 operations as one graph) and, where it can be loaded,
nvFuser (default, host-IR lowering, host-IR JIT). Host time is measured with the device idle at the start of each round.
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
from timing import gpu_ms, header, host_us, median, row

import hostir as hir
from hostir.dispatch import ExecutorDispatch

SEGMENTS, SIZE = 12, 64


@hir.unit
def step(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + 0.5)


def chain(segments: int = SEGMENTS, n: int = SIZE) -> hir.Program:
    """``segments`` calls of a two-operation unit, one after the other."""
    with hir.Program("chain") as p:
        x = p.input("x", (n, n), torch.float32)
        for _ in range(segments):
            x = p.call(step, x)
        p.output(x)
    return p


def eager(x: torch.Tensor, segments: int = SEGMENTS) -> torch.Tensor:
    for _ in range(segments):
        x = torch.relu(x + 0.5)
    return x


def nvfuser(archive: str, options: list[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same chain in nvFuser, segments kept apart by ``segment_set``."""
    sys.path.insert(0, str(Path(archive).parent))
    nvfuser_peer: Any = importlib.import_module("nvfuser_peer")

    nv = sys.modules.get("nvfuser_direct") or nvfuser_peer.load(archive)
    with nv.FusionDefinition() as fd:
        t = fd.define_tensor(shape=[SIZE, SIZE], contiguity=[True, True], dtype=nv.DataType.Float)
        half = fd.define_scalar(0.5)
        for i in range(SEGMENTS):
            t = fd.ops.relu(fd.ops.add(t, half))
            if i + 1 < SEGMENTS:
                t = fd.ops.segment_set(t)
        fd.add_output(t)
    extra: dict[str, Any] = {"_enable_options": options} if options else {}
    return lambda x: fd.execute([x], **extra)[0]


def attempt(name: str, versions: dict[str, Callable[[], Any]], make: Callable[[], Callable[[], Any]]) -> None:
    """Add a peer, or say why it is not there."""
    try:
        run = make()
        run()
        versions[name] = run
    except Exception as e:  # noqa: BLE001  (a peer's failure is a line of the report)
        print(f"{name}: not measured, {type(e).__name__}: {str(e).splitlines()[0][:140]}")


def report(target: str, versions: dict[str, Callable[[], Any]], check: Callable[[Any], bool]) -> dict[str, float]:
    for name, run in versions.items():
        assert check(run()), f"{name} gives another result"
    host, device = host_us(versions, repeats=20, rounds=31), gpu_ms(versions)
    print(f"\n{target}\n{'version':44} {'host µs':>9} {'worst':>9} {'to the end, µs':>15}")
    for name in versions:
        us, worst, end = median(host[name]), max(host[name]), median(device[name]) * 1e3
        print(f"{name:44} {us:9.2f} {worst:9.2f} {end:15.2f}")
        row(target=target, version=name, host_us=us, host_worst_us=worst, device_us=end)
    return {name: median(host[name]) for name in versions}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvfuser", default=None)
    archive = parser.parse_args().nvfuser
    header("host cost of device segments")
    x, out = torch.randn(SIZE, SIZE, device="cuda"), torch.empty(SIZE, SIZE, device="cuda")
    one, twelve = torch.relu(x + 0.5), eager(x)

    single = hir.compile(chain(1))
    ex = ExecutorDispatch.make(hir.trace(lambda t: torch.relu(t + 0.5), hir.spec((SIZE, SIZE), torch.float32)), device="cuda")
    ex.compile(ex.fusion, [x])
    compiled_step = torch.compile(lambda t: torch.relu(t + 0.5))
    versions: dict[str, Callable[[], Any]] = {
        "hostir compiled, out=": lambda: single(x, out=out),
        "hostir compiled, fresh": lambda: single(x),
        f"hostir {ex.name}.run": lambda: ex.run([x])[0],
        "eager torch": lambda: torch.relu(x + 0.5),
        "torch.compile": lambda: compiled_step(x),
    }
    print(single.explain())
    found = report("H3: one segment of two operations", versions, lambda y: torch.equal(y, one))

    whole = torch.compile(eager)
    compiled, static = hir.compile(chain()), hir.compile(chain(), outputs="static")
    graph = hir.compile(chain(), mode="graph", outputs="static")

    def compiled_chain() -> torch.Tensor:
        t = x
        for _ in range(SEGMENTS):
            t = compiled_step(t)
        return t

    versions = {
        "hostir compiled, fresh": lambda: compiled(x),
        "hostir compiled, static": lambda: static(x),
        "hostir graph, static": lambda: graph(x),
        "eager torch": lambda: eager(x),
        "torch.compile, 12 calls": compiled_chain,
        "torch.compile, one graph (fused)": lambda: whole(x),
    }

    def peer(options: list[str]) -> Callable[[], Any]:
        execute = nvfuser(str(archive), options)
        return lambda: execute(x)

    for name, options in (("default", []), ("host-IR lowering", ["host_ir_lowering"]), ("host-IR JIT", ["host_ir_lowering", "host_ir_jit"])):
        if archive:
            attempt(f"nvFuser, {name}", versions, functools.partial(peer, options))
    chained = report(f"H5: {SEGMENTS} chained segments", versions, lambda y: torch.equal(y, twelve))
    print(f"\nH3 {min(found['hostir compiled, out='], 999):.1f} µs (bar 12), H5 compiled {chained['hostir compiled, static']:.1f} µs (bar 138),"
          f" graph {chained['hostir graph, static']:.1f} µs (bar 10)")  # fmt: skip
    return 0 if found["hostir compiled, out="] <= 12 and chained["hostir graph, static"] <= 10 else 1


if __name__ == "__main__":
    sys.exit(main())
