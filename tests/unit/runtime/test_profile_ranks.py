"""Profiles of programs that communicate, on rank threads: rows, one event a node, and how much communication is hidden."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.dispatch import Executor, ExecutorDispatch, ExprEvalExecutor
from hostir.graph.fusion import Fusion
from hostir.ir.nodes import Alloc, Call, Comm, Sync
from hostir.ir.walk import walk
from hostir.overlap.programs import collective_ag_gemm, ring_ag_gemm
from hostir.runtime.profile import Profile
from hostir.sim.events import chrome_trace, overlap_of

MODES = ("checked", "compiled")

# ------------------------------------------------------------------------------------------------------ communications


def everything(p: Any) -> None:
    """One communication of each kind on 3 ranks; 12 floats on every rank."""
    x = p.input("x", (12,), torch.float32)
    r = p.rank()
    outs = [p.empty((36,), torch.float32, name="gathered"), p.empty((4,), torch.float32, name="scattered")]
    p.allgather(x, outs[0])
    p.reduce_scatter(x, outs[1])
    y = p.zeros((12,), torch.float32, name="y")
    p.copy(x, y)
    p.allreduce(y)
    p.broadcast(x, y, source=1)
    on_root = p.zeros((12,), torch.float32, name="on_root")
    p.reduce(x, on_root, to=2)
    p.alltoallv(x.reshape(6, 2), y.reshape(6, 2), send_counts=(1, 1, 1), recv_counts=(1, 1, 1))
    p.permute(x, y, to=(r + 1) % 3, source=(r + 2) % 3)
    p.barrier()
    p.output(*outs, y, on_root)


WANT = {  # kind: bytes in, bytes out on rank 0, and on rank 2
    "allgather": ((48, 144), (48, 144)),
    "reduce_scatter": ((48, 16), (48, 16)),
    "allreduce": ((48, 48), (48, 48)),
    "broadcast": ((0, 48), (0, 48)),
    "reduce": ((48, 0), (48, 48)),
    "alltoallv": ((24, 24), (24, 24)),
    "permute": ((48, 48), (48, 48)),
    "barrier": ((0, 0), (0, 0)),
}


@pytest.mark.parametrize("mode", MODES)
def test_communications_have_kind_team_transport_and_exact_bytes(mode: str) -> None:
    def ranks(world: Any) -> Profile:
        with hir.Program("all", mesh=hir.Mesh((3,), ("tp",))) as p:
            everything(p)
        run = hir.compile(p, mode=mode)
        run(torch.ones(12))
        with hir.profile() as prof:
            run(torch.ones(12))
        return prof

    profiles = hir.launch.spawn(ranks, 3, transport="threads")
    for rank, which in ((0, 0), (2, 1)):
        rows = profiles[rank].communications
        assert {r.kind: (r.input_bytes, r.output_bytes) for r in rows} == {kind: want[which] for kind, want in WANT.items()}
        for row in rows:
            assert (row.team, row.transport, row.rank, row.calls, row.device) == ((0, 1, 2), "threads", rank, 1, "cpu")
            assert (row.executor, row.scheduler, row.kernels) == ("HostIrExecutor", "communication", 0)
            assert row.bytes == max(row.input_bytes, row.output_bytes)
            assert row.ms > 0
        (copy,) = profiles[rank].copies
        assert (copy.kind, copy.bytes, copy.transport, copy.team) == ("copy", 48, "memory", (rank,))


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_group_are_counted_one_by_one(mode: str) -> None:
    def ranks(world: Any) -> Profile:
        with hir.Program("pair", mesh=hir.Mesh((2,), ("tp",))) as p:
            x = p.input("x", (4,), torch.float32)
            y = p.empty((4,), torch.float32, name="y")
            z = p.empty((2,), torch.float32, name="z")
            with p.group(on="comm"):
                p.permute(x, y, to=(p.rank() + 1) % 2, source=(p.rank() + 1) % 2)
                p.permute(x[0:2], z, to=(p.rank() + 1) % 2, source=(p.rank() + 1) % 2)
            p.output(y, z)
        with hir.profile() as prof:
            hir.compile(p, mode=mode)(torch.ones(4))
        return prof

    for prof in hir.launch.spawn(ranks, 2, transport="threads"):
        assert [(r.kind, r.bytes, r.events[0].lane) for r in prof.communications] == [("permute", 16, "comm"), ("permute", 8, "comm")]


def test_a_fusion_that_only_communicates_has_communication_rows() -> None:
    def ranks(world: Any) -> Profile:
        mesh = world.mesh(("tp",))
        f = Fusion("gather")
        x = f.input((4, 2), torch.float32)
        y = hir.ops.set(x)
        f.output(y)
        x.shard(mesh, hir.Shard(0))
        y.shard(mesh, hir.Replicate())
        ex = ExecutorDispatch.make(f)
        ex.compile(f)
        with hir.profile() as prof:
            ex.run([torch.ones(2, 2)])
        return prof

    for prof in hir.launch.spawn(ranks, 2, transport="threads"):
        assert [(r.kind, r.input_bytes, r.output_bytes) for r in prof.communications] == [("allgather", 16, 32)]
        assert prof.segments == []


@pytest.mark.parametrize("mode", MODES)
def test_one_profile_sees_every_rank_thread_started_under_it(mode: str) -> None:
    def ranks(world: Any) -> None:
        mesh = world.mesh(("tp",))
        hir.compile(ring_ag_gemm(mesh, 6, 4, 2), mesh, mode=mode)(torch.ones(2, 4), torch.ones(4, 2))

    with hir.profile() as prof:
        hir.launch.spawn(ranks, 3, transport="threads")
    assert [(r.rank, r.name, r.calls) for r in prof.segments] == [(rank, "matmul", 3) for rank in range(3)]
    assert [(r.rank, r.calls) for r in prof.communications] == [(rank, 2) for rank in range(3)]
    assert list(prof.overlap_by_rank) == [0, 1, 2]
    assert prof.table().count("\nrank") + prof.table().startswith("rank") == 3


# ---------------------------------------------------------------------------------------------------------- the trace


def programs() -> list[tuple[hir.Program, list[tuple[int, ...]]]]:
    mesh = hir.Mesh((2,), ("tp",))
    return [(ring_ag_gemm(mesh, 4, 3, 2), [(2, 3), (3, 2)]), (collective_ag_gemm(mesh, 8, 3, 2, 2), [(2, 2, 3), (3, 2)])]


@pytest.mark.parametrize("which", [0, 1])
def test_one_event_for_each_node_that_runs_the_same_in_both_modes(which: int) -> None:
    def ranks(world: Any) -> list[tuple[Profile, Any]]:
        p, shapes = programs()[which]
        found = []
        for mode in MODES:
            run = hir.compile(p, mode=mode)
            with hir.profile() as prof:
                run(*(torch.ones(s) for s in shapes))
            found.append((prof, run.program))
        return found

    for rank, profiles in enumerate(hir.launch.spawn(ranks, 2, transport="threads")):
        scheduled = profiles[0][1]
        steps = list(walk(scheduled, rank, 2))
        nodes = [s for s in steps if isinstance(s.op, (Call, Comm, Sync)) or (isinstance(s.op, Alloc) and s.op.init is not None)]
        kinds = {"segment": Call, "communication": Comm, "copy": Comm, "host": (Sync, Alloc)}
        seen = []
        for prof, _ in profiles:
            assert len(prof.events) == len(nodes)
            for kind, of in kinds.items():
                local = kind == "copy"
                count = sum(isinstance(s.op, of) and (not isinstance(s.op, Comm) or (s.op.kind == "copy") == local) for s in nodes)  # type: ignore[arg-type]
                assert sum(e.kind == kind for e in prof.events) == count, kind
            seen.append(sorted((e.name, e.lane, e.kind, str(e.args)) for e in prof.events))
            slices = [s for s in chrome_trace(prof.events)["traceEvents"] if s["ph"] == "X"]
            assert sorted(s["name"] for s in slices) == sorted(e.name for e in prof.events)
        assert seen[0] == seen[1]
        assert any(e.kind == "communication" and e.lane == "comm" for e in profiles[1][0].events)


# ------------------------------------------------------------------------------------------------------------- overlap


class Waits(Executor):
    """Takes every unit; ``before`` and ``after`` are called by name, around the ATen evaluation."""

    name = "Waits"
    before: Callable[[str], None] = staticmethod(lambda _: None)
    after: Callable[[str], None] = staticmethod(lambda _: None)

    @classmethod
    def supports(cls, fusion: Any) -> Any:
        return True

    def _compile(self, fusion: Any, args: Any) -> None:
        self._inner = ExprEvalExecutor()
        self._inner.compile(fusion)

    def _run(self, args: Any, outputs: Any) -> list[torch.Tensor]:
        self.before(self.fusion.name)
        results = self._inner.run(args, outputs)
        self.after(self.fusion.name)
        return results


def overlapped(lane: str) -> hir.Program:
    """A permute on ``lane``, then a call that does not need it, then one that does."""
    with hir.Program("overlapped", mesh=hir.Mesh((2,), ("tp",))) as p:
        x = p.input("x", (4, 4), torch.float32)
        y = p.empty((4, 4), torch.float32, name="y")
        p.permute(x, y, to=(p.rank() + 1) % 2, source=(p.rank() + 1) % 2, on=lane)
        z = p.matmul(x, x)
        p.output(p.add(y, z))
    return p


@pytest.mark.parametrize("mode", MODES)
def test_overlap_of_a_communication_that_lasts_as_long_as_a_call(mode: str) -> None:
    """rank 0: permute issued ──── matmul ──── permute ends;  rank 1 comes when rank 0's matmul has ended."""
    done = threading.Event()

    class Signals(Waits):
        @staticmethod
        def after(unit: str) -> None:
            if unit == "matmul":
                done.set()

    dispatch = ExecutorDispatch((Signals,))

    def ranks(world: Any) -> Profile:
        run = hir.compile(overlapped("comm"), mode=mode, dispatch=dispatch)
        run(torch.ones(4, 4))
        world.comms.exchange("ready", "", (0, 1))
        if world.rank == 0:
            done.clear()
        world.comms.exchange("clear", "", (0, 1))
        if world.rank == 1:
            assert done.wait(30)
        with hir.profile() as prof:
            run(torch.ones(4, 4))
        return prof

    prof = hir.launch.spawn(ranks, 2, transport="threads")[0]
    assert [(r.name, r.executor, r.calls) for r in prof.segments] == [("matmul", "Waits", 1), ("add", "Waits", 1)]
    matmul = prof.segments[0]
    o = prof.overlap
    assert o.total_ms == pytest.approx(prof.communications[0].ms)
    assert o.total_ms - o.exposed_ms == pytest.approx(matmul.kernel_ms)  # all of the call, and nothing else, hides communication
    assert 0 < o.ratio < 1


