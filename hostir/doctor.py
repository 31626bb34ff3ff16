"""What this machine has for hostir, as rows: found or not, needed or not, and the cure for what is missing.

Only what is needed decides the exit code. A GPU, MPI or the plots are conveniences whose absence is normal and only reported.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True)
class Check:
    """One row. ``ok`` False with ``needed`` means that hostir cannot work here."""

    name: str
    ok: bool
    needed: bool
    found: str
    cure: str | None = None


def checks() -> Iterator[Check]:
    """Every row, in the order in which it is printed."""
    yield Check("python", sys.version_info >= (3, 11), True, platform.python_version(), "hostir needs Python 3.11 or later")
    yield _package("torch", (2, 11), needed=True, cure="pip install 'torch>=2.11'")
    yield _package("triton", (3, 6), needed=sys.platform == "linux", cure="pip install 'triton>=3.6'")
    yield _package("numpy", (2,), needed=True, cure="pip install 'numpy>=2'")
    yield from _interpreter()
    yield from _torch()
    yield _package("cuda-bindings", (), needed=False, cure="pip install cuda-bindings (stream-ordered waits of symmetric memory)")
    yield _package("mpi4py", (4, 1), needed=False, cure="pip install 'mpi4py>=4.1' (for mpirun -n 4 python script.py)")
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    launcher = shutil.which("mpirun") or beside
    yield Check("mpirun", launcher is not None, False, launcher or "not on PATH", "pip install mpich, or this machine's own MPI")
    yield _package("matplotlib", (), needed=False, cure="pip install matplotlib (pictures of timelines)")


def main(*, as_json: bool = False) -> int:
    """Print the rows, for people or as one JSON object. 0 when everything needed is there, else 1."""
    rows = list(checks())
    good = all(row.ok for row in rows if row.needed)
    if as_json:
        print(json.dumps({"ok": good, "checks": [asdict(row) for row in rows]}, indent=2))
    else:
        _print_table(rows)
        print("Everything that hostir needs is here." if good else "Something that hostir needs is missing: see the cures.")
    return 0 if good else 1


def _print_table(rows: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "cure"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        mark = "ok" if row.ok else "MISSING" if row.needed else "-"
        table.add_row(mark, row.name, row.found, "" if row.ok else row.cure or "")
    Console(markup=False, highlight=False).print(table)


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3])


def _package(name: str, least: tuple[int, ...], *, needed: bool, cure: str) -> Check:
    text = _version_of(name)
    if text is None:
        return Check(name, False, needed, "not installed", cure)
    return Check(name, _release(text)[: len(least)] >= least, needed, text, cure)


def _interpreter() -> Iterator[Check]:
    """Triton 3.6 runs loops without a GPU only with an older numpy."""
    triton, numpy = _version_of("triton"), _version_of("numpy")
    if triton is None or numpy is None:
        return
    good = _release(triton)[:2] > (3, 6) or _release(numpy)[:2] < (2, 4)
    cure = "pip install 'numpy<2.4' or a later triton (TRITON_INTERPRET=1 fails in loops otherwise)"
    yield Check("triton interpreter", good, False, f"triton {triton} with numpy {numpy}", cure)


def _torch() -> Iterator[Check]:
    """The devices and transports that torch reports."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Check("import torch", False, True, str(error), "pip install 'torch>=2.11'")
        return
    available = torch.cuda.is_available()
    if not available:
        why = "this torch has no CUDA" if torch.version.cuda is None else "CUDA finds no device"
        cure = "none needed: programs run on the CPU; for a GPU, install a CUDA build of torch and a driver"
        yield Check("GPUs", False, False, why, cure)
    for i in range(torch.cuda.device_count() if available else 0):
        found = torch.cuda.get_device_properties(i)
        text = f"{found.name}, sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        yield Check(f"GPU {i}", found.major >= 8, False, text, "kernels are tested from sm_80 on")
    if available and torch.cuda.device_count() > 1:
        count = torch.cuda.device_count()
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        reach = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        cure = "symmetric memory needs peer access: check the topology with nvidia-smi topo -m"
        yield Check("GPU links", reach == len(pairs), False, f"{reach} of {len(pairs)} pairs reach each other", cure)
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Check("gloo", gloo, False, "yes" if gloo else "no", "a torch with distributed; without it: transport threads")
    nccl = dist.is_available() and dist.is_nccl_available()
    text = ".".join(str(n) for n in torch.cuda.nccl.version()) if nccl else "not in this torch"
    yield Check("NCCL", nccl, False, text, "none needed without GPUs; else a CUDA build of torch")
