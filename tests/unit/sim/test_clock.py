"""Simulated time: what overlaps, what waits, and for how long; the ring's three schedules take 9, 9 and 5."""

from __future__ import annotations

import pytest

import hostir as hir
from hostir.ir.cohort import Move
from hostir.sim import clock
from hostir.sim.clock import BytesCost, makespan, unit_cost
from hostir.sim.timeline import Timeline
from tests.unit.ir.right_programs import EXCHANGE, GATED, MESSAGES, PULL, PUSH, RIGHT, RING, RING_IN_ORDER, RING_SERIAL, ROTATED, changed, program


def time_of(text: str, mesh: int | None = None) -> float:
    return makespan(program(text), mesh).makespan


def body(statements: str, mesh: str = " mesh(tp = 2)", params: str = "%x: f32[4], inout %a: f32[4], inout %b: f32[4]") -> str:
    return f"program @p({params}){mesh} scheduled {{\n{statements}\n}}"


@pytest.mark.parametrize(
    ("text", "total", "exposed"),
    [(RING_IN_ORDER, 9, 4), (RING_SERIAL, 9, 4), (RING, 5, 0)],
    ids=["in order", "sync just before the consumer", "syncs at the top of the body"],
)
def test_where_the_syncs_stand_decides_the_overlap_of_the_ring(text: str, total: float, exposed: float) -> None:
    timeline = makespan(program(text))
    assert timeline.makespan == total
    assert timeline.exposed_comm == timeline.exposed_comm_mean == exposed


def test_without_syncs_nothing_waits_which_is_fast_and_a_race() -> None:
    text = RING.replace("    sync comm -> main\n", "").replace("    sync main -> comm\n", "")
    assert time_of(text) == 5
    assert not hir.verify(program(text), check=False).ok


def test_an_unscheduled_program_runs_in_order() -> None:
    assert time_of(RING.replace(" scheduled", "")) == 9
    assert {row.lane for row in makespan(program(RING.replace(" scheduled", ""))).rows} == {("main", None)}


@pytest.mark.parametrize(
    ("statements", "total"),
    [
        ("%a <- @double(%x)\n%b <- @double(%x)", 2),
        ("%a <- @double(%x) on s\n%b <- @double(%x) on t", 1),
        ("%a <- @double(%x) on s[0]\n%b <- @double(%x) on s[1]", 1),
        ("%a <- @double(%x) on s\nsync s -> t\n%b <- @double(%x) on t", 2),
        ("!e = %a <- @double(%x) on s\n%a <- @double(%x) on s\nsync !e -> t\n%b <- @double(%x) on t", 2),
        ("sync !e -> t\n%b <- @double(%x) on t\n!e = %a <- @double(%x) on s", 1),
        ("%v = view %a[0 : 2]\nsync main -> s\n%t = zeros f32[4]\nfree %t", 0),
        ("%a <- allreduce(%a)\nbarrier()\n%b <- copy(%x)", 3),
        ("if rank(tp) == 0 { %a <- @double(%x) }\n%b <- allreduce(%b)", 2),
        ("group { send(%x to (rank(tp) + 1) % 2) %a <- recv(from (rank(tp) + 1) % 2) }\n%b <- @double(%x)", 2),
    ],
)
def test_streams_syncs_events_and_meetings(statements: str, total: float) -> None:
    assert time_of(body(statements)) == total


def test_a_stage_of_a_pipeline_begins_when_the_one_before_has_sent() -> None:
    timeline = makespan(program(MESSAGES), 4)
    assert timeline.makespan == 7  # four calls, three messages
    starts = [row.start for row in timeline.rows if row.kind == "call"]
    assert starts == [0, 2, 4, 6]
    assert timeline.exposed_by_rank == {0: 1, 1: 2, 2: 2, 3: 1}
    assert timeline.exposed_comm == 2
    assert timeline.exposed_comm_mean == 1.5


def test_what_shares_a_link_goes_one_after_another() -> None:
    def two(other: str) -> str:
        one = "%a <- permute(%x to (rank(tp) + 1) % 3 from (rank(tp) + 2) % 3) on s"
        return body(f"{one}\n{other} on t", " mesh(tp = 3)")

    assert time_of(two("%b <- permute(%x to (rank(tp) + 1) % 3 from (rank(tp) + 2) % 3)")) == 2
    assert time_of(two("%b <- permute(%x to (rank(tp) + 2) % 3 from (rank(tp) + 1) % 3)")) == 1
    assert time_of(two("%b <- allreduce(%b)")) == 2


def test_messages_to_oneself_take_no_link() -> None:
    assert time_of(body("%a <- permute(%x to 0 from 0) on s\n%b <- permute(%x to 0 from 0) on t", " mesh(tp = 1)")) == 1


