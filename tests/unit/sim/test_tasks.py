"""The queue of tasks: links one after another, processors shared, and why each task began when it did."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostir.sim.tasks import Task, critical, run


def call(cost: float, share: float = 1.0, rank: int = 0, **more: Any) -> Task:
    return Task(cost, devices=(rank,), share=share, elastic=True, **more)


def message(cost: float, share: float = 0.25, *ranks: int, **more: Any) -> Task:
    return Task(cost, devices=ranks or (0,), share=share, **more)


def spans(*tasks: Task) -> list[tuple[float, float]]:
    run(tasks)
    return [(t.start, t.end) for t in tasks]


def after(task: Task, *before: Task) -> Task:
    task.after(*before)
    return task


def test_a_task_begins_when_all_before_it_have_ended() -> None:
    a, b = Task(2), Task(5)
    assert spans(a, b, after(Task(1), a, b)) == [(0, 2), (0, 5), (5, 6)]


def test_a_task_that_needs_one_of_several_begins_with_the_first_to_end_also_when_that_began_later() -> None:
    slow, first = Task(10), Task(1)
    quick = after(Task(1), first)
    assert spans(slow, first, quick, after(Task(1, first=True), slow, quick))[3] == (2, 3)


def test_nothing_begins_before_it_may() -> None:
    a = Task(1, start=3)
    assert spans(a, after(Task(1, start=2), a)) == [(3, 4), (4, 5)]


def test_a_link_carries_one_task_after_another() -> None:
    assert spans(Task(2, ("l",)), Task(2, ("l",)), Task(2, ("m",)), Task(2, ("l", "m"))) == [(0, 2), (2, 4), (0, 2), (4, 6)]


def test_two_calls_that_each_fill_the_device_take_as_long_as_one_after_the_other() -> None:
    assert spans(call(4), call(2)) == [(0, 6), (0, 4)]


def test_calls_that_fit_beside_each_other_do_not_slow_down() -> None:
    assert spans(call(4, 0.5), call(2, 0.5), call(3, rank=1)) == [(0, 4), (0, 2), (0, 3)]
    assert spans(call(4, 0.75), message(9, 0.25))[0] == (0, 4)


def test_a_communication_takes_its_share_while_it_runs() -> None:
    assert spans(call(8), message(4))[0] == (0, 4 + 5)  # 4 seconds at 3/4 of the rate leave 5
    assert spans(call(8), message(4, 0.25, 1))[0] == (0, 8)  # on another device
    assert spans(call(3), message(4))[0] == (0, 4)
    late = Task(1)
    assert spans(call(8), late, after(message(4), late))[0] == (0, 9)


def test_who_comes_after_a_slowed_call_waits_for_its_end() -> None:
    a = call(8)
    assert spans(a, message(4), after(Task(1), a))[2] == (9, 10)


def test_communication_never_stops_a_device() -> None:
    assert spans(call(1), message(100, 0.7), message(100, 0.7))[0][1] == pytest.approx(10)


def test_the_critical_path_goes_back_through_what_held_each_task_up() -> None:
    a, b = Task(1), Task(3)
    c = after(Task(2, ("l",)), a)
    d = after(Task(2, ("l",)), b)
    e = Task(4, ("l",))
    tasks = [a, b, c, d, e]
    run(tasks)
    assert (e.start, c.start, d.start) == (0, 4, 6)  # e came first to the link, then c, then d
    assert critical(tasks) == [e, c, d]


def test_of_a_program_without_tasks_the_path_is_empty() -> None:
    assert critical([]) == []


def test_the_path_begins_where_its_first_task_may_begin() -> None:
    a = Task(0, start=2)
    run([a])
    assert [(t.start, t.end) for t in critical([a])] == [(2, 2)]


@st.composite
def graphs(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for _ in range(draw(st.integers(1, 14))):
        cost, kind = draw(st.integers(0, 5)), draw(st.sampled_from(["call", "message", "mark"]))
        rank = draw(st.integers(0, 1))
        if kind == "call":
            t = call(cost, draw(st.sampled_from([0.25, 0.5, 1.0])), rank)
        elif kind == "message":
            t = message(
                cost, draw(st.sampled_from([0.0, 0.25, 0.5])), *draw(st.sampled_from([(0,), (1,), (0, 1)])), links=(draw(st.sampled_from("lm")),)
            )
        else:
            t = Task(0, first=draw(st.booleans()))
        for before in draw(st.lists(st.sampled_from(tasks), max_size=3, unique_by=id)) if tasks else ():
            t.after(before)
        tasks.append(t)
    return tasks


@given(graphs())
def test_every_task_runs_and_the_path_adds_up(tasks: list[Task]) -> None:
    run(tasks)
    for t in tasks:
        assert t.end >= t.start + t.cost - 1e-9
        for n in t.next:
            assert n.first or n.start >= t.end - 1e-9
    path = critical(tasks)
    last = max(t.end for t in tasks)
    assert sum(t.end - t.start for t in path) == pytest.approx(last)
    reach = 0.0
    for t in path:
        assert t.start == pytest.approx(reach)
        reach = t.end
