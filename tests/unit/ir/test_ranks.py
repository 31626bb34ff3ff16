"""Ranks that disagree, and ranks that wait for each other: what is found, on whom, and what is let through."""

from __future__ import annotations

import pytest

from hostir.ir import ranks
from hostir.ir.diagnostics import Diagnostic
from hostir.ir.verify import verify
from tests.unit.ir.right_programs import EXCHANGE, MESSAGES, RIGHT, RING, SHARES, changed, program

NEXT, PREVIOUS = "(rank(tp) + 1) % size(tp)", "(rank(tp) - 1) % size(tp)"


def found(text: str, mesh: int | None = None) -> tuple[Diagnostic, ...]:
    return verify(program(text), mesh, check=False).diagnostics


def body(statements: str, mesh: str = "tp", params: str = "%x: f32[4], inout %a: f32[4], inout %b: f32[4]") -> str:
    return f"program @p({params}) mesh({mesh}) {{\n{statements}\n}}"


def only(text: str, mesh: int | None, kind: str) -> Diagnostic:
    (d,) = found(text, mesh)
    assert d.kind == kind, str(d)
    assert d.cure
    assert len(str(d).splitlines()) < 15
    return d


@pytest.mark.parametrize("name", RIGHT)
def test_ranks_of_right_programs_agree_also_when_they_are_run_against_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, mesh, dims = RIGHT[name]
    monkeypatch.setattr(ranks, "agree_at_once", lambda *_: False)
    assert verify(program(text), mesh, dims=dims).ok


# ------------------------------------------------------------------------------------------------------------------ agreement

ONE_SIDE = "if rank(tp) == 1 {{ {} }} else {{ {} }}"


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("%a <- allreduce(%a)", "%a <- allreduce(%a max)", "op"),
        ("%a <- allreduce(%a)", "%a <- reduce(%a to 0)", "kind"),
        ("%a <- allreduce(%a)", "%h <- allreduce(%h)", "sizes"),
        ("%a <- allreduce(%a)", "%k <- allreduce(%k)", "dtype"),
        ("%a <- allreduce(%a) on s", "%a <- allreduce(%a) on t", "stream"),
        ("%a <- allreduce(%a) on s[0]", "%a <- allreduce(%a) on s[1]", "stream"),
        ("%g <- allgather(%m)", "%h2 <- allgather(%m dim 1)", "dim"),
    ],
)
def test_members_of_a_team_must_make_the_same_collective(one: str, other: str, differ: str) -> None:
    statements = ONE_SIDE.format(one, other)
    if "allgather" in one:
        statements = "%g = alloc f32[6, 3]\n%h2 = alloc f32[2, 9]\n" + statements
    params = "inout %a: f32[4], inout %h: f32[3], inout %k: i32[4], %m: f32[2, 3]"
    d = only(body(statements, params=params), 3, "mismatch")
    assert d.message.endswith(f": {differ}")
    assert d.ranks == (0, 1)
    assert set(d.statements) == {one, other}


@pytest.mark.parametrize("same", ["%a <- allreduce(%a)", "barrier()", "%a <- allreduce(%a) on s[2]", "%a <- broadcast(%x from 1)"])
def test_the_same_collective_in_two_branches_is_one_collective(same: str) -> None:
    assert found(body(ONE_SIDE.format(same, same)), 3) == ()


def test_the_number_of_the_collective_that_differs_is_told() -> None:
    d = only(body("%a <- allreduce(%a)\n" + ONE_SIDE.format("%a <- allreduce(%a max)", "%a <- allreduce(%a)")), 2, "mismatch")
    assert "number 2" in d.message


def test_a_root_that_depends_on_the_rank_is_caught_and_one_that_does_not_is_fine() -> None:
    d = only(body("%a <- broadcast(%x from rank(tp))"), 3, "mismatch")
    assert "root" in d.message
    assert found(body("%a <- broadcast(%x from size(tp) - 1)"), 3) == ()
    assert found(body("%a <- broadcast(%x from rank(dp)) over tp", mesh="dp = 2, tp = 2")) == ()
    only(body("%a <- broadcast(%x from rank(tp)) over tp", mesh="dp = 2, tp = 2"), None, "mismatch")


