"""``mpirun -n N python script.py``: ranks, an exception that ends the job, ranks that never come; skipped where there is no MPI."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.dist.jobs import SCRIPT, call_in_processes, environment, mpirun, run
from tests.dist.test_joining import join_and_reduce
from tests.dist.test_spawn import is_alive, wait_until


def test_a_script_runs_and_ends_quietly_also_where_a_world_stays_open() -> None:
    done = run([*mpirun(3), SCRIPT, "again"])
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert done.stdout.count(f"rank {rank} of 3 local {rank} has 6") == 3
    assert [line for line in done.stderr.splitlines() if line.strip()] == []


@pytest.mark.parametrize(("mode", "more"), [("raise", ()), ("later", ()), ("raise", ("-m", "mpi4py"))])
def test_an_exception_on_one_rank_ends_the_job_and_is_shown_once_with_its_rank(mode: str, more: tuple[str, ...]) -> None:
    """``later``: the other ranks wait for this one in their next ``init``."""
    done = run([*mpirun(3 if mode == "raise" else 2), *more, SCRIPT, mode])
    assert done.returncode != 0
    assert done.stderr.count("[rank1]: ValueError: one is wrong") == 1
    assert done.stderr.count('raise ValueError("one is wrong")') == 1
    assert "application called MPI_Abort" in done.stderr + done.stdout or "MPI_ABORT was invoked" in done.stderr + done.stdout


def test_ranks_do_not_wait_for_one_that_failed_before_it_came() -> None:
    """MPI itself would wait for it without limit."""
    done = run([*mpirun(2), SCRIPT, "before"])
    assert done.returncode != 0
    assert done.stderr.count('raise ValueError("one is wrong")') == 1


def test_ranks_do_not_wait_for_one_that_has_finished() -> None:
    done = run([*mpirun(2), SCRIPT, "leave"])
    assert done.returncode != 0
    assert "PeerError: rank 1 has finished" in done.stderr


def test_ranks_end_with_mpirun(tmp_path: Path) -> None:
    jobs = []
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            folder = tmp_path / number.name
            folder.mkdir()
            quiet = subprocess.DEVNULL
            process = subprocess.Popen([*mpirun(2), SCRIPT, "sleep", str(folder)], env=environment(), stdin=quiet, stdout=quiet, stderr=quiet)
            jobs.append((number, process, [folder / "pid0", folder / "pid1"]))
        for number, process, files in jobs:
            assert wait_until(lambda files=files: all(f.exists() and f.read_text() for f in files), 60)
            pids = [int(f.read_text()) for f in files]
            process.send_signal(number)
            assert wait_until(lambda pids=pids: not any(map(is_alive, pids)), 20), number
            process.wait(20)
    finally:
        for _, process, _ in jobs:
            process.kill()
            process.wait()


def test_variables_of_another_mpi_than_the_one_that_is_loaded_are_an_error() -> None:
    pytest.importorskip("mpi4py")
    ((kind, text),) = call_in_processes(join_and_reduce, [{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}], 5.0)
    assert kind == "error"
    assert text.startswith("InputError: mpi4py sees rank 0 of 1, but the launcher says rank 1 of 2"), text
    assert "different MPI libraries" in text
