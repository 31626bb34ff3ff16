"""One script under torchrun, ``hostir run`` and by itself: places, results, failures, quiet exits, and no process that is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hostir.errors import InputError, RankError, UnsupportedError
from hostir.launch import run_script
from tests.dist.jobs import SCRIPT, environment, launcher, run
from tests.dist.test_spawn import is_alive, wait_until


def test_torchrun_runs_a_script_and_it_ends_quietly_also_where_a_world_stays_open() -> None:
    done = run([*launcher("torchrun", 2), SCRIPT, "again"])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert done.stdout.count(f"rank {rank} of 2 local {rank} has 3") == 3
    assert [line for line in done.stderr.splitlines() if line.strip()] == []


def test_torchrun_ends_and_shows_an_exception_once_with_its_rank() -> None:
    done = run([*launcher("torchrun", 2), SCRIPT, "raise"])
    assert done.returncode != 0
    assert done.stderr.count('raise ValueError("one is wrong")') == 1
    assert "[rank1]: ValueError: one is wrong" in done.stderr


def test_a_script_runs_alone() -> None:
    done = run([sys.executable, SCRIPT, "again"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 of 1 local 0 has 1\n" * 3, "")


# ------------------------------------------------------------------------------------------------------------------ hostir run


@pytest.mark.parametrize("transport", ["gloo", "threads"])
def test_run_reports_the_rank_that_failed_first(transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError) as caught:
        run_script(3, [SCRIPT, "raise"], transport)
    assert caught.value.message == "rank 1: ValueError: one is wrong"
    assert sorted(caught.value.ranks) == [0, 1, 2]
    assert caught.value.ranks[0].startswith(("PeerError: rank 1 failed", "hostir.errors.PeerError: rank 1 failed"))
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[{r}] rank {r} of 3 local {r} has 6" for r in range(3)], "each line has its rank"
    if transport == "gloo":
        assert '[1]     raise ValueError("one is wrong")' in err


def test_run_is_quiet_where_nothing_fails(capfd: pytest.CaptureFixture[str]) -> None:
    run_script(2, [SCRIPT, "again"], "gloo")
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(f"[{r}] rank {r} of 2 local {r} has 3" for r in range(2) for _ in range(3))
    assert err == ""


def test_run_names_a_process_that_died() -> None:
    with pytest.raises(RankError, match=r"^rank 1 exited with code 7"):
        run_script(2, [SCRIPT, "exit"])


def test_run_refuses_what_it_cannot_run() -> None:
    with pytest.raises(InputError, match="no script"):
        run_script(2, ["missing.py"])
    with pytest.raises(InputError, match="nothing to run"):
        run_script(2, [])
    with pytest.raises(InputError, match="at least one rank"):
        run_script(0, [SCRIPT])
    with pytest.raises(UnsupportedError, match="pigeons"):
        run_script(2, [SCRIPT], "pigeons")


# ---------------------------------------------------------------------------------------------------------------------- ending


def test_ranks_end_when_their_launcher_is_ended(tmp_path: Path) -> None:
    """All jobs at once: it is the waiting that takes time."""
    commands = {number.name: (number, 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}
    jobs = []
    try:
        for name, (number, num_ranks) in {**commands, "torchrun": (signal.SIGTERM, 2), "run": (signal.SIGTERM, 2)}.items():
            folder = tmp_path / name
            folder.mkdir()
            code = f"import hostir.launch as l; l.run_script({num_ranks}, [{SCRIPT!r}, 'sleep', {str(folder)!r}])"
            command = [*launcher("torchrun", num_ranks), SCRIPT, "sleep", str(folder)] if name == "torchrun" else [sys.executable, "-c", code]
            process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            jobs.append((name, number, process, [folder / f"pid{r}" for r in range(num_ranks)]))
        for name, number, process, files in jobs:
            assert wait_until(lambda files=files: all(f.exists() and f.read_text() for f in files), 90), name
            pids = [int(f.read_text()) for f in files]
            process.send_signal(number)
            assert wait_until(lambda pids=pids: not any(map(is_alive, pids)), 40), name
            assert process.wait(40) != 0
    finally:
        for _, _, process, _ in jobs:
            process.kill()
            process.wait()
