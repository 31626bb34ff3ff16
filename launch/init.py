"""Take part in a job that a launcher started: find this rank's place, meet the others, choose the device and the transport.

The same script runs under torchrun, mpirun, srun, ``hostir run`` and by itself. Leaving the World (or the script) closes everything in
order; an exception that ends the script is told to the other ranks first.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from hostir.errors import CommTimeout, InputError, UnsupportedError
from hostir.launch.env import Place, find_place, first_host
from hostir.launch.machine import pick_device, share_cores
from hostir.runtime.comms.gloo import GlooWire
from hostir.runtime.comms.hub import Hub
from hostir.runtime.comms.process import ProcessComms, keep_forever
from hostir.runtime.comms.protocol import Comms
from hostir.runtime.comms.threads import ThreadComms
from hostir.runtime.world import World, current_world


def init(*, backend: str | None = None, device: str | torch.device | None = None, timeout: float = 60.0) -> World:
    """The World of this process: ``with hir.launch.init() as world: …``.

    ``backend``: ``"gloo"`` (the default). ``device``: default the GPU of the local rank where there is one, else the CPU. ``timeout``
    (seconds) bounds the meeting of the ranks and each communication. Inside rank threads this is the thread's own World. With several
    ranks torch.distributed's default group is made as well, so that DTensor works. InputError when the launcher's variables make no
    sense, CommTimeout when ranks do not come.
    """
    if (ours := current_world()) is not None:
        return ours
    if (backend or "gloo") != "gloo":
        raise UnsupportedError(f"there is no backend {backend!r} here", refusals={str(backend): "init knows gloo"}, expected="gloo")
    place = find_place(os.environ)
    store: dist.Store | None = None
    if place.size > 1:
        try:
            place, store = _meet(place, timeout)
        except (dist.DistError, RuntimeError) as error:
            raise CommTimeout(
                f"rank {place.rank} could not meet the other {place.size - 1} ranks: {(str(error).splitlines() or [''])[0]}",
                rank=place.rank,
                cure="check that every rank was started, and that MASTER_ADDR and MASTER_PORT name a free port that all can reach",
            ) from error
    chosen = pick_device(device, place.local_rank)
    if chosen.type == "cpu":
        share_cores(place.local_size)
    comms: Comms
    if store is None:
        comms = ThreadComms(Hub(1, timeout), 0, "gloo")
    else:
        generation = store.add(f"hostir/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/inits/{place.rank}", 1)
        prefix = f"hostir/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}"
        loopback = place.local_size == place.size
        comms = ProcessComms(GlooWire(loopback=loopback), dist.PrefixStore(prefix, store), place.rank, place.size, timeout)
    world = World(place.rank, place.size, place.local_rank, place.local_size, chosen, "gloo", comms)
    if store is not None:
        join_torch(world, dist.PrefixStore(f"{prefix}/torch", store), timeout)
    atexit.register(world.close)
    _tell_on_exception(world, place.launcher)
    return world


def join_torch(world: World, store: dist.Store, timeout: float) -> None:
    """Make torch.distributed's default group, for DTensor and friends, unless the user has made it; the world destroys what it made."""
    if dist.is_initialized():
        return
    try:
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout))
    except (dist.DistError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CommTimeout(f"not all of {world.size} ranks came within {timeout:g} s: {reason}", rank=world.rank) from error
    world.on_close.append(lambda: _leave_torch(world.comms))
    world.comms.exchange("torch.distributed is ready", "", range(world.size))  # else a rank that fails at once breaks the others' start


def _leave_torch(comms: Comms) -> None:
    if not dist.is_initialized():
        return
    if isinstance(comms, ProcessComms) and comms.broken is not None:
        keep_forever(dist.group.WORLD)  # destroying it could wait for ranks that never come
    else:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------------ meeting


def _meet(place: Place, timeout: float) -> tuple[Place, dist.Store]:
    wait = timedelta(seconds=timeout)
    if place.launcher == "mpi":
        return _meet_over_mpi(place, wait)
    if place.launcher == "slurm":
        one_machine = place.local_size == place.size
        host = "127.0.0.1" if one_machine else first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", ""))
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) * 7 % 20000 + int(os.environ.get("SLURM_STEP_ID", "0")) % 100
        return place, _tcp_store(host, port, place, wait, hosts=place.rank == 0)
    port_text = os.environ.get("MASTER_PORT", "29500")
    if not port_text.isdigit():
        raise InputError("MASTER_PORT is not a port", expected="a number", got=port_text)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return place, _tcp_store(os.environ["MASTER_ADDR"], int(port_text), place, wait, hosts=place.rank == 0 and not by_agent)


def _tcp_store(host: str, port: int, place: Place, wait: timedelta, *, hosts: bool) -> dist.Store:
    try:
        return dist.TCPStore(host, port, place.size, hosts, wait, wait_for_workers=False, multi_tenant=True)
    except (dist.DistError, RuntimeError) as error:
        raise RuntimeError(f"{host}:{port}: {(str(error).splitlines() or [''])[0]}") from error


def _meet_over_mpi(place: Place, wait: timedelta) -> tuple[Place, dist.Store]:
    """Rank 0 opens a free port and says where; no port is guessed."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        cure = "pip install 'hostir[mpi]', or start with torchrun or hostir run"
        raise InputError("this process was started by MPI, but mpi4py is not installed", expected="mpi4py", got="none", cure=cure) from error
    everyone = MPI.COMM_WORLD
    if (everyone.rank, everyone.size) != (place.rank, place.size):
        raise InputError(
            f"mpi4py sees rank {everyone.rank} of {everyone.size}, but the launcher says rank {place.rank} of {place.size}",
            expected=f"rank {place.rank} of {place.size}",
            got=MPI.Get_library_version().splitlines()[0],
            cure="mpirun and mpi4py use different MPI libraries: start with the mpirun that belongs to this one",
        )
    here = everyone.Split_type(MPI.COMM_TYPE_SHARED, key=place.rank)  # launchers number local ranks in their own orders
    place = Place(place.rank, place.size, here.rank, here.size, "mpi")
    store = None
    address: tuple[str, int] | None = None
    if place.rank == 0:
        host = "127.0.0.1" if place.local_size == place.size else socket.gethostname()
        store = dist.TCPStore(host, 0, place.size, True, wait, wait_for_workers=False)
        address = (host, store.port)
    host, port = everyone.bcast(address)
    return place, store or _tcp_store(host, port, place, wait, hosts=False)


# -------------------------------------------------------------------------------------------------------------------- ending


def _tell_on_exception(world: World, launcher: str) -> None:
    """An exception that ends the script is told to the others, who would wait for this rank; under MPI it ends the job."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        world.comms.fail(error)
        before(kind, error, trace)
        if launcher == "mpi" and world.size > 1:
            from mpi4py import MPI

            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(0.5)  # let the others report what they were doing
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook
