"""Several ranks on ONE GPU at the same time: a private MPS daemon, and what the ranks must have in their environment.

Without MPS the GPU serves one process after another, and a rank that waits for another one waits for whole time slices. The daemon is
this call's own: nobody else's is touched. It hangs on a pipe of this process, so it ends, and its folder goes, whatever ends us.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from hostir.errors import InputError, UnsupportedError

CONTROL: Final = "nvidia-cuda-mps-control"
FOLDERS: Final = ("/usr/local/nvidia/bin", "/usr/local/cuda/bin", "/usr/bin", "/opt/nvidia/bin", "/usr/lib/wsl/lib")
MAX_RANKS: Final = 48  # processes that one MPS daemon serves
START: Final = 10.0  # seconds for the daemon to come up
STOP: Final = 10.0  # and to go

# $1: the control program, $2: the folder. Reads its standard input to the end, which comes when the parent closes it or dies.
_KEEPER: Final = """
"$1" -f >"$2/control.log" 2>&1 &
daemon=$!
cat >/dev/null
echo quit | "$1" >/dev/null 2>&1
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do kill -0 $daemon 2>/dev/null || break; sleep 0.1; done
kill $daemon 2>/dev/null
wait $daemon
rm -rf "$2"
"""


def environment(num_ranks: int, folder: str) -> dict[str, str]:
    """What each of ``num_ranks`` ranks on one GPU gets: the daemon in ``folder``, an equal share of the multiprocessors, and permission
    for symmetric memory between ranks of one device. NVLink multicast stays off: it has no use within a GPU."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(100 // num_ranks, 1)),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        # A stream that holds for a flag must not hold one that shares its queue; but all ranks' queues come out of one supply.
        "CUDA_DEVICE_MAX_CONNECTIONS": str(max(48 // num_ranks, 2)),
        "HOSTIR_ONE_GPU": "1",
    }


def is_one_gpu() -> bool:
    """Whether this process was started as one of several ranks on one GPU."""
    return os.environ.get("HOSTIR_ONE_GPU") == "1"


def find_control() -> str:
    """The path of the MPS control program; UnsupportedError, with the cure, where there is none."""
    found = shutil.which(CONTROL) or next((p for f in FOLDERS if os.access(p := f"{f}/{CONTROL}", os.X_OK)), None)
    if found is None:
        raise UnsupportedError(
            f"several ranks on one GPU need {CONTROL}, which is not on this machine",
            refusals={"one_gpu": f"no {CONTROL} on PATH or in {', '.join(FOLDERS)}"},
            cure="install the NVIDIA driver's utilities (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility), "
            'or run the ranks as threads: transport="threads"',
        )
    return found


@contextlib.contextmanager
def share_gpu(num_ranks: int) -> Iterator[dict[str, str]]:
    """Variables for ``num_ranks`` ranks that share the GPU; the daemon behind them runs as long as the block."""
    if num_ranks > MAX_RANKS:
        raise InputError(f"one GPU is shared by at most {MAX_RANKS} ranks", expected=f"1 .. {MAX_RANKS}", got=num_ranks)
    control = find_control()
    folder = tempfile.mkdtemp(prefix="hostir-mps-")
    variables = environment(num_ranks, folder)
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        os.mkdir(variables[name])
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, "hostir-mps", control, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | variables,
        start_new_session=True,  # Ctrl-C is for the ranks; the daemon goes after them
    )
    try:
        with _exit_on_sigterm():
            _await_start(keeper, folder)
            yield variables
    finally:
        _stop(keeper, folder)


@contextlib.contextmanager
def sharing(num_ranks: int, *, one_gpu: bool) -> Iterator[dict[str, str]]:
    """``share_gpu`` where that is wanted, else no variables and no daemon."""
    if not one_gpu:
        yield {}
        return
    with share_gpu(num_ranks) as variables:
        yield variables


def _await_start(keeper: subprocess.Popen[bytes], folder: str) -> None:
    deadline = time.monotonic() + START
    while not Path(folder, "pipe", "control").exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            log = Path(folder, "control.log")
            said = log.read_text(errors="replace").strip() if log.exists() else ""
            raise UnsupportedError(
                f"the MPS daemon did not start: {said or 'it said nothing'}", refusals={"one_gpu": said},
                cure="check that nvidia-smi works and that this user may start processes with the GPU",
            )  # fmt: skip
        time.sleep(0.02)


def _stop(keeper: subprocess.Popen[bytes], folder: str) -> None:
    assert keeper.stdin is not None
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    try:
        keeper.wait(STOP)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """A SIGTERM that would end this process at once becomes SystemExit, so that what is open is closed."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