@pytest.mark.parametrize(("text", "mesh", "total"), [(PUSH, 3, 3), (PULL, 3, 5), (GATED, 2, 3.5)])
def test_waits_end_with_their_signals(text: str, mesh: int, total: float) -> None:
    assert time_of(text, mesh) == total


def test_a_call_that_waits_for_flags_runs_under_the_copies() -> None:
    text = GATED
    for old, new in (("0 .. 2", "0 .. 4"), ("[2, 4]", "[4, 4]"), ("i32[2]", "i32[4]"), ("reshape(8)", "reshape(16)"), ("f32[8]", "f32[16]")):
        assert old in text
        text = text.replace(old, new)
    assert time_of(text, 2) == 5.25  # barrier, four copies, and the share of the last one
    assert time_of(text.replace(" awaits %f", "").replace("  %flat", "  sync copies -> main\n  %flat"), 2) == 6


def test_copies_from_host_memory_are_communication() -> None:
    text = body("%a <- copy(%h)", params="%h: f32[4] host, inout %a: f32[4]")
    (row, _) = makespan(program(text)).rows
    assert row.kind == "comm"
    assert makespan(program(body("%a <- copy(%x)"))).exposed_comm == 0


def test_bytes_cost_is_bytes_over_a_rate() -> None:
    cost = BytesCost(memory=8, link=4, latency=1)

    def of(statements: str) -> float:
        return makespan(program(body(statements)), cost=cost).makespan

    assert of("%a <- @double(%x)") == 1 + 32 / 8
    assert of("%a <- copy(%x)") == 1 + 32 / 8
    assert of("%a <- permute(%x to 1 - rank(tp) from 1 - rank(tp))") == 1 + 16 / 4
    assert of("%a <- allreduce(%a)") == 1 + 16 / 4
    assert of("%g = alloc f32[8]\n%g <- allgather(%x)") == 1 + 32 / 2 / 4
    assert of("barrier()") == 1


def test_a_cost_may_be_any_function_of_a_move() -> None:
    def only_calls(m: Move) -> float:
        return 10 * unit_cost(m) if isinstance(m.step.op, hir.ir.nodes.Call) else 0.0

    assert makespan(program(RING), cost=only_calls).makespan == 40


def all_rows(timeline: Timeline) -> list[tuple[object, ...]]:
    return [(r.rank, r.lane, r.start, r.end, r.text, tuple(r.indices.items()), r.kind) for r in timeline.rows]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("cost", [unit_cost, BytesCost(link=3.0, memory=7.0, latency=0.5)], ids=["unit", "bytes"])
def test_one_rank_stands_for_all_only_where_that_changes_nothing(name: str, cost: clock.Cost, monkeypatch: pytest.MonkeyPatch) -> None:
    text, mesh, dims = RIGHT[name]
    p = program(text)
    folded = makespan(p, mesh, dims=dims, cost=cost)
    monkeypatch.setattr(clock, "_folded", lambda *_: None)
    whole = makespan(p, mesh, dims=dims, cost=cost)
    assert folded.makespan == pytest.approx(whole.makespan)
    assert folded.exposed_comm == pytest.approx(whole.exposed_comm)
    assert [(r[0], r[4], r[5]) for r in sorted(all_rows(folded), key=str)] == [(r[0], r[4], r[5]) for r in sorted(all_rows(whole), key=str)]


@pytest.mark.parametrize(("text", "mesh"), [(RING, None), (ROTATED, 16)])
def test_rings_are_folded(text: str, mesh: int | None) -> None:
    timeline = makespan(program(text), mesh)
    assert len(timeline.paths) == 1
    assert len({r.rank for r in timeline.rows}) == (mesh or 4)


def test_a_large_ring_is_one_trip_longer_a_rank() -> None:
    def of(n: int) -> float:
        text = RING.replace("tp = 4", f"tp = {n}").replace("0 .. 4", f"0 .. {n}").replace("% 4", f"% {n}").replace("+ 3)", f"+ {n - 1})")
        return time_of(text.replace("f32[4, 8, 3]", f"f32[{n}, 8, 3]"))

    assert [of(n) for n in (2, 8, 256)] == [3, 9, 257]


def test_a_program_that_cannot_end_is_refused() -> None:
    text = "program @p(%x: f32[4], inout %a: f32[4]) mesh(tp) {\nsend(%x to (rank(tp) + 1) % size(tp))\n%a <- recv(from (rank(tp) - 1) % size(tp))\n}"
    with pytest.raises(hir.VerifyError, match="ranks 0, 1 never end"):
        time_of(text, 2)
    assert time_of(EXCHANGE, 2) == 3


def test_an_index_past_the_end_is_the_error_of_the_dry_run() -> None:
    with pytest.raises(hir.VerifyError, match="outside"):
        time_of(changed(RING, "view %w[(rank(tp) - %i) % 4]", "view %w[rank(tp) + %i]"))
