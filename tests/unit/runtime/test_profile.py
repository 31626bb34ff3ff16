"""Profiles: their life, the rows and numbers that they give, and that nothing of them is left when they are off."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.dispatch import ExecutorDispatch, ExprEvalExecutor, FusionExecutorCache, KernelExecutor
from hostir.dispatch.fast import FastCall
from hostir.errors import InputError
from hostir.graph.fusion import Fusion
from hostir.overlap.programs import host_sum
from hostir.runtime.profile import Profile, State, active_profile
from hostir.runtime.recording import HostClock, Node, Run

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
    go, results, left = threading.Event(), [], []
    with hir.profile() as prof:

        def later() -> None:
            go.wait()
            results.extend([run(a, b), run(a, b)])
            left.append(active_profile())

        thread = threading.Thread(target=contextvars.copy_context().run, args=(later,))
        thread.start()
    go.set()
    thread.join()
    assert torch.equal(results[0], results[1])
    assert left == [None]
    assert prof.segments == []


def test_a_run_that_ends_after_the_profile_is_not_counted() -> None:
    begun, go = threading.Event(), threading.Event()
    with hir.profile() as prof:

        def slow() -> None:
            with prof.recording(torch.device("cpu"), 0) as run:
                run.nodes = [Node("slow", "host")]
                run.begin(0)
                begun.set()
                go.wait()
                run.end(0)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(slow,))
        thread.start()
        begun.wait()
    go.set()
    thread.join()
    assert prof.events == []


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
