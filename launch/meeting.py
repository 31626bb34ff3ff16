"""Where the ranks of a job meet: a store that all of them reach, as their launcher tells them, and a check that each came once."""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from importlib.util import find_spec
from typing import Final

import torch.distributed as dist

from hostir.errors import CommTimeout, InputError
from hostir.launch.env import Place, find_place, first_host
from hostir.runtime.comms.board import Board, Failure

_PROBE: Final = 2.0  # seconds to find out whether whoever holds our port is a rank of this job
_LINGER: Final = 2.0  # seconds that rank 0, which may host the store, stays for the others to read why it ends


def meet(place: Place, timeout: float) -> tuple[Place, dist.Store]:
    """The place, with what the meeting added to it, and a store of this job (and of this attempt, where the launcher restarts ranks).

    CommTimeout when the others do not come; InputError when another process claims the same rank: the other ranks hear of it as well.
    """
    try:
        place, store = _meet(place, timeout)
    except (dist.DistError, RuntimeError) as error:
        raise CommTimeout(
            f"rank {place.rank} could not meet the other {place.size - 1} ranks: {(str(error).splitlines() or [''])[0]}",
            rank=place.rank,
            cure="check that every rank was started, and that MASTER_ADDR and MASTER_PORT name a free port that all can reach",
        ) from error
    store = _of_this_attempt(store)
    try:
        Board.claim(store, place.rank, place.size)
    except InputError as error:
        if not store.check([f"who/{r}" for r in range(place.size)]):  # a job that is complete has nothing to do with this process
            text = f"{error.message}: {error.got}"
            number = max(store.add(f"inits/{place.rank}", 0), 1)
            Board.leave_failure(world_store(store, number), Failure(place.rank, "InputError", text, (place.rank,)))
        raise
    return place, store


def _of_this_attempt(store: dist.Store) -> dist.Store:
    return dist.PrefixStore(f"hostir/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def world_store(store: dist.Store, name: int | str) -> dist.Store:
    """Where a world of a job keeps its facts; ``store`` is that of ``meet``. The worlds of ``init`` count from 1."""
    return dist.PrefixStore(str(name), store)


def _meet(place: Place, timeout: float) -> tuple[Place, dist.Store]:
    if place.launcher == "mpi":
        slurm = find_place({k: v for k, v in os.environ.items() if k.startswith("SLURM_")})
        if find_spec("mpi4py") is not None or (slurm.rank, slurm.size) != (place.rank, place.size):
            from hostir.launch.mpi import meet as meet_over_mpi

            return meet_over_mpi(place, timeout)
        place = slurm  # srun sets the variables of an MPI as well
    if place.launcher == "slurm":
        one_machine = place.local_size == place.size
        host = "127.0.0.1" if one_machine else first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", ""))
        number = int(os.environ.get("SLURM_JOB_ID", "0")) * 101 + int(os.environ.get("SLURM_STEP_ID", "0"))
        return place, _tcp_store(host, 20000 + number % 12000, place, timeout, hosts=place.rank == 0)
    port = os.environ.get("MASTER_PORT", "29500")
    if not port.isdigit():
        raise InputError("MASTER_PORT is not a port", expected="a number", got=port)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return place, _tcp_store(os.environ["MASTER_ADDR"], int(port), place, timeout, hosts=place.rank == 0 and not by_agent)


def linger(store: dist.Store, place: Place) -> None:
    """After a failure: rank 0 goes last, because the store goes with it and the others read there what has happened."""
    with contextlib.suppress(RuntimeError):
        store.set(f"gone/{place.rank}", "")
        others = [r for r in range(1, place.size) if store.check([f"who/{r}"])]
        if place.rank == 0 and others:
            Board.poll(lambda: store.check([f"gone/{r}" for r in others]), _LINGER)


def _tcp_store(host: str, port: int, place: Place, timeout: float, *, hosts: bool) -> dist.Store:
    try:
        return _open_store(host, port, place.size, timeout, hosts=hosts)
    except (dist.DistError, RuntimeError) as error:
        if hosts and (other := _store_of_another_rank_0(host, port, place.size)) is not None:
            return other
        raise RuntimeError(f"{host}:{port}: {(str(error).splitlines() or [''])[0]}") from error


def _open_store(host: str, port: int, size: int, timeout: float, *, hosts: bool) -> dist.Store:
    """A TCPStore; RuntimeError after ``timeout`` seconds also where somebody listens who is no store: torch would wait for ever."""
    made: list[dist.Store | Exception] = []

    def make() -> None:
        try:
            made.append(dist.TCPStore(host, port, size, hosts, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True))
        except (dist.DistError, RuntimeError) as error:
            made.append(error)

    maker = threading.Thread(target=make, name="hostir: meeting", daemon=True)
    maker.start()
    maker.join(timeout + 1.0)
    if not made:
        raise RuntimeError(f"somebody listens there who is no store of this job (no answer in {timeout:g} s)")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _store_of_another_rank_0(host: str, port: int, size: int) -> dist.Store | None:
    """The port is taken: by a process that says it is rank 0 as well?"""
    try:
        store = _open_store(host, port, size, _PROBE, hosts=False)
        return store if _of_this_attempt(store).check(["who/0"]) else None
    except (dist.DistError, RuntimeError):
        return None
