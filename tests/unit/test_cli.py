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


def test_demo_checks_itself_and_tells_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("demo", "-n", "2", "--transport", "threads", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fine"] is True
    assert {row["rank"] for row in report["results"]} == {0, 1}


def test_python_m_hostir_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "hostir", "--version"], cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True)
    assert run.stdout.startswith("hostir ")
