"""The command line: what it prints, and exit codes that scripts can rely on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hostir.cli import main
from hostir.doctor import Check, checks
from hostir.doctor import main as doctor

PROGRAM = """# hostir 1
program @twice(%x: f32[4]) {
  %y = alloc f32[4]
  %y <- copy(%x)
  return %y
}
"""


def exit_code(*arguments: str) -> int:
    """The exit code of one command; argparse leaves through SystemExit."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


WRONG = [(), ("nonsense",), ("show",), ("show", "--nonsense", "x"), ("run", "s.py"), ("run", "-n", "0", "s.py"), ("demo", "--transport", "smoke")]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_use_is_2_and_shows_the_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 2
    assert "usage: hostir" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("show", str(tmp_path / "missing.hir")) == 2
    assert "missing.hir cannot be read" in capsys.readouterr().err


def test_show_prints_the_canonical_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "twice.hir"
    file.write_text(PROGRAM.replace("# hostir 1\n", "").replace("  ", "      "))
    assert exit_code("show", str(file)) == 0
    assert capsys.readouterr().out == PROGRAM
    assert exit_code("show", "--quiet", str(file)) == 0
    assert capsys.readouterr().out == ""


def test_show_says_where_the_text_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.hir"
    file.write_text(PROGRAM.replace("alloc", "allok"))
    assert exit_code("show", str(file)) == 1
    assert f"{file}:3:" in capsys.readouterr().err


def test_doctor_says_the_same_to_people_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {row["name"] for row in report["checks"]} >= {"python", "torch", "triton", "numpy", "gloo", "NCCL", "mpi4py"}
    assert exit_code("doctor") == 0
    text = capsys.readouterr().out
    assert all(row["name"] in text for row in report["checks"])


def test_everything_that_is_missing_has_a_cure() -> None:
    assert all(row.cure for row in checks() if not row.ok)


def test_doctor_fails_only_for_what_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Check("torch", True, True, "2.13"), Check("mpi4py", False, False, "not installed", "install it")]
    monkeypatch.setattr("hostir.doctor.checks", lambda: iter(rows))
    assert doctor() == 0
    rows.append(Check("triton", False, True, "3.4", "install a later one"))
    assert doctor() == 1
    assert "install a later one" in capsys.readouterr().out


SCRIPT = """
import sys
import hostir as hir
with hir.launch.init() as world:
    assert world.size == 2 and sys.argv[1:] == ["--quiet", "-n"]
    if world.rank == 1 and {fails}:
        raise RuntimeError("broken on purpose")
    print("here")
"""


def test_run_gives_every_rank_its_world_and_the_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(fails=False))
    assert exit_code("run", "-n", "2", "--transport", "threads", str(file), "--quiet", "-n") == 0
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "[0] here", "[1] here"]


def test_run_is_1_when_a_rank_fails_and_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(fails=True))
    assert exit_code("run", "-n", "2", "--transport", "threads", str(file), "--quiet", "-n") == 1
    assert "rank 1: RuntimeError: broken on purpose" in capsys.readouterr().err


def test_run_without_its_script_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("run", "-n", "2", str(tmp_path / "missing.py")) == 2
    assert "there is no script" in capsys.readouterr().err


def test_demo_checks_itself_and_tells_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("demo", "-n", "2", "--transport", "threads", "--json", "--out", str(tmp_path / "out")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fine"] is True
    assert {row["rank"] for row in report["results"]} == {0, 1}
    assert report["overlap"].keys() == {"overlapped", "in order"}
    assert all(0 <= m["exposed_ms"] <= m["communication_ms"] and m["ms"] > 0 for m in report["overlap"].values())
    assert {(row["executor"], row["mode"]) for row in report["host_sum"]} >= {("ExprEval", "checked"), ("ExprEval", "compiled")}
    assert all(row["exact"] or row["refusal"] for row in report["host_sum"])
    assert all(row["exact"] for row in report["host_sum"] if row["executor"] == "ExprEval")
    trace = json.loads(Path(report["files"]["trace"]).read_text())["traceEvents"]
    assert Path(report["files"]["trace"]).parent == tmp_path / "out"
    named = {row["args"]["name"] for row in trace if row["name"] == "process_name"}
    assert named == {f"{schedule}, rank {rank}" for schedule in ("overlapped", "in order") for rank in range(2)}


SIMULATED = """unit @double(%a: f32[n]) {
  %t = add(%a, %a)
  return %t
}
program @rows(%x: f32[n]) mesh(dp, tp) {
  %y = alloc f32[n]
  %y <- @double(%x)
  %y <- allreduce(%y) over tp
  return %y
}
"""


def test_simulate_tells_people_and_machines_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.hir"
    file.write_text(SIMULATED)
    sizes = (str(file), "--mesh", "2x4", "--dim", "n=1000000")
    assert exit_code("simulate", *sizes, "--trace", str(tmp_path / "t.json")) == 0
    text = capsys.readouterr().out
    assert "@rows on h200, ranks 0 .. 7" in text
    assert "the critical path:" in text
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert exit_code("simulate", str(file), "--mesh", "dp=2,tp=4", "--dim", "n=1000000", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_ranks"] == 8
    assert exit_code("simulate", *sizes, "--machine", "h100", "--overlap", "off", "--quiet") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "2x2x2", "--dim", "n=4"), "the mesh 2x2x2 has 3 axes"),
        (("--mesh", "2x2",), "the size n has no value"),
        (("--dim", "n=4",), "the size of mesh axis 'dp' is not known"),
        (("--mesh", "2x2", "--dim", "n=4", "--machine", "abacus"), "there is no machine 'abacus'"),
    ],
)  # fmt: skip
def test_simulate_says_what_is_missing(arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.hir").write_text(SIMULATED)
    assert exit_code("simulate", str(tmp_path / "rows.hir"), *arguments) == 2
    assert message in capsys.readouterr().err


def test_simulate_does_not_write_where_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.hir").write_text(SIMULATED)
    where = str(tmp_path / "missing" / "t.json")
    assert exit_code("simulate", str(tmp_path / "rows.hir"), "--mesh", "2x2", "--dim", "n=4", "--trace", where) == 2
    assert "t.json" in capsys.readouterr().err


def test_python_m_hostir_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "hostir", "--version"], cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True)
    assert run.stdout.startswith("hostir ")
