"""Races between streams: found when they are there, with both statements, and not when they are not."""

from __future__ import annotations

import pytest

from hostir.ir.diagnostics import Diagnostic
from hostir.ir.race import happens_before, races
from tests.unit.ir.right_programs import RIGHT, RING, RING_IN_ORDER, RING_SERIAL, ROTATED, TWO_STREAMS, changed, program, without

TO_MAIN, TO_COMM = "    sync comm -> main\n", "    sync main -> comm\n"


def found(text: str, rank: int = 0, mesh: int | None = None) -> tuple[Diagnostic, ...]:
    return races(program(text), rank, mesh)


def scheduled(body: str, params: str = "%x: f32[4]", mesh: str = "") -> str:
    return f"program @p({params}){mesh} scheduled {{\n{body}\n}}"


@pytest.mark.parametrize("name", [n for n, r in RIGHT.items() if "symmetric" not in r.text])
def test_right_programs_have_no_races(name: str) -> None:
    text, mesh, dims = RIGHT[name]
    assert races(program(text), 0, mesh, dims=dims) == ()


@pytest.mark.parametrize(
    ("line", "first", "second"),
    [
        (TO_MAIN, "%nxt <- permute(", "%y <- @mm_acc("),
        (TO_COMM, "%v <- copy(%x)", "%nxt <- permute("),
    ],
)
def test_dropping_a_sync_of_the_ring_is_a_race_of_the_two_statements_that_it_ordered(line: str, first: str, second: str) -> None:
    assert line in RING
    (d, *_) = found(without(RING, line))
    assert d.kind == "race"
    assert d.statements[0].startswith(first)
    assert d.statements[1].startswith(second)
    assert all(loc is not None and loc.line > 0 for loc in d.locs)
    assert "%buf" in d.message
    assert line.strip() in (d.cure or "")
    assert len(str(d).splitlines()) < 15


def test_a_race_names_the_trips_in_which_it_happens() -> None:
    (d,) = found(without(RING, TO_MAIN))
    assert d.indices == ({"i": 0}, {"i": 1})
    assert d.count == 4


@pytest.mark.parametrize("line", [TO_MAIN, "    sync !e -> main\n", TO_COMM])
def test_dropping_a_sync_of_other_rings_is_caught(line: str) -> None:
    text, mesh = (ROTATED, 4) if line in ROTATED else (RING_SERIAL, None)
    assert found(without(text, line), 1, mesh)


def test_an_unscheduled_program_cannot_race() -> None:
    assert found(without(RING, TO_MAIN, TO_COMM).replace(" scheduled", "")) == ()


def test_parts_of_one_buffer_do_not_race_and_one_element_in_common_does() -> None:
    assert found(TWO_STREAMS) == ()
    (d,) = found(changed(TWO_STREAMS, "%b = view %y[%i]", "%b = view %y[max(%i - 1, 0)]"))
    assert d.indices == ({"i": 0}, {"i": 1})


def test_interleaved_columns_do_not_race() -> None:
    body = """
      %y = alloc f32[4, 4]
      %a = view %y[:, 0]
      %b = view %y[:, {}]
      %a <- copy(%x) on s
      %b <- copy(%x) on t
      return %y"""
    assert found(scheduled(body.format(1))) == ()
    assert len(found(scheduled(body.format(0)))) == 1


@pytest.mark.parametrize(
    ("first", "second", "bad"),
    [
        ("%z <- copy(%x)", "%y <- copy(%x)", False),  # two reads
        ("%y <- copy(%x)", "%z <- copy(%y)", True),  # write, read
        ("%z <- copy(%y)", "%y <- copy(%x)", True),  # read, write
        ("%y <- copy(%x)", "%y <- copy(%x)", True),  # write, write
    ],
)
def test_two_uses_race_when_one_of_them_writes(first: str, second: str, bad: bool) -> None:
    body = f"%y = zeros f32[4]\n%z = zeros f32[4]\nsync main -> s\nsync main -> t\n{first} on s\n{second} on t\nreturn %y, %z"
    assert bool(found(scheduled(body))) is bad


