"""Meeting over MPI: mpi4py tells every rank where rank 0's store is, and ends the whole job when one rank cannot go on.

MPI itself waits without limit: for ranks that never come, and at the end for ranks that still compute. So ranks come together with a
timeout first, and a rank that ends with an exception ends the job.
"""

from __future__ import annotations

import faulthandler
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hostir.errors import CommTimeout, InputError
from hostir.launch.env import Place


def meet(place: Place, timeout: float) -> tuple[Place, dist.Store]:
    """The place with the local rank as MPI counts it, and the store that rank 0 hosts at a free port that the system chose."""
    mpi = _load_mpi_which_waits_for_all_ranks(timeout)
    everyone = mpi.COMM_WORLD
    if (everyone.rank, everyone.size) != (place.rank, place.size):
        raise InputError(
            f"mpi4py sees rank {everyone.rank} of {everyone.size}, but the launcher says rank {place.rank} of {place.size}",
            expected=f"rank {place.rank} of {place.size}",
            got=mpi.Get_library_version().splitlines()[0],
            cure="mpirun and mpi4py use different MPI libraries: start with the mpirun that belongs to this one",
        )
    _come_together(everyone, place, timeout)
    here = everyone.Split_type(mpi.COMM_TYPE_SHARED, key=place.rank)  # launchers number local ranks in their own orders
    place = Place(place.rank, place.size, here.rank, here.size, "mpi")
    here.Free()
    store = None
    address: tuple[str, int] | None = None
    wait = timedelta(seconds=timeout)
    if place.rank == 0:
        host = "127.0.0.1" if place.local_size == place.size else socket.gethostname()
        store = dist.TCPStore(host, 0, place.size, True, wait, wait_for_workers=False)
        address = (host, store.port)
    host, port = everyone.bcast(address)
    return place, store or dist.TCPStore(host, port, place.size, False, wait, wait_for_workers=False)


def end_job(code: int) -> None:
    """End all ranks at once where this process belongs to an MPI job; MPI's own end would wait for all of them."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        mpi.COMM_WORLD.Abort(code)


def _load_mpi_which_waits_for_all_ranks(timeout: float) -> Any:
    """The module ``mpi4py.MPI``.

    Loading it starts MPI, which blocks until every rank of the job has done so (one may have failed before), with Python's lock held.
    After ``timeout`` seconds this process prints where it waits, and ends.
    """
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        from mpi4py import MPI
    except ImportError as error:
        cure = "pip install 'hostir[mpi]', or start with torchrun or hostir run"
        raise InputError("this process was started by MPI, but mpi4py is not installed", expected="mpi4py", got="none", cure=cure) from error
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        cure = "install an MPI library where mpi4py finds it (pip install mpich), or say where with MPI4PY_LIBMPI"
        raise InputError("this process was started by MPI, but mpi4py finds no MPI library", got=reason, cure=cure) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return MPI


def _come_together(everyone: Any, place: Place, timeout: float) -> None:
    request = everyone.Ibarrier()
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while not request.Test():
        if time.monotonic() > deadline:
            cure = "every rank of the job must call hir.launch.init, equally often"
            raise CommTimeout(f"not all of {place.size} ranks came within {timeout:g} s", rank=place.rank, cure=cure)
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
