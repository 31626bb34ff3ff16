"""Random schedules: the race check finds exactly the pairs of statements that a check by definition finds."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostir.ir.nodes import Call, Comm, Event, Program, Sync, every
from hostir.ir.parse import parse_program
from hostir.ir.race import races
from hostir.ir.walk import Lane, Region, walk

STREAMS: Final = ("main", "s", "t")


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Copies between parts of two buffers, syncs of streams and events, some of it in a loop."""
    names, events = itertools.count(), itertools.count()
    named: list[str] = []

    def statement(index: st.SearchStrategy[str]) -> list[str]:
        if draw(st.integers(0, 2)) == 0:
            what = draw(st.sampled_from([*STREAMS, *named]))
            return [f"sync {what} -> {draw(st.sampled_from(STREAMS))}"]
        source, into = f"%v{next(names)}", f"%v{next(names)}"
        at = draw(index)
        shape = draw(st.sampled_from(["row", "column", "part"]))
        one, other = draw(st.sampled_from("ab")), draw(st.sampled_from("ab"))
        item = {"row": "[{}]", "column": "[:, {}]", "part": "[({}) // 2, ({}) // 2 : ({}) // 2 + 2]"}[shape]
        lines = [f"{source} = view %{one}{item.replace('{}', at)}", f"{into} = view %{other}{item.replace('{}', draw(index))}"]
        event = ""
        if draw(st.booleans()):
            named.append(f"!e{next(events)}")
            event = f"{named[-1]} = "
        return [*lines, f"{event}{into} <- copy({source}) on {draw(st.sampled_from(STREAMS))}"]

    def block(index: st.SearchStrategy[str]) -> list[str]:
        return [line for _ in range(draw(st.integers(0, 4))) for line in statement(index)]

    constant = st.sampled_from(["0", "1", "2", "3"])
    inside = st.one_of(constant, st.sampled_from(["%i", "(%i + 1) % 4", "3 - %i"]))
    lines = [*block(constant), f"for %i in 0 .. {draw(st.integers(0, 4))} {{", *block(inside), "}", *block(constant)]
    return "program @p(inout %a: f32[4, 4], inout %b: f32[4, 4]) scheduled {\n" + "\n".join(lines) + "\n}"


def elements(r: Region) -> set[tuple[int, int]]:
    index = np.indices(r.layout.sizes).reshape(len(r.layout.sizes), -1)
    flat = r.layout.offset + (index * np.array(r.layout.strides)[:, None]).sum(0)
    return {(r.root.serial, int(e)) for e in flat}


def by_definition(p: Program) -> set[tuple[int, int]]:
    """Pairs of statements (by id) with two executions on different streams that share an element, one writes, no path of order."""
    steps = list(walk(p))
    before: list[set[int]] = []  # for each step, all steps that have ended when it begins
    last: dict[Lane, set[int]] = {}  # what the next step of a stream comes after
    latest: dict[Event, int] = {}
    for i, s in enumerate(steps):
        known = last.setdefault(s.stream, set())
        before.append(set(known))
        if isinstance(s.op, Sync):
            if isinstance(s.op.what, Event):
                known |= before[latest[s.op.what]] | {latest[s.op.what]} if s.op.what in latest else set()
            elif s.waits is not None:
                known |= last.setdefault(s.waits, set())
        elif isinstance(s.op, (Call, Comm)):
            known.add(i)
            if s.op.event is not None:
                latest[s.op.event] = i
    found = set()
    for j, t in enumerate(steps):
        for i, s in enumerate(steps[:j]):
            if i not in before[j] and s.stream != t.stream:
                pairs = [(s.writes, t.reads), (s.reads, t.writes), (s.writes, t.writes)]
                if any(elements(x) & elements(y) for xs, ys in pairs for x in xs for y in ys):
                    found.add((id(s.op), id(t.op)))
    return found


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_races_are_those_of_the_definition(text: str) -> None:
    p = parse_program(text)
    statements = {s.loc: s for s in every(p.body)}
    found = {tuple(id(statements[loc]) for loc in d.locs) for d in races(p)}
    assert found == by_definition(p)