@pytest.mark.parametrize("mode", MODES)
def test_communication_in_order_is_all_exposed(mode: str) -> None:
    def ranks(world: Any) -> Profile:
        run = hir.compile(overlapped("comm"), mode=mode, overlap="off")
        with hir.profile() as prof:
            run(torch.ones(4, 4))
        return prof

    for prof in hir.launch.spawn(ranks, 2, transport="threads"):
        assert prof.overlap.exposed_ms == prof.overlap.total_ms > 0
        assert prof.overlap.ratio == 1.0
        assert "exposed" in prof.table()


def test_a_communication_ends_when_its_work_says_so_not_when_it_is_waited_for() -> None:
    """rank 1 comes first and waits; rank 0 completes the permute while it issues it, long before its call ends."""

    def ranks(world: Any) -> Profile:
        run = hir.compile(overlapped("comm"))
        run(torch.ones(4, 4))
        if world.rank == 0:
            hub = world.comms._hub
            while not any(lane.open for lane in hub._lanes.values()):
                time.sleep(0.001)
        with hir.profile() as prof:
            run(torch.ones(4, 4))
        return prof

    prof = hir.launch.spawn(ranks, 2, transport="threads")[0]
    (permute,) = prof.communications[0].events
    matmul = next(e for e in prof.events if e.name == "matmul")
    assert permute.end_ns <= matmul.start_ns
    assert overlap_of(prof.events).ratio == 1.0