def test_a_stream_is_in_order_and_equal_names_and_indices_are_one_stream() -> None:
    body = "%y = alloc f32[4]\nfor %i in 0 .. 4 {{ %y <- @double(%x) on s[{}] }}\nreturn %y"
    assert found(scheduled(body.format("%i % 1"))) == ()
    assert len(found(scheduled(body.format("%i % 2")))) == 1


def test_a_sync_orders_what_was_queued_before_it_and_nothing_later() -> None:
    body = "%y = alloc f32[4]\n%z = alloc f32[4]\n%y <- copy(%x) on s\n{}\n%z <- copy(%y)\nreturn %z"
    assert found(scheduled(body.format("sync s -> main"))) == ()
    assert len(found(scheduled(body.format("sync main -> s")))) == 1
    late = "sync s -> main\n%y <- copy(%x) on s"
    assert len(found(scheduled(body.format(late)))) == 1


def test_syncs_are_transitive() -> None:
    body = "%y = alloc f32[4]\n%z = alloc f32[4]\n%y <- copy(%x) on s\nsync s -> t\n{}sync t -> main\n%z <- copy(%y)\nreturn %z"
    assert found(scheduled(body.format(""))) == ()
    assert len(found(scheduled(body.format("").replace("sync t -> main\n", "")))) == 1


def test_an_event_waits_for_its_latest_execution_in_this_run() -> None:
    body = """
      %y = alloc f32[4, 4]
      %z = alloc f32[4, 4]
      %other = alloc f32[4]
      for %i in 0 .. 4 {
        sync !e -> main
        if %i > 0 {
          %p = view %y[%i - 1]
          %q = view %z[%i - 1]
          %q <- copy(%p)
        }
        !before = %other <- copy(%x) on s
        %a = view %y[%i]
        !e = %a <- copy(%x) on s
      }
      return %y"""
    assert found(scheduled(body)) == ()
    (d,) = found(scheduled(changed(body, "sync !e", "sync !before")))
    assert d.statements == ("!e = %a <- copy(%x) on s", "%q <- copy(%p)")


def test_zeros_and_free_are_writes_on_main() -> None:
    filled = "%y = zeros f32[4]\n{}%y <- copy(%x) on s\nreturn %y"
    assert len(found(scheduled(filled.format("")))) == 1
    assert found(scheduled(filled.format("sync main -> s\n"))) == ()
    freed = "%y = alloc f32[4]\n%z = alloc f32[4]\n%y <- copy(%x) on s\n%z <- copy(%y) on s\n{}free %y\nreturn %z"
    (d, *_) = found(scheduled(freed.format("")))
    assert d.statements[1] == "free %y"
    assert found(scheduled(freed.format("sync s -> main\n"))) == ()


def test_a_body_buffer_is_fresh_each_trip() -> None:
    body = "for %i in 0 .. 4 { %t = alloc f32[4] %t <- copy(%x) on s[%i % 2] }"
    assert found(scheduled(body)) == ()
    outside = "%t = alloc f32[4] for %i in 0 .. 4 { %t <- copy(%x) on s[%i % 2] }"
    assert len(found(scheduled(outside))) == 1


def test_a_communication_reads_and_writes_on_its_stream() -> None:
    body = "%y = alloc f32[4]\n%y <- allreduce(%x) on comm\n{}%z = alloc f32[4]\n%z <- copy(%y)\nreturn %z"
    assert len(found(scheduled(body.format(""), mesh=" mesh(tp = 2)"))) == 1
    assert found(scheduled(body.format("sync comm -> main\n"), mesh=" mesh(tp = 2)")) == ()


