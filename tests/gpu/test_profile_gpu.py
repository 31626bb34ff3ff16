"""Profiles on a GPU: times are those of the device, on the stream where each thing ran."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.dispatch import ExecutorDispatch
from hostir.graph.fusion import Fusion
from hostir.overlap.programs import host_sum, ring_ag_gemm
from hostir.runtime import profile as profile_module
from hostir.sim.events import ROUNDING_NS

MODES = ("checked", "compiled")
SIZE = 1024


def copies_beside_gemms(chunks: int) -> hir.Program:
    """Chunks of ``x`` are copied on the stream ``side`` while the chunk before is multiplied on main."""
    with hir.Program("beside") as p:
        x = p.input("x", (chunks, SIZE, SIZE), torch.float32)
        w = p.input("w", (SIZE, SIZE), torch.float32)
        y = p.empty((chunks, SIZE, SIZE), torch.float32, name="y")
        with p.loop(chunks) as i:
            t = p.empty((SIZE, SIZE), torch.float32, name="t")
            p.copy(x[i], out=t, on="side")
            p.matmul(t, w, out=y[i])
        p.output(y)
    return p


@pytest.mark.parametrize("mode", MODES)
def test_rows_have_the_device_exact_bytes_and_time_on_it(mode: str) -> None:
    run = hir.compile(host_sum(4, 1 << 16), mode=mode)
    a, b = torch.randn(2, 4, 1 << 16, device="cuda").bfloat16()
    expected = run(a, b)
    with hir.profile() as prof:
        results = [run(a, b) for _ in range(3)]
    assert all(torch.equal(r, expected) for r in results)
    (row,) = prof.segments
    assert (row.name, row.calls, row.device) == ("fma", 12, "cuda:0")
    assert (row.input_bytes, row.output_bytes) == (12 * (1 << 16) * 8, 12 * (1 << 16) * 4)
    assert row.kernels >= row.calls
    assert 0 < row.kernel_ms < prof.wall_ms
    assert row.gbs > 0
    assert prof.copy_ceiling("cuda:0") > 10
    assert "cuda:0" in prof.table(ceiling=True)


def test_a_longer_kernel_takes_longer() -> None:
    f = Fusion("spin")
    x = f.input((4,), torch.float32)
    f.output(hir.ops.add(x, x))
    ex = ExecutorDispatch.make(f, device="cuda")
    t = torch.ones(4, device="cuda")
    ex.compile(ex.fusion, [t])
    ex.run([t])
    with hir.profile() as prof:
        ex.run([t])
        original = ex._run

        def slow(args: Any, outputs: Any) -> list[torch.Tensor]:
            torch.cuda._sleep(50_000_000)  # far longer than any launch
            results: list[torch.Tensor] = original(args, outputs)
            return results

        ex._run = slow  # type: ignore[method-assign]
        ex.run([t])
    (row,) = prof.segments
    quick, long = (e.end_ns - e.start_ns for e in row.events)
    assert long > 10 * quick
    assert row.kernel_ms == (quick + long) / 1e6


def test_what_runs_on_a_stream_is_in_order_on_its_lane(tmp_path: Path) -> None:
    run = hir.compile(copies_beside_gemms(6))
    x, w = torch.randn(6, SIZE, SIZE, device="cuda"), torch.randn(SIZE, SIZE, device="cuda")
    quiet = run(x, w)
    before = torch.cuda.current_stream()
    with hir.profile() as prof:
        y = run(x, w)
    assert torch.cuda.current_stream() == before
    assert torch.equal(y, quiet)
    lanes = {e.lane for e in prof.events}
    assert {"main", "side"} <= lanes
    for lane in lanes:
        of_lane = [e for e in prof.events if e.lane == lane]
        assert all(b.start_ns >= a.end_ns - ROUNDING_NS for a, b in itertools.pairwise(of_lane)), lane
    assert [(c.kind, c.calls, c.bytes) for c in prof.copies] == [("copy", 6, 6 * SIZE * SIZE * 4)]
    prof.save(tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sorted(r["args"]["name"] for r in rows if r["name"] == "thread_name") == sorted(lanes)
    assert sum(r["ph"] == "X" for r in rows) == len(prof.events)


def test_host_work_before_a_stop_is_not_lost_and_events_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "MAX_MARKS", 64)
    run = hir.compile(host_sum(4, 1 << 12))
    a, b = torch.randn(2, 4, 1 << 12, device="cuda").bfloat16()
    run(a, b)
    with hir.profile() as prof:
        for _ in range(50):
            run(a, b)
    assert prof.segments[0].calls == 200
    starts = [e.start_ns for e in prof.events]
    assert starts == sorted(starts)


def test_a_graph_is_profiled_action_by_action_and_replayed_again_afterwards() -> None:
    run = hir.compile(host_sum(4, 1 << 12), mode="graph")
    a, b = torch.randn(2, 4, 1 << 12, device="cuda").bfloat16()
    expected = [run(a, b) for _ in range(3)][-1]
    with hir.profile() as prof:
        results = [run(a, b) for _ in range(3)]
    assert all(torch.equal(r, expected) for r in results)
    assert [(r.name, r.calls) for r in prof.segments] == [("fma", 12)]
    (plan,) = run._plans.values()
    assert all(not bound.seen and not bound.graphs for bound in plan.profiled()._sets.values())
    assert torch.equal(run(a, b), expected)


@pytest.mark.parametrize("mode", MODES)
def test_rank_threads_on_one_gpu_have_their_communication_timed(mode: str) -> None:
    def ranks(world: Any) -> Any:
        mesh = world.mesh(("tp",))
        run = hir.compile(ring_ag_gemm(mesh, 2 * SIZE, SIZE, SIZE), mesh, mode=mode)
        x, w = torch.ones(SIZE, SIZE, device="cuda"), torch.ones(SIZE, SIZE, device="cuda")
        run(x, w)
        with hir.profile() as prof:
            y = run(x, w)
        assert torch.equal(y, torch.full_like(y, SIZE))
        return prof

    for rank, prof in enumerate(hir.launch.spawn(ranks, 2, transport="threads", device="cuda")):
        (permute,) = prof.communications
        assert (permute.rank, permute.bytes, permute.device) == (rank, SIZE * SIZE * 4, "cuda:0")
        assert permute.ms > 0
        o = prof.overlap
        assert 0 <= o.exposed_ms <= o.total_ms
        assert prof.segments[0].calls == 2


@pytest.mark.gpus(2)
def test_nccl_ranks_profile_their_own_devices() -> None:
    def ranks(world: Any) -> list[tuple[Any, ...]]:
        mesh = world.mesh(("tp",))
        run = hir.compile(ring_ag_gemm(mesh, 2 * SIZE, SIZE, SIZE), mesh)
        x, w = torch.ones(SIZE, SIZE, device=world.device), torch.ones(SIZE, SIZE, device=world.device)
        run(x, w)
        with hir.profile() as prof:
            run(x, w)
        return [(c.device, c.transport, c.ms > 0) for c in prof.communications]

    assert hir.launch.spawn(ranks, 2, transport="nccl") == [[(f"cuda:{i}", "nccl", True)] for i in range(2)]
