"""The same script under torchrun, mpirun, ``hostir run`` and by itself: places, results, failures, quiet exits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hostir.errors import InputError, RankError, UnsupportedError
from hostir.launch import run_script
from tests.dist.test_spawn import is_alive, wait_until

SCRIPT = """
import os, sys, time
import torch
import hostir as hir
from hostir.runtime.comms.protocol import CommCall

mode = sys.argv[1]

def main(world):
    team = tuple(range(world.size))
    x = torch.full((2,), float(world.rank + 1))
    world.comms.issue(CommCall("allreduce", team, (x,), (x,))).wait()
    print(f"rank {world.rank} of {world.size} local {world.local_rank} has {x[0]:g}")
    if mode == "raise" and world.rank == 1:
        raise ValueError("one is wrong")
    if mode == "exit" and world.rank == 1:
        os._exit(7)
    if mode == "sleep":
        open(f"{sys.argv[2]}/pid{world.rank}", "w").write(str(os.getpid()))
        time.sleep(100)
    world.comms.issue(CommCall("barrier", team)).wait()

with hir.launch.init(timeout=20) as world:
    main(world)
if mode == "again":
    with hir.launch.init(timeout=20) as world:
        main(world)
    world = hir.launch.init(timeout=20)
    main(world)
    if world.rank == 0:  # the others leave it open
        world.close()
        world.close()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        clean.pop(name, None)
    root = str(Path(__file__).parents[2])
    return clean | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, env=environment())


def launcher(name: str) -> list[str]:
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    pytest.importorskip("mpi4py")
    if found is None:
        pytest.skip("there is no mpirun")
    return [found, "-n", "2", sys.executable]


launchers = pytest.mark.parametrize("name", ["torchrun", "mpirun"])


@launchers
def test_a_script_runs_and_ends_quietly_also_where_a_world_stays_open(name: str, script: str) -> None:
    done = run([*launcher(name), script, "again"])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert done.stdout.count(f"rank {rank} of 2 local {rank} has 3") == 3
    assert [line for line in done.stderr.splitlines() if line.strip()] == []


@launchers
def test_an_exception_on_one_rank_ends_the_job_and_is_shown_once(name: str, script: str) -> None:
    start = time.monotonic()
    done = run([*launcher(name), script, "raise"])
    assert time.monotonic() - start < 60  # the timeout of a communication alone is 20 s, that of the launcher's tests 100 s
    assert done.returncode != 0
    assert done.stderr.count('raise ValueError("one is wrong")') == 1


def test_a_script_runs_alone(script: str) -> None:
    done = run([sys.executable, script, "again"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 of 1 local 0 has 1\n" * 3, "")


# ------------------------------------------------------------------------------------------------------------------ hostir run


@pytest.mark.parametrize("transport", ["gloo", "threads"])
def test_run_prefixes_each_line_with_its_rank(transport: str, script: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_script(3, [script, "plain"], transport)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[{r}] rank {r} of 3 local {r} has 6" for r in range(3)]
    assert err == ""


@pytest.mark.parametrize("transport", ["gloo", "threads"])
def test_run_reports_the_rank_that_failed_first(transport: str, script: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError) as caught:
        run_script(3, [script, "raise"], transport)
    assert caught.value.message == "rank 1: ValueError: one is wrong"
    assert sorted(caught.value.ranks) == [0, 1, 2]
    assert caught.value.ranks[0].startswith(("PeerError: rank 1 failed", "hostir.errors.PeerError: rank 1 failed"))
    if transport == "gloo":
        assert '[1]     raise ValueError("one is wrong")' in capfd.readouterr().err


def test_run_names_a_process_that_died(script: str) -> None:
    with pytest.raises(RankError, match=r"^rank 1 exited with code 7"):
        run_script(2, [script, "exit"])


def test_run_ends_its_ranks_when_it_is_ended(script: str, tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    jobs = []
    try:
        for number in numbers:
            folder = tmp_path / number.name
            folder.mkdir()
            code = f"import hostir.launch as l; l.run_script(2, [{script!r}, 'sleep', {str(folder)!r}])"
            quiet = subprocess.DEVNULL
            process = subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=quiet, stderr=quiet)
            jobs.append((number, process, [folder / "pid0", folder / "pid1"]))
        for number, process, files in jobs:
            assert wait_until(lambda files=files: all(f.exists() and f.read_text() for f in files), 90)
            pids = [int(f.read_text()) for f in files]
            process.send_signal(number)
            assert wait_until(lambda pids=pids: not any(map(is_alive, pids)), 20), number
            assert process.wait(20) != 0
    finally:
        for _, process, _ in jobs:
            process.kill()
            process.wait()


def test_run_refuses_what_it_cannot_run(script: str) -> None:
    with pytest.raises(InputError, match="no script"):
        run_script(2, ["missing.py"])
    with pytest.raises(InputError, match="nothing to run"):
        run_script(2, [])
    with pytest.raises(InputError, match="at least one rank"):
        run_script(0, [script])
    with pytest.raises(UnsupportedError, match="pigeons"):
        run_script(2, [script], "pigeons")
