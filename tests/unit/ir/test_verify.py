"""All checks together: right programs pass, each mistake is one finding with its statement, ranks and cure, and sizes are asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hostir as hir
from hostir.cli import main
from hostir.ir.diagnostics import Diagnostic
from hostir.ir.nodes import Comm, Program, rewrite
from hostir.ir.verify import Report, verify
from hostir.mesh import Mesh
from tests.unit.ir.right_programs import RIGHT, RING, ROOTED, UNEVEN, UNITS, changed, program, without


def found(text: str, mesh: Any = None, **options: Any) -> tuple[Diagnostic, ...]:
    return verify(program(text), mesh, check=False, **options).diagnostics


def only(text: str, kind: str, mesh: Any = None, **options: Any) -> Diagnostic:
    (d,) = found(text, mesh, **options)
    assert d.kind == kind, str(d)
    assert len(str(d).splitlines()) < 15
    return d


def body(statements: str, params: str = "%x: f32[4]", mesh: str = "") -> str:
    return f"program @p({params}){mesh} {{\n{statements}\n}}"


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_accepted(name: str) -> None:
    text, mesh, dims = RIGHT[name]
    report = verify(program(text), mesh, dims=dims)
    assert report.ok
    assert str(report).startswith("@")


@pytest.mark.parametrize("line", ["    sync comm -> main\n", "    sync main -> comm\n"])
def test_a_finding_raises_with_all_diagnostics(line: str) -> None:
    p = program(without(RING, line))
    with pytest.raises(hir.VerifyError, match="not right on 4 ranks") as caught:
        verify(p)
    assert [d.kind for d in caught.value.diagnostics] == [d.kind for d in verify(p, check=False).diagnostics]
    assert "permute" in str(caught.value)


def test_a_finding_on_many_ranks_is_one() -> None:
    d = only(without(RING, "    sync comm -> main\n"), "race")
    assert d.ranks == (0, 1, 2, 3)
    assert "ranks 0 .. 3" in str(d)


# ------------------------------------------------------------------------------------------------------- what is read was written


@pytest.mark.parametrize(
    ("statements", "element"),
    [
        ("%y = alloc f32[4]\nreturn %y", "%y[0]"),
        ("%y = alloc f32[4]\n%a = view %y[0 : 3]\n%b = view %x[0 : 3]\n%a <- copy(%b)\nreturn %y", "%y[3]"),
        ("%y = alloc f32[4]\n%z = alloc f32[4]\n%z <- @double(%y)\nreturn %z", "%y[0]"),
        ("%y = alloc f32[4]\n%y <- @add_to(%y, %x)\nreturn %y", "%y[0]"),
        ("%y = alloc f32[3, 4]\n%a = view %y[0]\n%b = view %y[2]\n%a <- copy(%x)\n%b <- copy(%x)\nreturn %y", "%y[1, 0]"),
        ("%y = alloc f32[4, 4]\n%c = view %y[:, 1]\n%c <- copy(%x)\n%d = view %y.T[1]\nreturn %c", None),
        ("for %i in 0 .. 2 {\n%y = alloc f32[4]\nif %i == 0 { %y <- copy(%x) }\n%z = alloc f32[4]\n%z <- copy(%y)\n}", "%y[0]"),
    ],
)
def test_what_is_read_was_written(statements: str, element: str | None) -> None:
    text = body(statements).replace("%y.T[1]", "%y.T")
    unit = "unit @add_to(%a: f32[4], %b: f32[4]) {\n  %t = add(%a, %b)\n  return %t\n}\n"
    if element is None:
        assert found(unit + text) == ()
    else:
        d = only(unit + text, "unwritten")
        assert element in d.message
        assert d.cure
        assert found(unit + text.replace("alloc f32", "zeros f32")) == ()


def test_an_output_that_only_the_root_has_is_not_written_elsewhere() -> None:
    text = body("%y = alloc f32[4]\n%y <- reduce(%x to 1)\nreturn %y", mesh=" mesh(tp = 3)")
    d = only(text, "unwritten")
    assert "output %y" in d.message
    assert d.ranks == (0, 2)
    assert found(changed(text, "alloc", "zeros")) == ()
    assert found(changed(ROOTED, "%sum = zeros", "%sum = alloc"), 3) == ()  # every rank is the root of one trip


def test_a_rank_that_skips_a_write_is_named() -> None:
    text = body("%y = alloc f32[4]\nif rank(tp) != 1 { %y <- copy(%x) }\nreturn %y", mesh=" mesh(tp = 3)")
    assert only(text, "unwritten").ranks == (1,)


def test_parts_that_each_rank_writes_elsewhere_are_counted_on_each() -> None:
    text = """
      program @p(%x: f32[4]) mesh(tp = 4) {
        %y = alloc f32[4, 4]
        for %j in 0 .. TRIPS {
          %v = view %y[(rank(tp) + %j) % 4]
          %v <- copy(%x)
        }
        return %y
      }"""
    assert found(text.replace("TRIPS", "4")) == ()
    d = only(text.replace("TRIPS", "3"), "unwritten")
    assert d.ranks == (0, 1, 2, 3)
    assert "%y[3, 0]" in d.message


@pytest.mark.parametrize("zero", ["f32[0]", "f32[0, 4]"])
def test_what_has_no_elements_needs_no_writing(zero: str) -> None:
    assert found(body(f"%y = alloc {zero}\nreturn %y")) == ()


# ------------------------------------------------------------------------------------------------------------------- lifetimes


@pytest.mark.parametrize(
    ("statements", "what"),
    [
        ("for %i in 0 .. 2 { %z <- copy(%x) if %i == 0 { free %z } }", "used after"),
        ("for %i in 0 .. 2 { free %z }", "freed twice"),
        ("if rank(tp) == 0 { free %z }\nfor %i in rank(tp) .. 1 { for %j in 0 .. 2 { } }", None),
    ],
)
def test_nothing_is_used_or_freed_after_its_end(statements: str, what: str | None) -> None:
    text = body(f"%z = alloc f32[4]\n%z <- copy(%x)\n{statements}", mesh=" mesh(tp = 2)")
    if what is None:
        assert found(text) == ()
    else:
        d = only(text, "lifetime")
        assert what in d.message
        assert d.statements[0] == "free %z"


def test_a_buffer_that_is_never_freed_is_fine_and_one_freed_in_its_trip_too() -> None:
    assert found(body("for %i in 0 .. 3 { %t = alloc f32[4] %t <- copy(%x) free %t }")) == ()


# -------------------------------------------------------------------------------------------------------------- index and size


def test_an_index_past_the_end_names_the_trip_the_range_and_the_cure() -> None:
    d = only(changed(RING, "view %w[(rank(tp) - %i) % 4]", "view %w[rank(tp) + %i]"), "index")
    assert d.ranks == (1, 2, 3)
    assert d.indices == ({"i": 3},)
    assert d.statements == ("%wi = view %w[rank(tp) + %i]",)
    assert "expected: 0 .. 3" in str(d)
    assert d.cure


def test_an_index_that_is_not_reached_is_fine() -> None:
    assert found(body("for %i in 0 .. 4 { if %i < 3 { %v = view %x[%i + 1] } }")) == ()
    only(body("for %i in 0 .. 4 { %v = view %x[%i + 1] }"), "index")


@pytest.mark.parametrize(
    ("statements", "good", "bad"),
    [
        ("%y = alloc f32[m]\n%y <- copy(%x)", 4, None),
        ("%y = alloc f32[m // size(tp)]\n%y <- reduce_scatter(%x)", 6, 5),
        ("%y = alloc f32[m - 4]", 4, 3),
        ("%y = alloc f32[(m + 1) // 2]\n%z = view %x[0 : m // 2]\n%y <- @double(%z)", 4, 5),
    ],
)
def test_sizes_that_only_numbers_can_tell(statements: str, good: int, bad: int | None) -> None:
    text = body(statements, "%x: f32[m]", " mesh(tp = 2)")
    assert found(text, dims={"m": good}) == ()
    if bad is not None:
        d = only(text, "size", dims={"m": bad})
        assert d.ranks == (0, 1)


def test_an_ill_formed_program_is_one_finding() -> None:
    p = program(RING)

    def grow(s: Any) -> list[Any]:
        return [Comm("allgather", s.outs, s.ins, team=s.team, stream=s.stream, loc=s.loc)] if isinstance(s, Comm) and s.kind == "permute" else [s]

    (d,) = verify(p.with_(body=rewrite(p.body, grow)), check=False).diagnostics
    assert d.kind == "form"
    assert d.locs[0] is not None


# ------------------------------------------------------------------------------------------------------------- what must be given


@pytest.mark.parametrize(
    ("mesh", "dims", "cure"),
    [(None, {"m": 4}, "mesh="), (2, {}, 'dims={"m": …}'), (2, {"m": 4, "n": 2}, None), ({"dp": 2}, {"m": 4}, None)],
)
def test_missing_or_unknown_sizes_are_an_input_error_with_the_cure(mesh: Any, dims: Mapping[str, int], cure: str | None) -> None:
    with pytest.raises(hir.InputError) as caught:
        verify(program(UNEVEN), mesh, dims=dims)
    if cure is not None:
        assert cure in str(caught.value)


def test_host_numbers_are_given_by_name() -> None:
    p = program(body("%v = view %x[%k]", "%x: f32[4], %k: int"))
    assert verify(p, scalars={"k": 3}).ok
    assert not verify(p, scalars={"k": 4}, check=False).ok
    with pytest.raises(hir.InputError, match="scalars="):
        verify(p)
    with pytest.raises(hir.InputError, match="no host number"):
        verify(p, scalars={"k": 1, "j": 1})


@pytest.mark.parametrize("mesh", [3, {"tp": 3}, Mesh((3,), ("tp",)), Mesh((3,), ("tp",), ranks=(2, 0, 1))])
def test_a_mesh_is_a_number_a_dict_or_a_mesh(mesh: Any) -> None:
    assert verify(program(ROOTED), mesh).ranks == ((2, 0, 1) if isinstance(mesh, Mesh) and mesh.ranks else (0, 1, 2))


def test_a_program_over_rank_lists_needs_no_mesh() -> None:
    text = body("%y = zeros f32[4]\n%y <- allreduce(%x) over [0, 1, 2]\nreturn %y")
    assert verify(program(text)).ranks == (0, 1, 2)
    assert only(changed(text, "[0, 1, 2]", "[0, 2]"), "mismatch").ranks == (1,)


# ---------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("statements", "peak"),
    [
        ("", 0),
        ("%y = zeros f32[4]\nreturn %y", 16),
        ("%y = alloc f16[4]\n%z = alloc i64[]\nreturn %x", 8),
        ("%y = zeros f32[4]\n%z = zeros f32[4]\n%y <- copy(%z)\nreturn %y", 32),
        ("%y = zeros f32[4]\nfree %y\n%z = zeros f32[4]\nfree %z", 16),
        ("%y = zeros f32[4]\n%y <- copy(%x)\n%z = zeros f32[4]\n%z <- copy(%x)", 16),  # a pass frees %y at its last use
        ("%y = zeros f32[4]\n%z = zeros f32[4]\n%z <- copy(%x)\nfree %y\nfree %z", 32),
        ("for %i in 0 .. 100 { %t = alloc f32[4] %t <- copy(%x) }", 16),
        ("for %i in 0 .. 3 { %t = alloc f32[%i + 1] }", 12),
    ],
)
def test_the_peak_counts_what_is_alive(statements: str, peak: int) -> None:
    assert verify(program(body(statements))).peak_bytes == peak


@pytest.mark.parametrize(("num_streams", "copies"), [(1, 1), (2, 2), (3, 3)])
def test_trips_that_overlap_have_a_copy_each(num_streams: int, copies: int) -> None:
    statements = f"for %i in 0 .. 12 {{ %t = alloc f32[4] %t <- copy(%x) on s[%i % {num_streams}] }}"
    assert verify(program(body(statements))).peak_bytes == 16
    assert verify(program(body(statements, mesh=" scheduled"))).peak_bytes == 16 * copies


def test_the_peak_does_not_depend_on_the_number_of_trips() -> None:
    peaks = {verify(program(RING.replace("0 .. 4", f"0 .. {n}"))).peak_bytes for n in (1, 4, 50)}
    assert peaks == {(2 * 3 + 2 * 2 * 8) * 4}


# ----------------------------------------------------------------------------------------------------------------- many ranks


def long_program(num_statements: int) -> Program:
    lines = []
    for i in range(num_statements // 4):
        lines += [f"%b{i} = alloc f32[4]", f"%b{i} <- @double({'%x' if i == 0 else f'%c{i - 1}'})", f"%c{i} = alloc f32[4]"]
        lines.append(f"%c{i} <- allreduce(%b{i}) on comm")
    return program(body("\n".join([*lines, f"return %c{num_statements // 4 - 1}"]), mesh=" mesh(tp)"))


def test_ranks_that_do_the_same_are_walked_once() -> None:
    report = verify(long_program(1000), 64)
    assert (report.num_steps, report.num_walks, len(report.ranks)) == (1000, 1, 64)
    few, many = (verify(program(ROOTED), n) for n in (3, 30))
    assert few.num_walks == many.num_walks == 1


# --------------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.hir"
    path.write_text(UNITS + UNEVEN)
    return path


def test_the_command_checks_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(file), "--mesh", "2", "--dim", "m=7"]) == 0
    assert "@uneven is right on 2 ranks" in capsys.readouterr().out
    assert main(["verify", str(file), "--mesh", "tp=3", "--dim", "m=7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 3


def test_the_command_fails_with_the_findings(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(UNITS + without(RING, "    sync comm -> main\n"))
    assert main(["verify", str(file)]) == 1
    out = capsys.readouterr().out
    assert "race" in out
    assert "p.hir:" in out
    assert main(["verify", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["diagnostics"][0]["kind"] == "race"
    assert main(["verify", str(file), "--quiet"]) == 1
    assert capsys.readouterr().out == ""


def test_the_command_asks_for_sizes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(file), "--mesh", "2"]) == 2
    assert "dims=" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(file), "--dim", "m"])
    assert caught.value.code == 2


def test_a_report_is_a_value() -> None:
    report = verify(program(RING))
    assert isinstance(report, Report)
    assert report == verify(program(RING))


# -------------------------------------------------------------------------------------------------------------------- alltoallv

EXCHANGED = """program @exchanged(%x: f32[ROWS, 2]) mesh(tp = 2) {
  %y = NEW f32[ROWS, 2]
  %y <- alltoallv(%x send [1, 2] recv [1 + rank(tp), 1 + rank(tp)])
  %v = view %y[0 : LAST]
  %z = alloc f32[LAST, 2]
  %z <- copy(%v)
}"""


def exchanged(rows: int, last: int, new: str = "alloc") -> tuple[Diagnostic, ...]:
    text = EXCHANGED.replace("ROWS", str(rows)).replace("LAST", str(last)).replace("NEW", new)
    return verify(program(text), check=False).diagnostics


def test_an_alltoallv_needs_the_rows_that_it_counts() -> None:
    assert exchanged(4, 1) == ()
    (d,) = exchanged(3, 1)
    assert d.kind == "size"
    assert "receives 4 rows, and %y has 3" in d.message


def test_an_alltoallv_writes_the_rows_that_come_and_no_others() -> None:
    assert exchanged(4, 2) == ()
    (d,) = exchanged(4, 3)
    assert d.kind == "unwritten"
    assert d.ranks == (0,)  # rank 1 gets four rows
    assert exchanged(4, 3, "zeros") == ()
