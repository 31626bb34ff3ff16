"""Profiles: their life, the rows and numbers that they give, and that nothing of them is left when they are off."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.dispatch import Executor, ExecutorDispatch, ExprEvalExecutor, FusionExecutorCache, KernelExecutor
from hostir.dispatch.fast import FastCall
from hostir.errors import InputError
from hostir.graph.fusion import Fusion
from hostir.ir.nodes import Alloc, Call, Comm, Sync
from hostir.ir.walk import walk
from hostir.overlap.programs import collective_ag_gemm, host_sum, ring_ag_gemm
from hostir.runtime.profile import Profile, State, active_profile
from hostir.runtime.recording import HostClock, Node, Run
from hostir.runtime.trace_events import chrome_trace, overlap_of

MODES = ("checked", "compiled")


def summed(mode: str = "compiled", **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    a, b = torch.arange(64.0).reshape(2, 4, 8).bfloat16()
    return hir.compile(host_sum(4, 8), mode=mode, **options), a, b


# ------------------------------------------------------------------------------------------------------------- its life


def at(state: State) -> Profile:
    prof = Profile()
    for to, step in ((State.RUNNING, prof.start), (State.FINISHED, prof.stop), (State.PROCESSED, prof.process)):
        if prof.state is state:
            break
        step()
        assert prof.state is to
    return prof


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize(("verb", "allowed"), [("start", State.READY), ("stop", State.RUNNING), ("process", State.FINISHED)])
def test_each_step_is_legal_in_one_state_and_changes_nothing_elsewhere(state: State, verb: str, allowed: State) -> None:
    prof = at(state)
    try:
        if state is allowed:
            getattr(prof, verb)()
            assert prof.state is not state
        else:
            with pytest.raises(InputError, match=f"cannot {verb}") as e:
                getattr(prof, verb)()
            assert prof.state is state
            assert e.value.cure
    finally:
        if prof.state is State.RUNNING:
            prof.stop()


RESULTS: list[Callable[[Profile], Any]] = [
    lambda p: p.segments,
    lambda p: p.communications,
    lambda p: p.copies,
    lambda p: p.events,
    lambda p: p.overlap,
    lambda p: p.overlap_by_rank,
    lambda p: p.table(),
    lambda p: p.save("never.json"),
]


@pytest.mark.parametrize("read", RESULTS)
def test_results_are_there_when_it_is_finished_and_not_before(read: Callable[[Profile], Any]) -> None:
    prof = Profile()
    with pytest.raises(InputError, match="no results"):
        read(prof)
    with prof, pytest.raises(InputError, match="no results"):
        read(prof)
    if read is not RESULTS[-1]:
        first = read(prof)
        assert prof.state is State.PROCESSED
        assert read(prof) == first


def test_profiles_do_not_nest_and_the_outer_one_goes_on() -> None:
    run, a, b = summed()
    inner = hir.profile()
    with hir.profile() as prof:
        with pytest.raises(InputError, match="running already"):
            inner.start()
        assert inner.state is State.READY
        run(a, b)
    assert len(prof.segments) == 1
    with inner:
        run(a, b)
    assert [r.calls for r in inner.segments] == [4]


def test_a_profile_is_stopped_in_the_thread_that_started_it() -> None:
    prof = Profile()
    prof.start()
    found: list[Exception] = []

    def stop() -> None:
        try:
            prof.stop()
        except InputError as e:
            found.append(e)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    assert "thread" in str(found[0])
    prof.stop()


def test_it_ends_with_its_block_also_after_an_error_and_keeps_what_ran_before() -> None:
    run, a, b = summed()

    def both(prof: Profile) -> None:
        with prof:
            run(a, b)
            run(a, b[:, :3])

    prof = hir.profile()
    with pytest.raises(InputError, match="another"):
        both(prof)
    assert active_profile() is None
    assert [r.calls for r in prof.segments] == [4]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_fails_is_not_counted_and_its_error_still_names_the_statement(mode: str) -> None:
    @hir.unit
    def pick(x, rows):
        return torch.index_select(x, 0, rows)

    with hir.Program("fails") as p:
        x = p.input("x", (2, 2), torch.float32)
        rows = p.input("rows", (1,), torch.int64)
        p.output(p.call(pick, p.add(x, x), rows))
    run = hir.compile(p, mode=mode)
    x = torch.ones(2, 2)
    with hir.profile() as prof:
        with pytest.raises(Exception, match="out of range") as e:
            run(x, torch.tensor([7]))
        run(x, torch.tensor([1]))
    text = str(e.value) + "".join(getattr(e.value, "__notes__", ()))
    assert "@fails" in text
    assert "@pick" in text or "index_select" in text
    assert [(r.name, r.calls) for r in prof.segments] == [("add", 1), ("pick", 1)]


def test_a_thread_that_outlives_the_profile_runs_on() -> None:
    run, a, b = summed()
    go, results = threading.Event(), []
    with hir.profile() as prof:

        def later() -> None:
            go.wait()
            results.extend([run(a, b), run(a, b)])

        thread = threading.Thread(target=contextvars.copy_context().run, args=(later,))
        thread.start()
    go.set()
    thread.join()
    assert torch.equal(results[0], results[1])
    assert prof.segments == []


def test_an_interval_begins_once_and_ends_once() -> None:
    run = Run(HostClock(torch.device("cpu")), 0)
    run.nodes = [Node("a", "host"), Node("b", "host")]
    with pytest.raises(InputError, match="has not begun"):
        run.end(0)
    run.begin(0)
    with pytest.raises(InputError, match="has begun"):
        run.begin(0)
    run.begin(1)
    run.end(0)
    with pytest.raises(InputError, match="has ended"):
        run.end(0)
    run.end(1)
    assert [(n.name, start <= end) for n, start, end in run.spans()] == [("a", True), ("b", True)]


# ------------------------------------------------------------------------------------------------------------ segments


@pytest.mark.parametrize("mode", MODES)
def test_a_row_for_each_unit_with_exact_bytes(mode: str) -> None:
    run, a, b = summed(mode)
    with hir.profile() as prof:
        run(a, b)
        run(a, b)
    (row,) = prof.segments
    assert (row.name, row.program, row.rank, row.calls) == ("fma", "host_sum", 0, 8)
    assert (row.executor, row.scheduler, row.device) == ("ExprEvalExecutor", "expr_eval", "cpu")
    each_in, each_out = 2 * 8 * 2 + 8 * 4, 8 * 4  # a[h], b[h] in bf16 and c in f32; c is on both sides
    assert (row.input_bytes, row.output_bytes) == (8 * each_in, 8 * each_out)
    assert [(e.args["input_bytes"], e.args["output_bytes"]) for e in row.events] == [(each_in, each_out)] * 8
    assert [e.args["indices"] for e in row.events] == [{"h": h} for h in range(4)] * 2
    assert row.compile_ms > 0
    assert row.kernel_ms == sum(e.end_ns - e.start_ns for e in row.events) / 1e6 > 0
    assert row.gbs == (row.input_bytes + row.output_bytes) / row.kernel_ms / 1e6
    assert prof.wall_ms > row.kernel_ms


@pytest.mark.parametrize("mode", MODES)
def test_elements_that_a_call_reads_twice_count_once(mode: str) -> None:
    with hir.Program("twice") as p:
        x = p.input("x", (3, 4), torch.float32)
        row = p.input("row", (1, 4), torch.float32)
        p.output(p.add(x, x), p.add(x, row.expand(3, 4)), p.add(x[0], x[1]))
    with hir.profile() as prof:
        hir.compile(p, mode=mode)(torch.ones(3, 4), torch.ones(1, 4))
    events = [e for e in prof.events if e.kind == "segment"]
    assert [e.args["input_bytes"] for e in events] == [48, 48 + 16, 32]
    assert [e.args["output_bytes"] for e in events] == [48, 48, 16]


def test_units_of_one_name_have_rows_of_their_own() -> None:
    with hir.Program("p") as p:
        x = p.input("x", (4, 4), torch.float32)
        p.output(p.matmul(x, x), p.matmul(x[:2], x))
    with hir.profile() as prof:
        hir.compile(p)(torch.ones(4, 4))
    assert [(r.calls, r.output_bytes) for r in prof.segments] == [(1, 64), (1, 32)]
    assert len({r.name for r in prof.segments}) == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_segment_that_computes_nothing_belongs_to_kernel_and_launches_none(mode: str) -> None:
    @hir.unit
    def same(x):
        return x

    with hir.Program("p") as p:
        x = p.input("x", (4,), torch.float32, inout=True)
        p.call(same, x, out=x)
        p.output(p.add(x, x))
    with hir.profile() as prof:
        hir.compile(p, mode=mode)(torch.ones(4))
    nothing, add = prof.segments
    assert (nothing.executor, nothing.scheduler, nothing.calls, nothing.kernels) == ("KernelExecutor", "no_op", 1, 0)
    assert (add.executor, add.kernels) == ("ExprEvalExecutor", 1)


def test_single_executors_have_rows_with_input_and_output_bytes() -> None:
    f = Fusion("double")
    x = f.input((3, 4), torch.float32)
    f.output(hir.ops.add(x, x))
    g = Fusion("nothing")
    g.output(g.input((2,), torch.float32))
    first, second = ExecutorDispatch.make(f, device="cpu"), ExecutorDispatch.make(g)
    assert isinstance(first, ExprEvalExecutor)
    assert isinstance(second, KernelExecutor)
    first.compile(first.fusion)
    second.compile(g)
    t = torch.ones(2)
    with hir.profile() as prof:
        for _ in range(3):
            first.run([torch.ones(3, 4)])
        assert second.run([t])[0] is t
    double, nothing = prof.segments
    assert (double.name, double.calls, double.kernels, double.input_bytes, double.output_bytes) == ("double", 3, 3, 144, 144)
    assert (nothing.name, nothing.executor, nothing.kernels, nothing.input_bytes) == ("nothing", "KernelExecutor", 0, 8)
    assert double.device == nothing.device == "cpu"
    assert double.events[0].args["ids"] == {"fusion": 0, "concrete": 0, "runtime": 0, "group": 0}


def test_the_executor_cache_has_rows() -> None:
    m = hir.sym("m")
    cache = FusionExecutorCache(hir.trace(lambda x: x.view(-1) * 2.0, hir.spec((m, 4), torch.float32), name="scaled"))
    with hir.profile() as prof:
        cache.run(torch.ones(2, 4))
        cache.run(torch.ones(5, 4))
    (row,) = prof.segments
    assert (row.name, row.calls, row.kernels, row.input_bytes, row.output_bytes) == ("scaled", 2, 2, 4 * (8 + 20), 4 * (8 + 20))
    assert row.compile_ms > 0


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
        results = self._inner.execute(args, outputs)
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
    matmul = next(r for r in prof.segments if r.name == "matmul")
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


# ------------------------------------------------------------------------------------------------------------ being off


def test_off_means_nothing_is_recorded_and_the_same_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run, a, b = summed()
    run(a, b)
    (plan,) = run._plans.values()
    (entry,) = run._fast
    code, source = plan._codes[True].code, plan.source()
    with hir.profile() as prof:
        run(a, b)
    taken: list[FastCall] = []
    original = FastCall.run

    def spy(self: FastCall, out: Any, epoch: int) -> torch.Tensor:
        taken.append(self)
        return original(self, out, epoch)

    monkeypatch.setattr(FastCall, "run", spy)
    num_events = len(prof.events)
    run(a, b)
    assert taken == [entry]
    assert len(prof.events) == num_events
    assert active_profile() is None
    assert plan._codes[True].code is code
    assert plan.source() == source
    assert "begin(" not in source
    assert "begin(0)" in plan.profiled().source()


def test_the_short_way_of_a_repeated_call_is_left_while_a_profile_is_on() -> None:
    run, a, b = summed()
    out = torch.empty(8)
    run(a, b, out=out)
    run(a, b, out=out)
    assert run._fast
    with hir.profile() as prof:
        run(a, b, out=out)
        run(a, b, out=out)
    assert [r.calls for r in prof.segments] == [8]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_results_are_the_same_bits_in_the_same_places(mode: str, outputs: str) -> None:
    run, a, b = summed(mode, outputs=outputs)
    quiet = run(a, b)
    expected, address = quiet.clone(), quiet.data_ptr()
    out = torch.empty(8)
    with hir.profile() as prof:
        profiled = run(a, b)
        assert run(a, b, out=out) is out
    assert torch.equal(profiled, expected)
    assert torch.equal(out, expected)
    if outputs == "static" and mode == "compiled":
        assert profiled.data_ptr() == address
    assert [r.calls for r in prof.segments] == [8]


def test_scalars_of_a_run_reach_the_profiled_code() -> None:
    with hir.Program("scaled") as p:
        x = p.input("x", (3,), torch.float32)
        k = p.scalar("k", float)
        p.output(p.mul(x, k))
    run = hir.compile(p)
    with hir.profile() as prof:
        results = [run(torch.ones(3), k) for k in (2.0, 3.0)]
    assert [r.tolist() for r in results] == [[2.0] * 3, [3.0] * 3]
    assert [r.calls for r in prof.segments] == [2]


# ------------------------------------------------------------------------------------------------------------ the table


def test_the_table_has_a_line_for_each_row() -> None:
    run, a, b = summed()
    with hir.profile() as prof:
        run(a, b)
    head, line = prof.table().splitlines()
    assert head.split()[:6] == ["segment", "executor", "scheduler", "device", "calls", "kernels"]
    assert line.split()[:6] == ["fma", "ExprEvalExecutor", "expr_eval", "cpu", "4", str(prof.segments[0].kernels)]
    assert {str(prof.segments[0].input_bytes), str(prof.segments[0].output_bytes)} <= set(line.split())
    with hir.profile() as nothing:
        pass
    assert nothing.table() == "nothing ran"


def test_the_copy_ceiling_is_measured_once_and_segments_are_compared_with_it() -> None:
    run, a, b = summed()
    with hir.profile() as prof:
        run(a, b)
    ceiling = prof.copy_ceiling("cpu")
    assert ceiling > 0
    assert prof.copy_ceiling("cpu") == ceiling
    head, line = prof.table(ceiling=True).splitlines()
    assert head.endswith("% of copy")
    assert float(line.split()[-1]) == pytest.approx(100 * prof.segments[0].gbs / ceiling, abs=1e-3)
