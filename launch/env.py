"""Which rank is this? What the launchers leave in the environment, read in one place and without surprises.

Every launcher has its own variables, and jobs often run one launcher inside another. The innermost one counts where that can be told
(torchrun inside anything, MPI inside Slurm); two that contradict each other otherwise are an error that names the variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hostir.errors import InputError


@dataclass(frozen=True)
class Place:
    """This process among those of the job; ``launcher`` is torch, mpi, slurm or single."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


@dataclass(frozen=True)
class Variables:
    """The names that one launcher uses; the first of ``size`` and of ``local_size`` that is set counts."""

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: tuple[str, ...]


_TORCH: Final = Variables("torch", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",))
_MPI: Final = (
    Variables("mpi", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    Variables("mpi", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    Variables("mpi", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",)),
)
_SLURM: Final = Variables("slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID", ("SLURM_STEP_TASKS_PER_NODE",))


def find_place(environ: Mapping[str, str]) -> Place:
    """The place that ``environ`` describes; a single process where no launcher has left anything.

    InputError, naming the variables, when a set is incomplete or impossible or when two sets disagree.
    """
    torch = _read(environ, _TORCH)
    if torch is not None and "TORCHELASTIC_RUN_ID" in environ:
        return torch
    mpi = None
    for variables in _MPI:
        found = _read(environ, variables)
        if found is not None and mpi is not None:
            _same(environ, mpi[1], variables, mpi[0], found)
        mpi = mpi or (None if found is None else (found, variables))
    # A batch script has SLURM_PROCID=0 without being a task of a step; only srun sets the step's variables.
    slurm = _read(environ, _SLURM) if "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ else None
    if torch is not None:
        if mpi is not None:
            _same(environ, _TORCH, mpi[1], torch, mpi[0])
        if slurm is not None:
            _same(environ, _TORCH, _SLURM, torch, slurm)
        if "MASTER_ADDR" in environ or torch.size == 1:
            return torch
        if mpi is None and slurm is None:
            raise InputError(
                "RANK and WORLD_SIZE are set, but not where the ranks meet",
                expected="MASTER_ADDR and MASTER_PORT",
                got="neither" if "MASTER_PORT" not in environ else "MASTER_PORT only",
                cure="start with torchrun, or set MASTER_ADDR and MASTER_PORT for all ranks",
            )
    if mpi is not None:
        return mpi[0]
    return slurm or Place(0, 1, 0, 1, "single")


def _read(environ: Mapping[str, str], variables: Variables) -> Place | None:
    size_name = next((n for n in variables.size if n in environ), None)
    if variables.rank not in environ and (size_name is None or variables.launcher == "slurm"):
        return None
    if variables.rank not in environ or size_name is None:
        there, missing = (size_name, variables.rank) if variables.rank not in environ else (variables.rank, variables.size[0])
        cure = f"set both, or unset {there} for a single process"
        raise InputError(f"{there} is set but {missing} is not", expected=f"{variables.rank} and {variables.size[0]}", got=there, cure=cure)
    rank, size = _number(environ, variables.rank), _number(environ, size_name)
    if not 0 <= rank < size:
        raise InputError(f"{variables.rank} and {size_name} do not go together", expected=f"{variables.rank} in 0 .. {size - 1}", got=rank)
    local_name = next((n for n in variables.local_size if n in environ), None)
    local_size = _number(environ, local_name) if local_name else size
    local_rank = _number(environ, variables.local_rank) if variables.local_rank in environ else rank % local_size
    if local_name is None and variables.local_rank not in environ:
        local_size = size
    if not 0 <= local_rank < local_size:
        expected = f"{variables.local_rank} in 0 .. {local_size - 1}"
        raise InputError(f"{variables.local_rank} and {local_name} do not go together", expected=expected, got=local_rank)
    return Place(rank, size, local_rank, local_size, variables.launcher)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if name == "SLURM_STEP_TASKS_PER_NODE":  # "4(x2),3": that of the first node
        text = re.split(r"[(,]", text)[0]
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} is not a number", expected="an integer", got=repr(environ[name])) from None


def _same(environ: Mapping[str, str], a: Variables, b: Variables, place_a: Place, place_b: Place) -> None:
    if (place_a.rank, place_a.size) == (place_b.rank, place_b.size):
        return

    def show(v: Variables) -> str:
        names = [v.rank, next(n for n in v.size if n in environ)]
        return ", ".join(f"{n}={environ[n]}" for n in names)

    raise InputError(
        f"two launchers disagree about this process: {show(a)} but {show(b)}",
        expected="one launcher, or the same rank and size from both",
        got=f"rank {place_a.rank} of {place_a.size} and rank {place_b.rank} of {place_b.size}",
        cure=f"unset the variables of the outer launcher ({a.rank}, {a.size[0]} or {b.rank}, {b.size[0]})",
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: ``gpu[03-07,9],cpu1`` gives ``gpu03``."""
    head = re.match(r"([^\[,]+)(?:\[([^\]\-,]+))?", nodes)
    return (head[1] + (head[2] or "")) if head else nodes
