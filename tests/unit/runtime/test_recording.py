"""Marks on a device, with a device that only pretends: a stream's time goes on as the test says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hostir.errors import InputError
from hostir.runtime import profile as profile_module
from hostir.runtime.profile import Profile
from hostir.runtime.recording import DeviceClock, HostClock, Node, Run, ended_ns

CUDA = torch.device("cuda", 0)


class Device:
    """A GPU: ``now`` is its time in ms; events that were recorded become readable with ``synchronize``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made = 0
        self.recorded: list[Any] = []
        self.ranges: dict[int, str] = {}
        self.all_ranges: list[str] = []

    def synchronize(self, device: Any = None) -> None:
        for e in self.recorded:
            e.passed = True
        self.recorded.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    d = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing
            d.made += 1

        def record(self, stream: Any) -> None:
            self.at, self.stream, self.passed = d.now, stream, False
            d.recorded.append(self)

        def synchronize(self) -> None:
            self.passed = True

        def elapsed_time(self, other: Any) -> float:
            assert self.passed
            assert other.passed
            return float(other.at - self.at)

    def range_start(text: str) -> int:
        d.all_ranges.append(text)
        d.ranges[len(d.all_ranges)] = text
        return len(d.all_ranges)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", d.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "current")
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", range_start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", d.ranges.pop)
    yield d
    assert not d.ranges, "ranges that nobody ended"


def record(prof: Profile, device: Device, *lengths: float) -> None:
    with prof.recording(CUDA, 0) as run:
        run.nodes = [Node(f"n{i}", "segment", key=i, labels=None, comm="x") for i in range(len(lengths))]
        for i, ms in enumerate(lengths):
            run.begin(i)
            device.now += ms
            run.end(i)
            device.now += 0.5


def test_times_of_device_marks_are_those_of_the_device(device: Device) -> None:
    prof = Profile()
    with prof:
        record(prof, device, 2.0, 3.0)
        device.now += 100
        record(prof, device, 1.0)
    lengths = [(e.end_ns - e.start_ns) / 1e6 for e in prof.events]
    assert lengths == [2.0, 3.0, 1.0]
    first, second, third = prof.events
    assert second.start_ns - first.start_ns == 2_500_000
    assert third.start_ns - first.start_ns == 106_000_000
    assert {r.device for r in prof.segments} | {r.device for r in prof.communications} == {"cuda:0"}
    assert device.all_ranges == ["n0", "n1", "n0"]


def test_marks_go_to_the_current_stream_or_the_one_that_is_named(device: Device) -> None:
    run = Run(DeviceClock(CUDA), 0)
    run.nodes = [Node("a", "host"), Node("b", "host")]
    run.begin(0)
    run.end(0)
    run.begin(1, "comm")  # type: ignore[arg-type]
    run.end(1, "comm")  # type: ignore[arg-type]
    assert [e.stream for e in device.recorded[-4:]] == ["current", "current", "comm", "comm"]


def test_events_come_from_a_pool(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_module, "MAX_MARKS", 20)
    prof = Profile()
    with prof:
        for _ in range(100):
            record(prof, device, 1.0, 1.0)
    assert len(prof.events) == 200
    assert device.made <= 20 + 2 * 5 + 1
    assert [e.start_ns for e in prof.events] == sorted(e.start_ns for e in prof.events)


def test_an_error_ends_the_ranges_that_are_open(device: Device) -> None:
    def fails(prof: Profile) -> None:
        with prof, prof.recording(CUDA, 0) as run:
            run.nodes = [Node("a", "segment")]
            run.begin(0)
            raise ZeroDivisionError

    prof = Profile()
    with pytest.raises(ZeroDivisionError):
        fails(prof)
    assert device.all_ranges == ["a"]
    assert prof.events == []


def test_a_ready_profile_records_nothing() -> None:
    with pytest.raises(InputError, match="cannot record"), Profile().recording(torch.device("cpu"), 0):
        pass


class Work:
    def __init__(self, ended_ns: int | None = None, works: tuple[Any, ...] | None = None) -> None:
        if ended_ns is not None:
            self.ended_ns = ended_ns
        if works is not None:
            self.works = works


@pytest.mark.parametrize(
    ("work", "want"),
    [
        (Work(), 0),
        (Work(5), 5),
        (Work(works=()), 0),
        (Work(works=(Work(5), Work(9))), 9),
        (Work(works=(Work(5), Work())), 0),
    ],
)
def test_a_group_has_ended_with_its_last_part_if_all_of_them_say_when(work: Work, want: int) -> None:
    assert ended_ns(work) == want


def test_an_interval_ends_when_its_work_did_but_never_before_it_began() -> None:
    run = Run(HostClock(torch.device("cpu")), 0)
    run.nodes = [Node(str(i), "communication") for i in range(3)]
    for i in range(3):
        run.begin(i)
    starts = dict(run._starts)
    for i, ended in enumerate((starts[0] + 1, 1, 2**62)):
        run.ended(i, Work(ended))
    first, second, third = run.spans()
    assert first[1:] == (starts[0], starts[0] + 1)
    assert second[1] == second[2] == starts[1]
    assert third[1] < third[2] < 2**62
