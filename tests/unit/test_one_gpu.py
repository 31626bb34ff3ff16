"""Several ranks on one GPU, as far as it can be known without one: what the ranks get, which transport is chosen, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hostir import cli
from hostir.errors import InputError, UnsupportedError
from hostir.launch import mps, spawn
from hostir.launch.transport import choose
from hostir.runtime.comms.symm import slot_bytes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("num_ranks", "share"), [(1, "100"), (2, "50"), (3, "33"), (8, "12"), (48, "2")])
def test_ranks_get_equal_shares_and_leave_to_overlap(num_ranks: int, share: str) -> None:
    got = mps.environment(num_ranks, "/tmp/x")
    assert got["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == share
    assert got["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/x/pipe"
    assert got["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    assert (got["NCCL_NVLS_ENABLE"], got["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")


@pytest.fixture
def no_control(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mps, "FOLDERS", (str(tmp_path / "nowhere"),))


@pytest.mark.usefixtures("no_control")
def test_a_machine_without_mps_gets_the_cure_before_a_rank_starts() -> None:
    with pytest.raises(UnsupportedError, match="nvidia-cuda-mps-control, which is not on this machine") as caught:
        spawn(lambda world: None, 2, one_gpu=True)
    assert "NVIDIA_DRIVER_CAPABILITIES" in str(caught.value.cure)


@pytest.mark.usefixtures("no_control")
def test_the_command_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    assert cli.main(["run", "-n", "2", "--one-gpu", str(script)]) != 0
    out, err = capsys.readouterr()
    assert "nvidia-cuda-mps-control" in err
    assert "started" not in out


def test_threads_and_too_many_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="one_gpu is for ranks that are processes"):
        spawn(lambda world: None, 2, "threads", one_gpu=True)
    with pytest.raises(InputError, match="at most 48 ranks"), mps.share_gpu(49):
        pass


FAKE = """#!/bin/sh
# A control program that behaves as MPS's does: -f serves until somebody says quit; else a command is read from standard input.
if [ "$1" = -f ]; then
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
  while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
else
  read word && [ "$word" = quit ] && touch "$CUDA_MPS_PIPE_DIRECTORY/quit"
fi
"""


@pytest.fixture
def fake_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    control = tmp_path / mps.CONTROL
    control.write_text(FAKE)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return control


@pytest.mark.usefixtures("fake_control")
def test_the_daemon_lives_as_long_as_the_block_and_its_folder_goes() -> None:
    folders = []

    def use() -> None:
        with mps.share_gpu(2) as variables:
            folders.append(Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).parent)
            assert (folders[0] / "pipe" / "control").exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    (folder,) = folders
    assert not folder.exists()
    assert not running(folder)


@pytest.mark.usefixtures("fake_control")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_the_daemon_goes_with_the_process_that_started_it(number: str) -> None:
    code = """
        import sys, time
        from hostir.launch import mps
        with mps.share_gpu(2) as variables:
            print(variables["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
            time.sleep(60)
    """
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip()).parent
    assert running(folder)
    process.send_signal(getattr(__import__("signal"), number))
    process.wait(20)
    deadline = time.monotonic() + 10
    while (folder.exists() or running(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    assert not running(folder)


def running(folder: Path) -> list[str]:
    """Processes that know of ``folder``."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdigit() and int(one.name) != os.getpid():
            try:
                if str(folder).encode() in (one / "cmdline").read_bytes():
                    found.append(one.name)
            except OSError:
                continue
    return found


def test_a_daemon_that_does_not_start_says_why(fake_control: Path) -> None:
    fake_control.write_text('#!/bin/sh\n[ "$1" = -f ] && echo "no device" && exit 1\n')
    with pytest.raises(UnsupportedError, match="did not start: no device"), mps.share_gpu(2):
        pass


# ------------------------------------------------------------------------------------------------------------------ transports


@pytest.mark.parametrize(
    ("device", "num_gpus", "local_size", "size", "one_gpu", "transport"),
    [
        ("cpu", 0, 4, 4, False, "gloo"),
        ("cuda", 1, 1, 1, False, "gloo"),
        ("cuda", 1, 2, 2, False, "gloo"),
        ("cuda", 1, 2, 2, True, "symm"),
        ("cuda", 8, 2, 2, True, "symm"),
        ("cuda", 8, 8, 16, False, "nccl"),
        ("cuda", 2, 2, 2, False, "nccl"),
        ("cuda", 2, 4, 4, False, "gloo"),
    ],
)
def test_the_transport_suits_the_devices(device: str, num_gpus: int, local_size: int, size: int, one_gpu: bool, transport: str) -> None:
    assert choose(None, device, num_gpus, local_size, size, one_gpu=one_gpu) == transport


@pytest.mark.parametrize(
    ("wanted", "device", "num_gpus", "local_size", "size", "one_gpu", "why", "cure"),
    [
        ("nccl", "cpu", 0, 2, 2, False, "GPU tensors only", "gloo"),
        ("nccl", "cuda", 1, 2, 2, False, "two ranks on one GPU", "--one-gpu"),
        ("nccl", "cuda", 8, 2, 2, True, "two ranks on one GPU", "--one-gpu"),
        ("symm", "cuda", 1, 2, 2, False, "without MPS", "one_gpu=True"),
        ("symm", "cuda", 8, 8, 16, False, "within one machine", "nccl"),
    ],
)
def test_an_impossible_transport_is_refused_with_the_cure(
    wanted: str, device: str, num_gpus: int, local_size: int, size: int, one_gpu: bool, why: str, cure: str
) -> None:
    with pytest.raises(UnsupportedError, match=why) as caught:
        choose(wanted, device, num_gpus, local_size, size, one_gpu=one_gpu)
    assert cure in str(caught.value.cure)


def test_an_unknown_transport_is_refused_with_the_choices() -> None:
    with pytest.raises(UnsupportedError, match="gloo, nccl, symm"):
        choose("mpi", "cpu", 0, 2, 2, one_gpu=False)
    with pytest.raises(UnsupportedError, match="there is no transport 'carrier pigeon'"):
        spawn(lambda world: None, 2, "carrier pigeon")


@pytest.mark.parametrize(("size", "arena"), [(2, 1 << 30), (4, 1 << 30), (8, 1 << 30), (8, 1 << 20), (64, 1 << 30)])
def test_all_slots_of_a_rank_fit_its_arena(size: int, arena: int) -> None:
    slot = slot_bytes(size, arena)
    assert slot & (slot - 1) == 0
    assert 2 * size * slot <= max(arena // 2, 1 << 20)
