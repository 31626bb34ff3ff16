"""The trace file: what a strict viewer needs is checked on the JSON itself."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hostir as hir
from hostir.overlap.programs import ring_ag_gemm
from hostir.sim.events import ROUNDING_NS, Kind, TraceEvent, chrome_trace, covered_ns, overlap_of, save_trace


def event(start: int, end: int, lane: str = "main", rank: int = 0, kind: Kind = "segment", name: str = "e") -> TraceEvent:
    return TraceEvent(name, lane, rank, start, end, kind)


def nanoseconds(us: float) -> int:
    """As a viewer reads a time: to whole nanoseconds, downwards."""
    return math.floor(us * 1000)


def check_trace(trace: dict[str, Any], events: list[TraceEvent]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """One slice an event, ids that never meet, names for all of them, no overlap on a thread; the slices by thread."""
    rows = json.loads(json.dumps(trace))["traceEvents"]
    slices = [r for r in rows if r["ph"] == "X"]
    assert len(slices) == len(events)
    assert sorted((s["name"], s["cat"]) for s in slices) == sorted((e.name, e.kind) for e in events)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for s in slices:
        threads[s["pid"], s["tid"]].append(s)
    pids, tids = {pid for pid, _ in threads}, [tid for _, tid in threads]
    assert 0 not in pids | set(tids)
    assert len(set(tids)) == len(tids)
    assert not pids & set(tids)
    named = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["ph"] == "M" and r["name"] == "thread_name"}
    processes = {r["pid"]: r["args"]["name"] for r in rows if r["ph"] == "M" and r["name"] == "process_name"}
    assert threads.keys() <= named.keys()
    assert pids <= processes.keys()
    assert len(set(named.values())) == len(named) or len(pids) > 1
    for of_thread in threads.values():
        reach = -math.inf
        for s in sorted(of_thread, key=lambda s: s["ts"]):
            assert nanoseconds(s["ts"]) == round(s["ts"] * 1000)
            assert nanoseconds(s["dur"]) == round(s["dur"] * 1000)
            assert nanoseconds(s["ts"]) >= reach
            reach = nanoseconds(s["ts"]) + nanoseconds(s["dur"])
    return threads


@given(
    st.lists(
        st.builds(
            lambda start, length, lane, rank, kind: event(start, start + length, lane, rank, kind),
            st.integers(0, 10**16),
            st.one_of(st.integers(0, 50), st.integers(0, 10**9)),
            st.sampled_from(["main", "comm", "s[1]"]),
            st.sampled_from([0, 1, 4095, 9000]),
            st.sampled_from(get_args(Kind)),
        ),
        max_size=12,
    )
)
def test_any_events_make_a_file_that_a_strict_viewer_takes(events: list[TraceEvent]) -> None:
    check_trace(chrome_trace(events), events)


def test_times_keep_their_nanoseconds() -> None:
    events = [event(t, t + d) for t, d in [(0, 1), (1, 1), (2, 999), (1001, 3), (1004, 10**9 + 1), (10**9 + 1005, 7)]]
    ((_, slices),) = check_trace(chrome_trace(events), events).items()
    assert [(nanoseconds(s["ts"]), nanoseconds(s["dur"])) for s in slices] == [(e.start_ns, e.end_ns - e.start_ns) for e in events]


def test_times_count_from_the_first_event_or_from_a_given_origin() -> None:
    late = 123 * 86400 * 10**9  # a machine that has been up for long has more digits than the file's numbers
    events = [event(late, late + 1), event(late + 1, late + 2)]
    for origin, want in ((None, [0, 1]), (late - 5, [5, 6])):
        slices = [s for s in chrome_trace(events, origin_ns=origin)["traceEvents"] if s["ph"] == "X"]
        assert [nanoseconds(s["ts"]) for s in slices] == want


def test_an_overlap_of_a_clocks_resolution_is_cut_and_a_longer_one_gets_a_track() -> None:
    cut = [event(0, 1000), event(1000 - ROUNDING_NS // 4, 3000)]
    ((_, slices),) = check_trace(chrome_trace(cut), cut).items()
    assert [nanoseconds(s["ts"]) for s in slices] == [0, 1000]
    apart = [event(0, 10**6, "comm"), event(1000, 10**6 + 1, "comm"), event(2 * 10**6, 3 * 10**6, "comm")]
    threads = check_trace(chrome_trace(apart), apart)
    assert sorted(len(s) for s in threads.values()) == [1, 2]
    names = [r["args"]["name"] for r in chrome_trace(apart)["traceEvents"] if r["name"] == "thread_name"]
    assert names == ["comm", "comm (2)"]


def test_main_stands_first_and_ranks_are_processes() -> None:
    events = [event(0, 1, "comm", 1), event(1, 2, "main", 1), event(0, 1, "main", 0)]
    rows = chrome_trace(events, names={1: "the other"})["traceEvents"]
    assert [r["args"]["name"] for r in rows if r["name"] == "process_name"] == ["rank 0", "the other"]
    assert [r["args"]["name"] for r in rows if r["name"] == "thread_name"] == ["main", "main", "comm"]


def test_no_events_are_a_file_too(tmp_path: Path) -> None:
    save_trace(tmp_path / "t.json", [])
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []


@pytest.mark.parametrize("mode", ["checked", "compiled"])
def test_a_saved_profile_of_rank_threads_is_valid(mode: str, tmp_path: Path) -> None:
    def ranks(world: Any) -> None:
        mesh = world.mesh(("tp",))
        hir.compile(ring_ag_gemm(mesh, 6, 4, 2), mesh, mode=mode)(hir_ones(2, 4), hir_ones(4, 2))

    with hir.profile() as prof:
        hir.launch.spawn(ranks, 3, transport="threads")
    prof.save(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    threads = check_trace(trace, prof.events)
    assert len({pid for pid, _ in threads}) == 3
    permute = next(s for s in trace["traceEvents"] if s["name"] == "permute")
    assert permute["args"]["input_bytes"] == 32
    assert permute["args"]["team"] == [0, 1, 2]
    assert permute["args"]["statement"].startswith("%")


def hir_ones(*shape: int) -> Any:
    import torch

    return torch.ones(shape)


# -------------------------------------------------------------------------------------------------------------- overlap

COMM: Kind = "communication"


@pytest.mark.parametrize(
    ("events", "exposed", "total"),
    [
        ([], 0, 0),
        ([event(0, 10)], 0, 0),
        ([event(0, 10, kind=COMM)], 10, 10),
        ([event(0, 10, kind=COMM), event(2, 5)], 7, 10),
        ([event(0, 10, kind=COMM), event(-5, 3), event(8, 20)], 5, 10),
        ([event(0, 10, kind=COMM), event(5, 15, kind=COMM)], 15, 15),
        ([event(0, 10, kind=COMM), event(5, 15, kind=COMM), event(0, 15)], 0, 15),
        ([event(0, 10, kind=COMM), event(0, 10, kind="copy"), event(0, 10, kind="host")], 10, 10),
        ([event(0, 10, kind=COMM), event(10, 20), event(20, 30, kind=COMM)], 20, 20),
    ],
)
def test_exposed_is_communication_while_no_segment_runs(events: list[TraceEvent], exposed: int, total: int) -> None:
    o = overlap_of(events)
    assert (o.exposed_ms, o.total_ms) == (exposed / 1e6, total / 1e6)
    assert o.ratio == (exposed / total if total else 0.0)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=10))
def test_covered_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    assert covered_ns((s, s + n) for s, n in spans) == len({t for s, n in spans for t in range(s, s + n)})