def test_only_the_root_of_a_reduce_writes() -> None:
    body = "%y = zeros f32[4]\nsync main -> comm\n%y <- reduce(%x to 1) on comm\n%z = alloc f32[4]\n%z <- copy(%y)\nreturn %z"
    text = scheduled(body, mesh=" mesh(tp = 2)")
    assert found(text, rank=0) == ()
    assert len(found(text, rank=1)) == 1


@pytest.mark.parametrize("header", ["", " scheduled"])
def test_parts_of_a_group_run_at_once(header: str) -> None:
    text = f"""
      program @p(inout %x: f32[4], %z: f32[3]) mesh(tp = 2){header} {{
        %a = view %x[0 : 3]
        %b = view %x[START : 4]
        group {{
          send(%z to (rank(tp) + 1) % 2)
          %a <- recv(from (rank(tp) + 1) % 2)
          send(%b to (rank(tp) + 1) % 2)
        }}
      }}"""
    assert found(text.replace("START", "3")) == ()
    (d,) = found(text.replace("START", "2"))
    assert "group" in d.message


def test_a_group_is_one_step_of_its_stream() -> None:
    text = """
      program @p(%x: f32[4]) mesh(tp = 2) scheduled {
        %y = alloc f32[4]
        %z = alloc f32[4]
        group on comm {
          send(%x to (rank(tp) + 1) % 2)
          %y <- recv(from (rank(tp) + 1) % 2)
        }
        %z <- copy(%y) on comm
        sync comm -> main
        %y <- copy(%x)
        return %y, %z
      }"""
    assert found(text) == ()
    assert len(found(without(text, "        sync comm -> main\n"))) == 2


def test_empty_regions_do_not_race() -> None:
    body = "%y = alloc f32[4]\n%a = view %y[2 : 2]\n%b = view %x[1 : 1]\n%a <- copy(%b) on s\n%a <- copy(%b) on t\n%y <- copy(%x)\nreturn %y"
    assert found(scheduled(body)) == ()


def test_long_loops_without_syncs_are_still_checked_exactly() -> None:
    body = "%y = alloc f32[3000, 4]\nfor %i in 0 .. 3000 { %v = view %y[{}] %v <- copy(%x) on s[%i % 3] }\nreturn %y"
    assert found(scheduled(body.replace("{}", "%i"))) == ()
    (d,) = found(scheduled(body.replace("{}", "%i % 2999")))
    assert d.indices == ({"i": 0}, {"i": 2999})
    assert d.count == 1


# ------------------------------------------------------------------------------------------------------------- conflict order


def test_a_schedule_has_the_conflict_order_of_the_program_in_order() -> None:
    in_order = happens_before(program(RING_IN_ORDER), 1)
    assert happens_before(program(RING), 1) == in_order
    assert happens_before(program(RING_SERIAL), 1) == in_order
    assert ("%v <- copy(%x)", "%y <- @mm_acc(%cur, %wi, %y) [%i = 0]") in in_order


@pytest.mark.parametrize("line", [TO_MAIN, TO_COMM])
def test_a_dropped_sync_loses_part_of_the_conflict_order(line: str) -> None:
    whole = happens_before(program(RING))
    assert happens_before(program(without(RING, line))) < whole


def test_swapping_two_statements_changes_the_conflict_order_only_if_they_conflict() -> None:
    start = "%y = zeros f32[4]\n%z = zeros f32[4]\n"

    def order(*lines: str) -> frozenset[tuple[str, str]]:
        return happens_before(program(scheduled("\n".join((start, *lines, "return %y, %z")))))

    one, other, apart = "%y <- copy(%x)", "%z <- copy(%y)", "%z <- copy(%x)"
    assert order(one, other) != order(other, one)
    assert order(one, apart) == order(apart, one)


def test_executions_of_equal_statements_are_told_apart() -> None:
    text = "program @p(%x: f32[4]) {\n%y = alloc f32[4]\n%y <- copy(%x)\n%y <- copy(%x)\nreturn %y\n}"
    assert happens_before(program(text)) == {("%y <- copy(%x)", "%y <- copy(%x) #2")}
