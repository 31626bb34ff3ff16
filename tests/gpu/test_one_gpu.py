"""The private MPS daemon: it serves the ranks of one call, and nothing of it is left, however the call ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from hostir.launch import World, mps, spawn
from tests.gpu.test_symm import needs_mps

pytestmark = [needs_mps, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]


def daemons() -> set[int]:
    """Processes of MPS daemons that were started here."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            if b"nvidia-cuda-mps" in line and b"hostir" not in line.split(b" ")[0]:
                found.add(int(folder.name))
    return found


def folders() -> set[str]:
    import tempfile

    return {str(p) for p in Path(tempfile.gettempdir()).glob("hostir-mps-*")}


def gone(before: set[int]) -> bool:
    deadline = time.monotonic() + 15
    while daemons() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    return not daemons() - before


def facts(world: World) -> tuple[str, str, float, int]:
    x = torch.ones(8, device=world.device) * (world.rank + 1)
    return world.backend, str(world.device), float(x.sum()), torch.cuda.get_device_properties(0).multi_processor_count


def test_ranks_share_the_gpu_and_nothing_is_left() -> None:
    before, files = daemons(), folders()
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    results = spawn(facts, 4, one_gpu=True)
    assert [r[:3] for r in results] == [("symm", "cuda:0", 8.0 * (rank + 1)) for rank in range(4)]
    assert all(r[3] <= whole // 2 for r in results), "each rank has a share of the multiprocessors"
    assert gone(before)
    assert folders() == files


def test_nothing_is_left_after_a_failure() -> None:
    before, files = daemons(), folders()

    def body(world: World) -> None:
        torch.ones(1, device=world.device)
        raise ValueError(f"rank {world.rank} on purpose")

    with pytest.raises(Exception, match="on purpose"):
        spawn(body, 2, one_gpu=True)
    assert gone(before)
    assert folders() == files


SCRIPT = """
import sys, time, torch
import hostir as hir
from hostir.runtime.comms.protocol import CommCall

with hir.launch.init() as world:
    x = torch.ones(4, device=world.device) * (world.rank + 1)
    world.comms.issue(CommCall("allreduce", tuple(range(world.size)), (x,), (x,))).wait()
    print(world.backend, world.device, x.tolist(), flush=True)
    if "sleep" in sys.argv:
        time.sleep(120)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "hostir", "run", "-n", "2", "--one-gpu", str(script), *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_hostir_run_gives_a_script_the_transport_and_the_device(tmp_path: Path) -> None:
    before, files = daemons(), folders()
    process = start(tmp_path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert sorted(line for line in out.splitlines() if "symm" in line) == [f"[{r}] symm cuda:0 [3.0, 3.0, 3.0, 3.0]" for r in range(2)], out
    assert gone(before)
    assert folders() == files


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_takes_its_daemon_along(tmp_path: Path, number: signal.Signals) -> None:
    before, files = daemons(), folders()
    process = start(tmp_path, "sleep")
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen += "symm" in line
        if seen == 2:
            break
    assert daemons() - before, "the daemon runs"
    process.send_signal(number)
    process.wait(60)
    assert gone(before)
    deadline = time.monotonic() + 10
    while folders() != files and time.monotonic() < deadline:
        time.sleep(0.1)
    assert folders() == files


def test_the_share_of_the_multiprocessors_is_in_the_environment() -> None:
    def body(_world: World) -> tuple[str, str]:
        return os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]

    assert spawn(body, 3, one_gpu=True) == [("33", "1")] * 3
    assert not mps.is_one_gpu()
