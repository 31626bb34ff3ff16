"""Scheduling keeps the meaning: whatever order the streams then allow, every rank gets the bits of program order."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostir.ir.nodes import MAIN, Comm, For, Free, Program, Sync, every
from hostir.ir.parse import parse_program
from hostir.ir.race import happens_before
from hostir.ir.verify import verify
from hostir.ir.walk import resolve_mesh
from hostir.mesh import Mesh
from hostir.passes.schedule import schedule
from hostir.passes.streams import streams
from tests.support.interleave import World
from tests.support.made import Made
from tests.support.peer_programs import generate_peers, generated_peers
from tests.support.programs import generate, generated
from tests.unit.ir.right_programs import GATED, PULL, PUSH, program, without

RANDOM = st.randoms(use_true_random=False)
FEW = settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=list(HealthCheck))


def keeps_the_meaning(p: Program, mesh: Mesh, runs: int = 30) -> Program:
    """The scheduled program, after every check that it must pass."""
    scheduled = schedule(p, mesh)
    assert scheduled.scheduled
    assert parse_program(str(scheduled)) == scheduled
    report = verify(scheduled, mesh, check=False)
    assert report.ok, str(report)
    expected = World(p, mesh, serial=True, loose=False).run().outputs
    for loose in (True, False):
        world = World(scheduled, mesh, loose=loose)
        for seed in range(runs // 2):
            assert world.run(seed, garbage=seed + 1).outputs == expected
    return scheduled


@pytest.mark.parametrize("seed", range(60))
def test_a_scheduled_program_is_right_and_gives_the_bits_of_program_order(seed: int) -> None:
    made = generated(seed)
    keeps_the_meaning(made.parse(), made.mesh)


@FEW
@given(RANDOM)
def test_any_program_that_is_right_in_order_can_be_scheduled(rng: random.Random) -> None:
    made = generate(rng, 8)
    assert verify(made.parse(), made.mesh).ok
    keeps_the_meaning(made.parse(), made.mesh, 10)


@pytest.mark.parametrize("seed", range(30))
def test_programs_whose_ranks_touch_each_others_memory_keep_their_order_across_ranks(seed: int) -> None:
    made = generated_peers(seed)
    keeps_the_meaning(made.parse(), made.mesh)


@FEW
@given(RANDOM)
def test_any_program_of_pushes_and_pulls_can_be_scheduled(rng: random.Random) -> None:
    made = generate_peers(rng, 3)
    keeps_the_meaning(made.parse(), made.mesh, 10)


@pytest.mark.parametrize("seed", range(40))
def test_streams_keep_the_whole_conflict_order_on_every_rank(seed: int) -> None:
    made = generated(seed)
    p = made.parse()
    for rank in made.mesh.layout:
        in_order = happens_before(p, rank, made.mesh)
        assert happens_before(streams(p, made.mesh), rank, made.mesh) == in_order


@pytest.mark.parametrize("seed", range(40))
def test_one_stream_is_program_order(seed: int) -> None:
    made = generated(seed)
    off = schedule(made.parse(), made.mesh, overlap="off")
    assert {s.name for x in every(off.body) for s in [getattr(x, "stream", None)] if s is not None} <= {"main"}
    assert verify(off, made.mesh).ok
    one = World(off, made.mesh, loose=False)
    assert one.run().outputs == World(made.parse(), made.mesh, serial=True, loose=False).run().outputs


# ------------------------------------------------------------------------------------------------- places that were got wrong once


def on(text: str, n: int = 2, runs: int = 60) -> Program:
    p = program(text)
    return keeps_the_meaning(p, resolve_mesh(p, n), runs)


def syncs(p: Program) -> list[Sync]:
    return [s for s in every(p.body) if isinstance(s, Sync)]


def test_a_dependence_that_an_outer_of_two_loops_carries() -> None:
    on("""
      program @p(%x: f32[4], inout %y: f32[4, 4]) {
        for %i in 0 .. 2 {
          for %j in 0 .. 3 {
            %a = view %y[%j]
            %b = view %y[(%j + 1) % 4]
            %b <- @double(%a) on s[%i % 2]
          }
        }
      }""")


def test_a_dependence_two_trips_long_between_indexed_streams() -> None:
    on(
        """
      program @p(%x: f32[4, 4], inout %y: f32[4]) mesh(tp = 1) {
        for %i in 1 .. 4 {
          %v = view %x[%i]
          %t = alloc f32[4]
          group on s[%i % 3] {
            send(%v to 0)
            %t <- recv(from 0)
          }
          %y <- @double(%t) on s[1]
          %w = view %x[0]
          %y <- copy(%w) on s[1]
        }
      }""",
        1,
    )


def test_a_loop_with_a_step_on_indexed_streams() -> None:
    on("""
      program @p(%x: f32[9, 4], inout %y: f32[4]) {
        for %i in 0 .. 9 step 3 {
          %v = view %x[%i]
          %y <- @double(%y) on s[%i % 4]
          %y <- copy(%v) on s[(%i + 1) % 4]
        }
      }""")


def test_a_wait_for_an_event_on_a_stream_that_an_inner_loop_indexes() -> None:
    on("""
      program @p(%x: f32[4], inout %y: f32[4, 4], inout %z: f32[4]) {
        %r = alloc f32[4]
        %r <- @double(%x) on a
        %z <- @double(%x) on a
        %z <- @double(%x) on s[1]
        for %i in 0 .. 3 {
          %v = view %y[%i]
          %v <- copy(%r) on s[%i % 2]
        }
      }""")


def test_the_parts_of_a_group_run_on_the_groups_stream_also_where_memory_is_freed() -> None:
    p = on("""
      program @p(%x: f32[4], inout %y: f32[4], inout %z: f32[4]) mesh(tp = 2) {
        %a = alloc f32[4]
        %a <- copy(%x)
        group on comm {
          send(%a to 1 - rank(tp))
          %y <- recv(from 1 - rank(tp))
        }
        %z <- copy(%x)
        %z <- @double(%x)
      }""")
    assert not [s for s in every(p.body) if isinstance(s, Free)]


def test_a_sync_that_a_later_one_makes_superfluous_is_dropped() -> None:
    p = on("""
      program @p(inout %y: f32[4], inout %z: f32[4]) {
        %a = full(3) f32[4]
        %b = full(2) f32[4]
        %c = zeros f32[4]
        %y <- @double(%a) on s
        %z <- @double(%b) on s
        %y <- @double(%c)
      }""")
    assert len([s for s in syncs(p) if s.what is MAIN]) == 1


def test_syncs_of_the_author_stay_also_where_they_order_nothing() -> None:
    p = on("program @p(%x: f32[4], inout %y: f32[4]) {\n sync a -> main\n %y <- copy(%x)\n sync main -> b\n}")
    assert len(syncs(p)) == 2


def test_barriers_of_a_program_that_reads_peers_stay_in_its_stream_and_flags_are_not_freed() -> None:
    pulled = on(PULL, 3)
    assert {s.stream.name for s in every(pulled.body) if isinstance(s, Comm)} == {"main"}
    assert not [s for s in every(on(PUSH, 3).body) if isinstance(s, Free)]


@pytest.mark.parametrize(
    "text",
    [
        without(PUSH.replace(" scheduled", ""), "  sync main -> c\n"),
        without(GATED.replace(" scheduled", ""), "  sync main -> copies\n"),
        PULL.replace("barrier()", "barrier() on c"),
        PULL.replace("barrier()", "barrier() on c").replace("%o <- copy(%p)", "%o <- copy(%p) on d"),
    ],
    ids=["push", "gated", "barriers aside", "barriers and reads aside"],
)
def test_what_orders_ranks_is_kept_in_order_with_what_they_touch(text: str) -> None:
    assert syncs(on(text, 3))


def test_symmetric_memory_of_a_loop_is_not_reused() -> None:
    p = on(
        """
      program @p(%x: f32[4], inout %y: f32[4]) mesh(tp) {
        for %i in 0 .. 3 {
          %b = alloc f32[4] symmetric
          %b <- copy(%x)
          barrier()
          %p = view %b.peer((rank(tp) + 1) % size(tp))
          %y <- copy(%p)
        }
      }""",
        3,
    )
    (loop,) = [s for s in p.body if isinstance(s, For)]
    assert "symmetric" in str(p).split("for ")[1]
    assert loop.body


def test_made_programs_are_of_every_sort() -> None:
    """The generator reaches what it is there for."""
    texts = [generated(seed).text for seed in range(200)]
    for word in ("group", "recv", "alltoallv", "reduce_scatter", "over tp", "over (tp, dp)", "else", "step 2", "s[%", "sync !e", "free %", "barrier"):
        assert any(word in text for text in texts), word
    assert {len(made.axes) for made in map(generated, range(40))} == {1, 2}


def test_a_made_program_is_the_same_for_the_same_seed() -> None:
    assert generated(7) == generated(7)
    assert isinstance(generated(7), Made)
