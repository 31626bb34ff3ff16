"""Programs in other orders: what a run may do, and that the race check says of a program what its orders say."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostir.ir.nodes import Program
from hostir.ir.verify import verify
from tests.support.actions import Malformed, Stuck
from tests.support.classify import Judge
from tests.support.differential import Tally, differential, disturbed, thrown_in
from tests.support.interleave import World
from tests.support.library import shipped
from tests.support.machine import Real
from tests.support.programs import generate, generated
from tests.unit.ir.right_programs import EXCHANGE, PULL, RIGHT, RING, changed, program, without

TO_MAIN, TO_COMM = "    sync comm -> main\n", "    sync main -> comm\n"
SHIPPED = {s.name: s for s in shipped()}


def scheduled(body: str, mesh: str = " mesh(tp = 2)", params: str = "%x: f32[4], inout %a: f32[4], inout %b: f32[4]") -> Program:
    return program(f"program @p({params}){mesh} scheduled {{\n{body}\n}}")


def differ(p: Program, n: int | None = None, runs: int = 60, *, loose: bool = True) -> int:
    """In how many of ``runs`` other orders something is read, or left, that is not read or left in order."""
    expected = World(p, n, serial=True, loose=False).run()
    world = World(p, n, loose=loose)
    return sum(not world.run(seed, garbage=seed + 1).agrees(expected) for seed in range(runs))


# ------------------------------------------------------------------------------------------------------------------ what a run does


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("loose", [True, False])
def test_right_programs_give_the_same_in_every_order(name: str, loose: bool) -> None:
    s = SHIPPED[name]
    expected = World(s.program, s.mesh, serial=True, loose=False).run()
    world = World(s.program, s.mesh, loose=loose)
    assert all(world.run(seed, garbage=seed + 1).agrees(expected) for seed in range(50))


@pytest.mark.parametrize("line", [TO_MAIN, TO_COMM])
def test_without_a_sync_some_order_differs(line: str) -> None:
    assert differ(program(without(RING, line))) > 5
    assert differ(program(RING)) == 0


def test_one_seed_is_one_order() -> None:
    world = World(program(without(RING, TO_MAIN)))
    assert world.run(5) == world.run(5)
    assert len({world.run(seed).seen for seed in range(20)}) > 1


def test_a_call_reads_at_one_time_and_writes_at_a_later_one() -> None:
    """Two updates in place without an order lose one of them, in some order."""
    world = World(scheduled("%a <- @double(%a) on s\n%a <- @double(%a) on t", ""))
    first = world.run(0)
    assert any(not world.run(seed).agrees(first) for seed in range(40))
    assert any(len(set(world.run(seed).seen) - {0}) == 1 for seed in range(40))  # both read the same


def test_what_was_in_memory_before_shows_when_it_is_read() -> None:
    p = scheduled("%t = alloc f32[4]\n%a <- copy(%t)")
    assert not World(p).run(garbage=0).agrees(World(p).run(garbage=1))
    fine = scheduled("%t = alloc f32[4]\n%t <- copy(%x)\n%a <- copy(%t)")
    assert World(fine).run(garbage=0).agrees(World(fine).run(garbage=1))


def test_freed_memory_changes_and_writing_it_is_noticed() -> None:
    read = scheduled("%t = zeros f32[4]\nsync main -> s\n%a <- copy(%t) on s\nfree %t")
    assert differ(read) > 0
    written = scheduled("%t = zeros f32[4]\nsync main -> s\n%t <- copy(%x) on s\nfree %t")
    world = World(written)
    with pytest.raises(Malformed, match="after it was freed"):
        [world.run(seed) for seed in range(40)]


def test_messages_meet_and_collectives_need_everyone() -> None:
    one_sided = "if rank(tp) == 0 { send(%x to 1) }"
    with pytest.raises(Stuck):
        World(scheduled(one_sided)).run(0)
    with pytest.raises(Stuck):
        World(scheduled("if rank(tp) == 0 { %a <- allreduce(%a) }")).run(0)
    both = scheduled("send(%x to 1 - rank(tp))\n%a <- recv(from 1 - rank(tp))")
    with pytest.raises(Stuck):
        World(both, loose=False).run(0)
    assert World(program(EXCHANGE), 3).run(0)


@pytest.mark.parametrize(
    "body",
    [
        "%a <- permute(%x to 0 from 0)", "%a <- broadcast(%x from rank(tp))",
        "if rank(tp) == 0 { %a <- allreduce(%a max) } else { %a <- allreduce(%a) }",
        "if rank(tp) == 0 { send(%x to 1) } else { %h = alloc f32[3] %h <- recv(from 0) }",
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_no_program(body: str) -> None:
    with pytest.raises(Malformed):
        World(scheduled(body))


def test_a_broadcast_may_end_on_the_root_before_the_others_come() -> None:
    """Loose: data that has left is gone. Else: nobody ends before everybody is there."""
    p = scheduled("if rank(tp) == 1 { barrier() over [1] }\n%a <- broadcast(%x from 0)\n%b <- copy(%x)", " mesh(tp = 2)")
    root_ends = {n.key: n for n in World(p).nodes}
    strict = {n.key: n for n in World(p, loose=False).nodes}
    write = next(k for k in root_ends if k[0] == 0 and k[2] == "write")
    assert root_ends[write].num_before < strict[write].num_before


def test_unordered_uses_are_those_of_the_race_check() -> None:
    for name, (text, n, dims) in RIGHT.items():
        if "symmetric" not in text and dims is None:
            assert not World(program(text), n).unordered(), name
    bad = World(program(without(RING, TO_MAIN))).unordered()
    assert {(a.key[2], b.key[2]) for a, b in bad} >= {("write", "read")}


def test_flags_order_peers_and_without_them_a_read_comes_too_early() -> None:
    p = program(PULL)
    assert differ(p.with_(scheduled=True), 3) == 0
    assert differ(program(changed(PULL, "  barrier()\n  %p = view", "  %p = view")).with_(scheduled=True), 3) > 0


def test_units_by_aten_give_what_they_say() -> None:
    made = generated(3)
    p = made.parse()
    assert World(p, made.mesh, serial=True, machine=Real()).run().outputs != World(p, made.mesh, serial=True).run().outputs
    assert World(p, made.mesh, serial=True, machine=Real()).run(0).agrees(World(p, made.mesh, serial=True, machine=Real()).run(1, garbage=4))


# ---------------------------------------------------------------------------------------------------------- the check against orders


def test_accepted_programs_agree_in_200_orders_and_races_are_shown() -> None:
    tally = differential(range(1000, 1030), runs=200)
    assert tally.wrong == []
    assert tally.missing == []
    assert tally.accepted > 10
    assert tally.races > 20
    assert tally.shown >= 0.95 * tally.races


@settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.booleans())
def test_whatever_the_check_says_of_a_wild_program_its_orders_say(rng: random.Random, thrown: bool) -> None:
    made = generate(rng, 6)
    tally = Tally()
    tally.add(0, thrown_in(made, rng) if thrown else disturbed(made, rng), made.mesh, 200)
    assert tally.wrong == []
    assert tally.missing == []


def test_a_judge_holds_a_program_against_itself() -> None:
    s = SHIPPED["ring"]
    judge = Judge(s.program, s.mesh, 20)
    assert judge.wrong(s.program) == ""
    assert judge.wrong(program(without(RING, TO_MAIN))).startswith("another order")
    report = verify(program(without(RING, TO_MAIN)), check=False)
    assert judge.deserved(program(without(RING, TO_MAIN)), report)