@pytest.mark.parametrize(("to", "source", "good"), [(NEXT, PREVIOUS, True), (NEXT, NEXT, False), ("0", "0", False), ("rank(tp)", "rank(tp)", True)])
def test_to_and_from_of_a_permute_must_mirror(to: str, source: str, good: bool) -> None:
    text = body(f"%a <- permute(%x to {to} from {source})")
    if good:
        assert found(text, 3) == ()
    else:
        assert "mirror" in only(text, 3, "mismatch").message


def test_a_permutation_with_oneself_in_it() -> None:
    text = body("if rank(tp) == 0 { %a <- permute(%x to 0 from 0) } else { %a <- permute(%x to 3 - rank(tp) from 3 - rank(tp)) }")
    assert found(text, 3) == ()


def test_counts_of_an_alltoallv_must_match() -> None:
    d = only(changed(SHARES, "send [4, 2] recv [4, 2]", "send [4, 2] recv [3, 3]"), None, "mismatch")
    assert d.ranks == (0, 1)
    assert "rows" in str(d)


def test_a_message_must_be_received_as_what_it_is() -> None:
    text = body("if rank(tp) == 0 { send(%x to 1) } else { %h <- recv(from 0) }", params="%x: f32[4], inout %h: f32[3], inout %a: f32[4]")
    d = only(text, 2, "mismatch")
    assert "f32[4]" in d.message
    assert "f32[3]" in d.message
    assert found(changed(text, "%h <-", "%a <-"), 2) == ()


def test_a_rank_outside_the_team_is_caught_unless_it_does_not_get_there() -> None:
    d = only(body("%a <- allreduce(%a) over [0, 2]"), 3, "mismatch")
    assert d.ranks == (1,)
    assert found(body("if rank(tp) != 1 { %a <- allreduce(%a) over [0, 2] }"), 3) == ()
    assert found(body("%a <- allreduce(%a) over [0, 2, 1]"), 3) == ()


def test_teams_with_the_same_members_are_one_team() -> None:
    assert found(body(ONE_SIDE.format("%a <- allreduce(%a) over tp", "%a <- allreduce(%a) over [0, 1, 2]")), 3) == ()


def test_an_order_of_two_teams_that_all_ranks_follow_is_fine() -> None:
    assert found(body("%a <- allreduce(%a) over dp on s\n%b <- allreduce(%b) over tp on t", mesh="dp = 2, tp = 3")) == ()


# ------------------------------------------------------------------------------------------------------------------- deadlock


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("streams", [("", ""), (" on s", " on s"), (" on s", " on t")])
def test_all_send_first_is_a_deadlock_whatever_the_streams(size: int, streams: tuple[str, str]) -> None:
    text = body(f"send(%x to {NEXT}){streams[0]}\n%a <- recv(from {PREVIOUS}){streams[1]}")
    d = only(text, size, "deadlock")
    circle = " -> ".join(map(str, [*range(size), 0]))
    assert circle in d.message
    assert d.ranks == tuple(range(size))
    assert d.statements[0].startswith("send(%x")
    assert "group" in (d.cure or "")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_same_in_a_group_ends(size: int) -> None:
    assert found(EXCHANGE, size) == ()


def test_a_group_of_three_hundred_messages_ends_and_a_lopsided_one_does_not() -> None:
    num = 150
    views = "\n".join(f"%v{i} = view %y[{i}]" for i in range(num))
    sends = "\n".join(f"send(%x to (rank(tp) + {i % 2 + 1}) % size(tp))" for i in range(num))
    recvs = [f"%v{i} <- recv(from (rank(tp) - {i % 2 + 1}) % size(tp))" for i in range(num)]

    def text(lines: list[str]) -> str:
        return body(f"%y = alloc f32[{num}, 4]\n{views}\ngroup {{\n{sends}\n" + "\n".join(lines) + "\n}")

    assert found(text(recvs[::-1]), 3) == ()
    lopsided = [*recvs[:-1], f"%v{num - 1} <- recv(from (rank(tp) - 1) % size(tp))"]
    d = only(text(lopsided), 3, "deadlock")
    assert d.ranks == (0, 1, 2)


def test_one_side_that_receives_first_breaks_the_circle() -> None:
    text = body(ONE_SIDE.format(f"send(%x to {NEXT}) %a <- recv(from {PREVIOUS})", f"%a <- recv(from {PREVIOUS}) send(%x to {NEXT})"))
    assert found(text, 3) == ()


