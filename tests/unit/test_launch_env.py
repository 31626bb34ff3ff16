"""Which rank is this: tables of what launchers leave in the environment."""

from __future__ import annotations

import pytest

from hostir.errors import InputError
from hostir.launch.env import Place, find_place, first_host

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "0"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place(0, 1, 0, 1, "single")),
        (TORCHRUN, Place(5, 8, 1, 4, "torch")),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, Place(0, 2, 0, 2, "torch")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, 1, "torch")),
        (OMPI, Place(1, 4, 2, 4, "mpi")),
        (MPICH, Place(3, 4, 1, 2, "mpi")),
        (SRUN, Place(6, 8, 2, 4, "slurm")),
        (BATCH, Place(0, 1, 0, 1, "single")),
        ({**BATCH, **OMPI}, Place(1, 4, 2, 4, "mpi")),
        ({**SRUN, **OMPI}, Place(1, 4, 2, 4, "mpi")),
        ({**BATCH, **ELASTIC}, Place(5, 8, 1, 4, "torch")),
        ({**OMPI, **ELASTIC}, Place(5, 8, 1, 4, "torch")),
        ({**OMPI, "RANK": "1", "WORLD_SIZE": "4"}, Place(1, 4, 2, 4, "mpi")),
        ({**TORCHRUN, "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, Place(5, 8, 1, 4, "torch")),
    ],
)
def test_each_launcher_is_understood(environ: dict[str, str], place: Place) -> None:
    assert find_place(environ) == place


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({**OMPI, **TORCHRUN}, ("RANK=5", "WORLD_SIZE=8", "OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4")),
        ({**OMPI, **MPICH}, ("OMPI_COMM_WORLD_RANK=1", "PMI_RANK=3")),
        ({**SRUN, **TORCHRUN}, ("RANK=5", "SLURM_PROCID=6")),
        ({"RANK": "0"}, ("RANK is set", "WORLD_SIZE is not")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE is set", "RANK is not")),
        ({"PMI_SIZE": "2"}, ("PMI_SIZE is set", "PMI_RANK is not")),
        ({"RANK": "two", "WORLD_SIZE": "2"}, ("RANK is not a number", "'two'")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK and WORLD_SIZE", "0 .. 1")),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK and WORLD_SIZE", "got: -1")),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ("LOCAL_RANK and LOCAL_WORLD_SIZE", "got: 4")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_ADDR and MASTER_PORT", "torchrun")),
    ],
)
def test_what_makes_no_sense_is_an_error_that_names_the_variables(environ: dict[str, str], names: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        find_place(environ)
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize(("nodes", "host"), [("gpu[03-07,9],cpu1", "gpu03"), ("node5", "node5"), ("a,b", "a"), ("x-1[2,4]", "x-12")])
def test_the_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
