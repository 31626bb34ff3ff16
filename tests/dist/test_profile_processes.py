"""Profiles of ranks that are processes: each has its own, on one clock, and their events make one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import hostir as hir
from hostir.overlap.programs import ring_ag_gemm
from hostir.sim.events import TraceEvent, save_trace

NUM = 2


def profiled(world: Any) -> tuple[list[tuple[Any, ...]], list[TraceEvent], str, float]:
    mesh = world.mesh(("tp",))
    run = hir.compile(ring_ag_gemm(mesh, 8, 4, 2), mesh)
    x, w = torch.ones(8 // NUM, 4), torch.ones(4, 2)
    run(x, w)
    with hir.profile() as prof:
        run(x, w)
    rows = [(r.rank, r.name, r.calls, r.input_bytes, r.output_bytes) for r in prof.segments]
    rows += [(c.rank, c.kind, c.calls, c.input_bytes, c.output_bytes, c.team, c.transport) for c in prof.communications]
    return rows, prof.events, prof.table(), prof.overlap.ratio


def test_every_process_profiles_itself_and_the_events_make_one_trace(tmp_path: Path) -> None:
    found = hir.launch.spawn(profiled, NUM, transport="gloo")
    for rank, (rows, _, table, ratio) in enumerate(found):
        matmul = (rank, "matmul", NUM, NUM * (64 + 32), NUM * 32)
        permute = (rank, "permute", NUM - 1, 64, 64, tuple(range(NUM)), "gloo")
        assert rows == [matmul, permute]
        assert "gloo" in table
        assert 0 <= ratio <= 1
    events = [e for _, of_rank, _, _ in found for e in of_rank]
    sent, received = ([e for e in events if e.rank == rank and e.kind == "communication"] for rank in range(NUM))
    # on one clock: the two ends of a message are under way at one time
    assert max(sent[0].start_ns, received[0].start_ns) <= min(sent[0].end_ns, received[0].end_ns)
    save_trace(tmp_path / "t.json", events)
    slices = [s for s in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if s["ph"] == "X"]
    assert len(slices) == len(events)
    assert len({s["pid"] for s in slices}) == NUM