@pytest.mark.parametrize("size", [1, 3])
def test_a_message_to_oneself_is_a_copy(size: int) -> None:
    assert found(body("send(%x to rank(tp))\n%a <- recv(from rank(tp))"), size) == ()
    assert found(body(f"%a <- permute(%x to {NEXT} from {PREVIOUS})"), size) == ()
    assert only(body("send(%x to rank(tp))"), size, "mismatch").ranks[0] == 0
    assert only(body("%a <- recv(from rank(tp))\nsend(%x to rank(tp))"), size, "deadlock")


TWO_TEAMS = """
  if {} {{
    %a <- alltoall(%x) over dx on s
    %b <- allreduce(%b) over dy on t
  }} else {{
    %b <- allreduce(%b) over dy on t
    %a <- alltoall(%x) over dx on s
  }}"""


def test_two_teams_in_different_orders_are_a_circle_also_on_different_streams() -> None:
    d = only(body(TWO_TEAMS.format("rank(dx) == rank(dy)"), mesh="dx = 2, dy = 2"), None, "deadlock")
    assert set(d.ranks) == {0, 1, 2, 3}
    assert {"%a <- alltoall(%x) over dx on s", "%b <- allreduce(%b) over dy on t"} <= set(d.statements)
    assert "different streams" in str(d)
    assert "one order" in (d.cure or "")
    assert found(body(TWO_TEAMS.format("0 == 0"), mesh="dx = 2, dy = 2")) == ()


def test_two_rank_lists_in_different_orders() -> None:
    text = body("""
      if rank(tp) == 0 { %a <- allreduce(%a) over [0, 1] on s %b <- allreduce(%b) over [1, 0] on t }
      if rank(tp) == 1 { %b <- allreduce(%b) over [1, 0] on t %a <- allreduce(%a) over [0, 1] on s }""")
    only(text, 2, "deadlock")


def test_a_collective_that_one_member_never_reaches() -> None:
    d = only(body("if rank(tp) != 2 { %a <- allreduce(%a) }"), 4, "deadlock")
    assert d.ranks == (0, 1, 3)
    assert "rank 2, which ended without it" in d.message
    d = only(body("for %i in 0 .. 3 - rank(tp) { %a <- allreduce(%a) }"), 2, "deadlock")
    assert d.indices[0] == {"i": 2}
    assert "came from" in str(d)


def test_a_message_that_nobody_receives_and_one_that_nobody_sends() -> None:
    assert only(body("if rank(tp) == 0 { send(%x to 1) }"), 2, "deadlock").ranks == (0,)
    assert only(body("if rank(tp) == 0 { %a <- recv(from 1) }"), 2, "deadlock").ranks == (0,)


def test_the_report_says_where_each_rank_stands_with_its_trip() -> None:
    text = changed(MESSAGES, "%y <- recv(from rank(pp) - 1)", "for %k in 0 .. rank(pp) { %y <- recv(from rank(pp) - 1) }")
    d = only(text, 3, "deadlock")
    assert d.ranks == (2,)
    assert d.indices == ({"k": 1},)
    assert d.statements[0].startswith("%y <- recv")


def test_a_mismatch_is_not_reported_again_as_what_follows_from_it() -> None:
    d = only(body(ONE_SIDE.format("%a <- allreduce(%a max)", "%a <- allreduce(%a)\n%a <- allreduce(%a)")), 2, "mismatch")
    assert d.ranks == (0, 1)


def test_ranks_alike_are_folded_into_one_finding() -> None:
    d = only(changed(RING, "rank(tp) + 3", "rank(tp) + 2"), None, "mismatch")
    assert d.count >= 1


def test_a_pipeline_of_any_length_is_fine() -> None:
    for size in (1, 2, 5):
        assert found(MESSAGES, size) == ()


def test_ranks_that_wait_in_a_row_and_in_no_circle_are_reported_too() -> None:
    (d,) = [d for d in found(changed(MESSAGES, "%y <- recv(from rank(pp) - 1)", ""), 4) if d.kind == "deadlock"]
    assert d.ranks == (0, 1, 2)
    assert "which ended without it" in d.message
    assert found(changed(MESSAGES, "recv(from rank(pp) - 1)", "recv(from (rank(pp) + 1) % size(pp))"), 4)
