"""Whole processes for tests: a clean environment, the launchers that this machine has, pytest sessions with their results by name."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = str(Path(__file__).parents[2])
SCRIPT = str(Path(__file__).with_name("script.py"))
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "TORCHELASTIC", "HOSTIR_")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher or a pytest session has left in it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_ADDOPTS"):
        clean.pop(name, None)
    path = os.pathsep.join(p for p in (ROOT, os.environ.get("PYTHONPATH", "")) if p)
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def run(command: Sequence[str], *, timeout: float = 100, **more: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; variables go into the environment. What an MPI that was ended leaves in memory goes as well."""
    before = set(_mpich_memory())
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=timeout, env=environment(**more))
    finally:
        for path in set(_mpich_memory()) - before:
            path.unlink(missing_ok=True)


def _mpich_memory() -> list[Path]:
    return list(Path("/dev/shm").glob("mpich_shm_*")) if Path("/dev/shm").is_dir() else []


def mpirun(num_ranks: int) -> list[str]:
    """``mpirun -n N python`` of the MPI that this Python has; skips the test, saying why, where there is none."""
    pytest.importorskip("mpi4py")
    found = shutil.which("mpirun", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip("there is no mpirun (pip install mpich)")
    return [found, "-n", str(num_ranks), sys.executable]


def launcher(name: str, num_ranks: int) -> list[str]:
    """What stands before a script under ``torchrun`` or ``mpirun``."""
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return mpirun(num_ranks)


def write(path: Path, text: str) -> str:
    """A script's file."""
    path.write_text(textwrap.dedent(text))
    return str(path)


@dataclass(frozen=True)
class Session:
    """A pytest session that has ended: ``outcomes`` by test name, each ``(outcome, message, text)``; what it printed; its exit code."""

    outcomes: dict[str, tuple[str, str, str]]
    text: str
    code: int

    def __getitem__(self, name: str) -> str:
        return self.outcomes[name][0]


CONFTEST = """
def pytest_configure(config):
    if not config.pluginmanager.hasplugin("hostir"):  # not installed: a checkout
        config.pluginmanager.import_plugin("hostir.launch.testing")
"""


def run_pytest(folder: Path, tests: str, command: Sequence[str] = (sys.executable,), **more: str) -> Session:
    """Run a test file under pytest, started by ``command``."""
    write(folder / "conftest.py", CONFTEST)
    write(folder / "test_it.py", tests)
    file = folder / "results.xml"
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "junit_logging=all", f"--rootdir={folder}", f"--junitxml={file}", "-ra", str(folder)]
    done = run([*command, *arguments], **more)
    outcomes = {}
    for case in ET.parse(file).iter("testcase") if file.exists() else ():
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        printed = "\n".join(child.text or "" for child in case if child.tag.startswith("system-"))
        kind = "passed" if found is None else "xfailed" if found.get("type") == "pytest.xfail" else found.tag
        text = f"{'' if found is None else found.text or ''}\n{printed}"
        outcomes[str(case.get("name"))] = (kind, "" if found is None else found.get("message", ""), text)
    return Session(outcomes, f"{done.stdout}\n{done.stderr}", done.returncode)


def _call(payload: bytes, variables: dict[str, str], pipe: Connection) -> None:
    os.environ.clear()
    os.environ.update(variables)
    fn, args = pickle.loads(payload)
    try:
        pipe.send(("result", fn(*args)))
    except BaseException as error:  # noqa: BLE001  the caller looks at it
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def call_in_processes(fn: Callable[..., Any], environments: Sequence[dict[str, str]], *args: Any, seconds: float = 60.0) -> list[tuple[str, Any]]:
    """``fn(*args)`` in a process for each of the environments, as a launcher would start it, but quickly (forked with torch loaded).

    Each gives ``("result", value)``, ``("error", "Class: text")`` or ``("gone", exit code)``.
    """
    from hostir.launch.by_value import dumps_call
    from hostir.launch.server import start_process, start_server

    start_server()
    payload = dumps_call(fn, (fn, args))
    started = [start_process(_call, (payload, environment(**variables)), f"process {i}") for i, variables in enumerate(environments)]
    out: list[tuple[str, Any]] = []
    deadline = time.monotonic() + seconds
    for process, pipe in started:
        try:
            out.append(pipe.recv() if pipe.poll(max(deadline - time.monotonic(), 0.0)) else ("gone", "it hangs"))
        except EOFError:
            process.join(5.0)
            out.append(("gone", process.exitcode))
    for process, pipe in started:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
        pipe.close()
    return out


def free_port() -> str:
    """A port that nobody listens at now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def torch_variables(num_ranks: int, port: str) -> list[dict[str, str]]:
    """The variables of torch's launchers for each rank, without a launcher's store: rank 0 hosts it."""
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(num_ranks)]
