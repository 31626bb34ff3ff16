"""``hir.simulate``: machines under whole programs, pictures and traces of what they took, and a thousand ranks for the price of one."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.errors import InputError, UnsupportedError
from hostir.ir.cohort import Move
from hostir.overlap.programs import collective_ag_gemm, host_sum, ring_ag_gemm
from hostir.sim import clock, cost
from hostir.sim.choose import best
from hostir.sim.draw import show_time
from hostir.sim.machine import Machine
from hostir.sim.timeline import Timeline
from hostir.sim.work import Work, works
from tests.unit.ir.right_programs import GATED, MESSAGES, PULL, PUSH, RIGHT, RING, program
from tests.unit.sim.machines import PLAIN

H200 = Machine.h200()
UNSIZED = hir.Mesh(("tp",))


def ring(m: int = 8192) -> hir.Program:
    return ring_ag_gemm(UNSIZED, m, 8192, 3584, torch.bfloat16)


# -------------------------------------------------------------------------------------------------------------------- timelines


def test_a_program_without_a_schedule_gets_the_one_that_compile_would_give_it() -> None:
    overlapped, serial = hir.simulate(ring(), H200, mesh=8), hir.simulate(ring(), H200, mesh=8, overlap="off")
    assert {r.lane[0] for r in overlapped.rows} == {"main", "comm"}
    assert {r.lane[0] for r in serial.rows} == {"main"}
    assert overlapped.makespan < serial.makespan
    assert overlapped.exposed_comm < 0.1 * serial.exposed_comm


def test_without_a_machine_it_is_a_node_of_h200s() -> None:
    assert hir.simulate(ring(), mesh=8).makespan == hir.simulate(ring(), H200, mesh=8).makespan


def test_the_ring_takes_its_products_and_its_messages_by_hand() -> None:
    """4 ranks: in order 4 (product 2 s) + 4 (message 3 s), overlapped the product hides under the message."""
    machine = replace(PLAIN, memory=1e12, matmul_flops={"f32": 2 * 2 * 3 * 8 / 2}, nvlink=hir.sim.machine.Link(1.0, 64 / 2))
    timeline = hir.simulate(program(RING), machine)
    assert timeline.makespan == pytest.approx(4 * 3 + 0, rel=1e-6)  # the last message runs under the last product
    assert timeline.exposed_comm == pytest.approx(4 * (3 - 2), rel=1e-6)
    serial = hir.simulate(program(RING.replace(" scheduled", "")), machine, overlap="off")
    assert serial.makespan == pytest.approx(4 * (2 + 3), rel=1e-6)


def test_ranks_beyond_a_node_talk_over_the_slower_wire() -> None:
    near, far = hir.simulate(ring(), H200, mesh=8), hir.simulate(ring(), replace(H200, gpus_per_node=4), mesh=8)
    message = max(r.seconds for r in near.rows if r.kind == "comm")
    assert max(r.seconds for r in far.rows if r.kind == "comm") > 5 * message
    assert far.makespan > near.makespan


def test_a_communication_kernel_slows_the_products_beside_it_and_copy_engines_do_not() -> None:
    p = collective_ag_gemm(hir.Mesh((4,), ("tp",)), 32768, 8192, 8192, 4, torch.bfloat16)
    shared, engines = hir.simulate(p, H200), hir.simulate(p, replace(H200, comm_share=0.0))
    slowed = [r.seconds for r in shared.rows if r.kind == "call" and r.rank == 0]
    alone = {r.seconds for r in engines.rows if r.kind == "call" and r.rank == 0}
    assert max(alone) - min(alone) < 1e-9
    assert max(slowed) > 1.02 * max(alone)
    assert max(slowed) <= max(alone) / (1 - H200.comm_share) + 1e-9


def test_two_streams_share_one_device() -> None:
    text = """unit @big(%a: f32[n]) {
  %o = exp(%a)
  return %o
}
program @p(%x: f32[67108864]) scheduled {
  %y = alloc f32[67108864]
  %z = alloc f32[67108864]
  %y <- @big(%x)
  %z <- @big(%x) on s
  sync s -> main
  return %y, %z
}
"""
    machine = replace(H200, issue=0.0, launch=0.0)
    both = hir.simulate(hir.parse(text), machine).makespan
    assert both == pytest.approx(hir.simulate(hir.parse(text.replace(" on s", "")), machine).makespan)


def test_the_host_holds_small_kernels_back() -> None:
    p = host_sum(64, 256)
    timeline = hir.simulate(p, H200)
    assert timeline.makespan > 64 * H200.issue
    assert hir.simulate(p, replace(H200, issue=0.0)).makespan < 0.5 * timeline.makespan
    assert timeline.critical_path()[0].kind == "host"


def test_the_host_sum_takes_its_bytes_over_the_rate_of_memory() -> None:
    n, terms = 1 << 24, 8
    num_bytes = n * (terms * (2 + 2 + 4 + 4) + 4)  # two bf16 terms and the accumulator there and back, and its first filling
    timeline = hir.simulate(host_sum(terms, n), replace(H200, issue=0.0, launch=0.0))
    assert timeline.makespan == pytest.approx(num_bytes / H200.memory)
    assert [r.kind for r in timeline.rows] == ["fill", *["call"] * terms]


def test_weights_stream_from_the_host_under_the_products_and_share_the_link() -> None:
    text = """unit @mm(%a: bf16[n, n], %b: bf16[n, n]) {
  %o = mm(%a, %b)
  return %o
}
program @stream(%x: bf16[8192, 8192], %w: bf16[4, 8192, 8192] host) {
  %y = alloc bf16[4, 8192, 8192]
  for %i in 0 .. 4 {
    %from = view %w[%i]
    %to = view %y[%i]
    %here = alloc bf16[8192, 8192]
    %here <- copy(%from) on copies[%i % 2]
    %to <- @mm(%x, %here)
  }
  return %y
}
"""
    timeline = hir.simulate(hir.parse(text), H200)
    one = H200.pcie.seconds(2 * 8192 * 8192)
    copies = sorted((r.start, r.end) for r in timeline.rows if r.kind == "comm")
    assert all(end - start == pytest.approx(one) for start, end in copies)
    assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(copies))  # two streams, one link
    assert 4 * one < timeline.makespan < 4.6 * one


@pytest.mark.parametrize(("text", "mesh"), [(PUSH, 3), (PULL, 3), (GATED, 2)])
def test_one_sided_copies_take_the_wire_between_the_ranks(text: str, mesh: int) -> None:
    near, far = (hir.simulate(program(text), replace(PLAIN, gpus_per_node=g), mesh) for g in (4, 1))
    assert far.makespan > near.makespan > 0


# ----------------------------------------------------------------------------------------------------------------- the whole world


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("machine", [H200, replace(PLAIN, comm_share=0.25, issue=0.125)], ids=lambda m: m.name)
def test_one_rank_stands_for_all_only_where_that_changes_nothing(name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    text, mesh, dims = RIGHT[name]
    folded = hir.simulate(program(text), replace(machine, gpus_per_node=64), mesh, dims=dims)
    monkeypatch.setattr(clock, "_folded", lambda *_: None)
    whole = hir.simulate(program(text), replace(machine, gpus_per_node=64), mesh, dims=dims)
    assert folded.makespan == pytest.approx(whole.makespan)
    assert folded.exposed_comm == pytest.approx(whole.exposed_comm)


def test_where_wires_differ_the_fold_goes_at_the_pace_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(H200, gpus_per_node=4)
    folded = hir.simulate(ring(), machine, mesh=16)
    monkeypatch.setattr(clock, "_folded", lambda *_: None)
    whole = hir.simulate(ring(), machine, mesh=16)
    assert len(whole.paths) == 16
    assert whole.makespan <= folded.makespan <= 1.05 * whole.makespan


def test_a_thousand_ranks_are_walked_and_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[Move] = []

    def counted(m: Move) -> list[Work]:
        priced.append(m)
        return works(m)

    monkeypatch.setattr(cost, "works", counted)
    timeline = hir.simulate(ring(65536), H200, mesh=1024)
    assert len(priced) == 1  # 1,024 products of one size
    ((ranks, rows),) = timeline.paths
    assert len(ranks) == 1024
    assert len(rows) == 1 + 1023 + 1024
    assert timeline.exposed_by_rank.keys() == timeline.utilization.keys() == set(range(1024))
    assert len(timeline.events()) == len(rows)


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("machine", [H200, replace(PLAIN, comm_share=0.25, issue=0.125), Machine.cpu()], ids=lambda m: m.name)
def test_the_critical_path_adds_up_to_the_makespan(name: str, machine: Machine) -> None:
    text, mesh, dims = RIGHT[name]
    timeline = hir.simulate(program(text), machine, mesh, dims=dims)
    path = timeline.critical_path()
    assert sum(r.seconds for r in path) == pytest.approx(timeline.makespan)
    reach = 0.0
    for r in path:
        assert r.start == pytest.approx(reach)
        reach = r.end
    texts = {(r.rank, r.lane, r.text) for r in timeline.rows}
    assert all(r.kind == "host" or (r.rank, r.lane, r.text) in texts for r in path)


def test_the_path_of_a_pipeline_crosses_the_ranks() -> None:
    machine = replace(PLAIN, memory=1e12)
    path = hir.simulate(program(MESSAGES), machine, 4).critical_path()
    assert [r.rank for r in path if r.kind == "call"] == sorted(r.rank for r in path if r.kind == "call")
    assert {r.rank for r in path} >= {1, 2, 3}
    assert "recv(from rank(pp) - 1)" in str([str(r) for r in path])


# ----------------------------------------------------------------------------------------------------------- pictures and numbers


@pytest.fixture
def timeline() -> Timeline:
    return hir.simulate(ring(), H200, mesh=4)


def test_utilization_is_the_busy_part_of_each_lane(timeline: Timeline) -> None:
    main = sum(r.seconds for r in timeline.rows if r.rank == 2 and r.lane == ("main", None))
    assert timeline.utilization[2]["main"] == pytest.approx(main / timeline.makespan)
    assert 0 < timeline.utilization[2]["comm"] < 1


def test_the_text_picture_has_a_line_for_each_lane_and_the_asked_width(timeline: Timeline) -> None:
    lines = timeline.gantt(80).splitlines()
    assert lines[0] == timeline.headline()
    assert [line.split("│")[0].strip() for line in lines[1:3]] == ["ranks 0 .. 3 main", "ranks 0 .. 3 comm"]
    assert {len(line) for line in lines[1:3]} == {80}
    busy = lines[1].split("│")[1]
    assert abs(busy.count("█") / len(busy) - timeline.utilization[0]["main"]) < 0.1
    assert "▒" in lines[2]
    assert "█ call" in lines[-1]
    assert timeline.gantt(80, ranks=[1, 3]).splitlines()[1].startswith("rank 1 main")


def test_more_lanes_than_fit_are_counted() -> None:
    text = hir.simulate(program(MESSAGES), H200, 8).gantt(60, height=4)
    assert text.count("│") == 2 * 4
    assert "more lanes are not shown" in text


def test_a_report_says_what_is_busy_and_where_the_time_goes(timeline: Timeline) -> None:
    text = str(timeline)
    assert "busy on ranks 0 .. 3: main" in text
    assert "@matmul(" in text.partition("the critical path:")[2]


def test_an_empty_program_has_pictures_too() -> None:
    nothing = hir.simulate(hir.parse("program @nothing() { }"), H200)
    assert (nothing.makespan, nothing.exposed_comm, nothing.critical_path()) == (0.0, 0.0, ())
    assert "nothing ran" in str(nothing)


def test_the_trace_is_valid_for_a_strict_viewer(tmp_path: Path) -> None:
    timeline = hir.simulate(program(MESSAGES), H200, 4)
    timeline.save(tmp_path / "tl.json")
    rows = json.loads((tmp_path / "tl.json").read_text())["traceEvents"]
    slices = [r for r in rows if r["ph"] == "X"]
    assert len(slices) == len([r for r in timeline.rows if r.end > r.start])
    names = [(r["pid"], r["tid"]) for r in rows if r["name"] == "thread_name"]
    assert len({tid for _, tid in names}) == len(names)
    assert 0 not in {x for name in names for x in name}
    assert {(s["pid"], s["tid"]) for s in slices} <= set(names)
    lanes: dict[int, list[tuple[int, int]]] = {}
    for s in slices:
        start, length = math.floor(s["ts"] * 1000), math.floor(s["dur"] * 1000)
        assert (round(s["ts"] * 1000), round(s["dur"] * 1000)) == (start, length)
        lanes.setdefault(s["tid"], []).append((start, start + length))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert {r["args"]["name"] for r in rows if r["name"] == "process_name"} == {f"rank {r}" for r in range(4)}


def test_alike_ranks_are_one_process_of_the_trace_unless_asked_for(timeline: Timeline, tmp_path: Path) -> None:
    def processes(**options: Any) -> list[str]:
        timeline.save(tmp_path / "tl.json", **options)
        return [r["args"]["name"] for r in json.loads((tmp_path / "tl.json").read_text())["traceEvents"] if r["name"] == "process_name"]

    assert processes() == ["ranks 0 .. 3"]
    assert processes(ranks=[1, 2]) == ["rank 1", "rank 2"]
    with pytest.raises(InputError, match="rank 9 was not simulated"):
        timeline.save(tmp_path / "x.json", ranks=[9])


def test_a_picture_is_drawn(timeline: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline.plot(tmp_path / "tl.png")
    assert (tmp_path / "tl.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_cure_is_told(timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="pictures need matplotlib") as caught:
        timeline.plot(tmp_path / "tl.png")
    assert "pip install matplotlib" in (caught.value.cure or "")


def test_the_numbers_for_machines_are_json(timeline: Timeline) -> None:
    found = json.loads(json.dumps(timeline.as_dict()))
    assert found["makespan_s"] == timeline.makespan
    assert found["num_ranks"] == 4
    assert sum(r["end_s"] - r["start_s"] for r in found["critical_path"]) == pytest.approx(timeline.makespan)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.0, "1.00 s"),
        (12.34, "12.3 s"),
        (0.0009996, "1.00 ms"),
        (780.08e-6, "780 µs"),
        (2.5e-9, "2.50 ns"),
        (1e-12, "0.00 ns"),
        (3600, "3600 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert show_time(seconds) == text


# ----------------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_missing_or_wrong_is_named() -> None:
    with pytest.raises(InputError, match="the size of mesh axis 'tp' is not known"):
        hir.simulate(ring(), H200)
    with pytest.raises(InputError, match="the size n has no value"):
        hir.simulate(hir.parse("program @p(%x: f32[n]) {\n %y = alloc f32[n]\n %y <- copy(%x)\n return %y\n}"), H200)
    with pytest.raises(InputError, match="simulate takes a Program"):
        hir.simulate("program", H200)
    with pytest.raises(InputError, match=r"machine is a hir\.Machine"):
        hir.simulate(ring(), "h200", mesh=2)


# ------------------------------------------------------------------------------------------------------------------------- choose


def test_the_best_of_several_programs_is_the_one_that_ends_first() -> None:
    mesh = hir.Mesh((8,), ("tp",))
    shape = (16384, 8192, 3584)
    candidates = {"ring": ring_ag_gemm(mesh, *shape, torch.bfloat16), "collective": collective_ag_gemm(mesh, *shape, 4, torch.bfloat16)}
    name, seconds = best(candidates, H200)
    assert seconds.keys() == candidates.keys()
    assert seconds[name] == min(seconds.values())
    assert all(seconds[k] == hir.simulate(p, H200).makespan for k, p in candidates.items())


def test_of_equals_the_first_wins() -> None:
    assert best({"a": ring(), "b": ring()}, H200, 8)[0] == "a"
    assert best({"b": ring(), "a": ring()}, H200, 8)[0] == "b"


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(InputError, match="no program to choose from"):
        best({}, H200)
