"""Ranks in each other's memory: what orders a write on a peer, and what is found when it is missing."""

from __future__ import annotations

import pytest

from hostir.ir.diagnostics import Diagnostic
from hostir.ir.verify import verify
from tests.unit.ir.right_programs import GATED, PULL, PUSH, changed, program, without


def found(text: str, mesh: int = 3) -> tuple[Diagnostic, ...]:
    return verify(program(text), mesh, check=False).diagnostics


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("text", [PUSH, PULL, GATED])
def test_right_programs_are_accepted(text: str, ranks: int) -> None:
    assert found(text, ranks) == ()


def test_a_read_without_the_wait_races_with_the_peers_write() -> None:
    (d,) = found(without(PUSH, "  wait(%f value 1)\n"))
    assert d.kind == "race"
    assert d.ranks == (0, 1, 2)
    assert d.statements == ("%p <- copy(%x) on c", "%o <- copy(%b)")


def test_a_signal_before_the_write_does_not_cover_it() -> None:
    write, signal = "  %p <- copy(%x) on c\n", "  signal(%f to (rank(tp) + 1) % size(tp) value 1) on c\n"
    (d,) = found(changed(PUSH, write + signal, signal + write))
    assert d.kind == "race"


def test_a_signal_on_another_stream_does_not_cover_the_write() -> None:
    (d,) = found(changed(PUSH, "value 1) on c", "value 1)"))
    assert d.kind == "race"


def test_a_flag_that_is_filled_while_a_peer_may_signal_is_a_race() -> None:
    (d,) = found(without(PUSH, "  barrier()\n"))
    assert d.statements[0] == "%f = zeros i32[] symmetric"
    assert d.statements[1].startswith("signal(")


def test_a_flag_that_never_gets_its_value_is_a_deadlock() -> None:
    (d,) = found(changed(PUSH, "size(tp) value 1)", "size(tp) value 0)"))
    assert d.kind == "deadlock"
    assert d.ranks == (0, 1, 2)
    assert d.statements == ("wait(%f value 1)",)


def test_a_flag_that_starts_high_enough_orders_nothing() -> None:
    (d,) = found(changed(PUSH, "%f = zeros", "%f = full(1)"))
    assert d.kind == "race"


@pytest.mark.parametrize("after", ["  %p = view", "  %b <- copy(%o)"])
def test_both_barriers_of_a_pull_are_needed(after: str) -> None:
    (d,) = found(changed(PULL, "  barrier()\n" + after, after))
    assert d.kind == "race"
    assert "barrier" in (d.cure or "")


def test_a_local_race_is_found_in_a_program_with_peers_too() -> None:
    (d,) = found(without(PUSH, "  sync main -> c\n"), 1)
    assert d.kind == "race"


def test_a_call_that_waits_for_flags_knows_what_was_done_before_them() -> None:
    (d,) = found(without(GATED, " awaits %f"), 2)
    assert d.kind == "race"
    kinds = {d.kind for d in found(changed(GATED, "for %i in 0 .. 2", "for %i in 0 .. 1"), 2)}
    assert kinds == {"deadlock", "unwritten"}  # the second flag is never signalled, its chunk never copied


def test_reading_what_the_peer_never_writes() -> None:
    found_ = found(without(PULL, "  %b <- copy(%x)\n", "  barrier()\n  %b <- copy(%o)\n"))
    assert [d.kind for d in found_] == ["unwritten"]
    assert "peer" in found_[0].message


def test_waits_that_several_signals_may_end_know_only_what_all_of_them_know() -> None:
    text = """
      program @p(%x: f32[4]) mesh(tp = 3) {
        %b = alloc f32[2, 4] symmetric
        %f = zeros i32[] symmetric
        barrier()
        if rank(tp) > 0 {
          %p = view %b.peer(0)
          %q = view %p[rank(tp) - 1]
          %q <- copy(%x)
          signal(%f to 0 value VALUE)
        } else {
          wait(%f value 1)
          %o = alloc f32[4]
          %one = view %b[0]
          %o <- copy(%one)
        }
      }"""
    assert [d.kind for d in found(text.replace("VALUE", "1"))] == ["race"]
    assert found(text.replace("VALUE", "2 - rank(tp)")) == ()


def test_a_peers_buffer_that_is_written_only_after_it_is_read_is_not_written() -> None:
    (d,) = found(without(PULL, "  %b <- copy(%x)\n"))
    assert d.kind == "unwritten"
    assert d.ranks == (0, 1, 2)
    assert "by then" in d.message


def test_ones_own_buffer_that_the_peer_fills_too_late_is_not_written() -> None:
    late = changed(PUSH, "  wait(%f value 1)\n  %o <- copy(%b)\n", "  wait(%f value 1)\n")
    late = changed(late, "  sync main -> c\n", "  %o <- copy(%b)\n  barrier()\n  sync main -> c\n")
    (d,) = found(late)
    assert d.kind == "unwritten"
    assert "its own %b" in d.message


def test_who_has_seen_the_only_signal_may_reset_the_flag() -> None:
    reset = changed(PUSH, "  %o <- copy(%b)\n", "  %z = zeros i32[]\n  %f <- copy(%z)\n  %o <- copy(%b)\n")
    assert found(reset) == ()
    assert [d.kind for d in found(changed(reset, "  wait(%f value 1)\n", "  barrier()\n"))] == ["race", "race"]
