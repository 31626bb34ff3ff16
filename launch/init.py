"""Take part in a job that a launcher started: find this rank's place, meet the others, choose the device and the transport.

The same script runs under torchrun, mpirun, srun, ``hostir run`` and by itself. Leaving the World (or the script) closes everything in
order; an exception that ends the script is told to the other ranks first.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from hostir.errors import CommTimeout, HostIrError, InputError
from hostir.launch.ending import ending
from hostir.launch.env import Place, find_place
from hostir.launch.machine import pick_device, share_cores
from hostir.launch.meeting import linger, meet, world_store
from hostir.launch.mps import is_one_gpu
from hostir.launch.transport import choose_here, connect, make_comms, torch_backend
from hostir.runtime.comms.hub import Hub
from hostir.runtime.comms.lane import keep_forever
from hostir.runtime.comms.process import ProcessComms
from hostir.runtime.comms.protocol import Comms
from hostir.runtime.comms.threads import ThreadComms
from hostir.runtime.world import World, current_world


def init(*, backend: str | None = None, device: str | torch.device | None = None, timeout: float | None = None) -> World:
    """The World of this process: ``with hir.launch.init() as world: …``.

    ``backend``: ``"gloo"``, ``"nccl"`` or ``"symm"``; default what ``hostir run`` was given, else what suits the devices: gloo on CPUs,
    NCCL with a GPU for each rank, symm for ranks that were started to share one GPU, else gloo, which takes GPU tensors through pinned
    memory. ``device``: default the GPU of the local rank where there is one, else the CPU. ``timeout`` (seconds) bounds the meeting of the
    ranks and each communication: default what ``hostir run`` was given, else 60. Inside rank threads this is the thread's own World. With
    several ranks torch.distributed's default group is made as well, so that DTensor works. InputError when the launcher's variables make
    no sense, CommTimeout when ranks do not come, UnsupportedError for a backend that cannot be here.
    """
    if (ours := current_world()) is not None:
        return ours
    seconds = _default_timeout() if timeout is None else timeout
    place = find_place(os.environ)
    backend = backend or os.environ.get("HOSTIR_TRANSPORT") or None
    if place.size == 1:
        chosen = pick_device(device, 0)
        transport = choose_here(backend, chosen, 1, 1)
        return World(0, 1, 0, 1, chosen, transport, ThreadComms(Hub(1, seconds), 0, transport))
    ending().prefix = f"[rank{place.rank}]: "
    place, store = meet(place, seconds)
    try:
        world = open_world(place, store, store.add(f"inits/{place.rank}", 1), seconds, device=device, transport=backend)
    except HostIrError:
        linger(store, place)
        raise
    ending().add(world, lambda: linger(store, place))
    return world


def open_world(
    place: Place, store: dist.Store, name: int | str, timeout: float, *, device: str | torch.device | None, num_ranks: int | None = None,
    transport: str | None = None,
) -> World:  # fmt: skip
    """A world of the first ``num_ranks`` ranks (all) that met in ``store``; each of them must come, with the same new ``name``.

    The device is set before any group is made.
    """
    size = place.size if num_ranks is None else num_ranks
    local_size = min(place.local_size, size)
    chosen = pick_device(device, 0 if is_one_gpu() else place.local_rank)
    transport = choose_here(transport, chosen, local_size, size)
    if chosen.type == "cpu":
        share_cores(place.local_size)
    ours = world_store(store, name)
    comms: Comms
    if size == 1:
        comms = ThreadComms(Hub(1, timeout), 0, transport)
    else:
        comms = make_comms(transport, place.rank, size, chosen, timeout, ours, one_machine=place.local_size == place.size)
    world = World(place.rank, size, place.local_rank, local_size, chosen, transport, comms)
    if size > 1:
        join_torch(world, dist.PrefixStore("torch", ours), timeout)
        connect(world)
    return world


def join_torch(world: World, store: dist.Store, timeout: float) -> None:
    """Make torch.distributed's default group, for DTensor and friends, unless the user has made it; the world destroys what it made."""
    world.comms.exchange("all ranks are here", "", range(world.size))  # says who is missing, which torch cannot
    if dist.is_initialized():
        return
    hook = sys.excepthook
    try:
        dist.init_process_group(torch_backend(world.backend), store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout))
    except (dist.DistError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CommTimeout(f"not all of {world.size} ranks came within {timeout:g} s: {reason}", rank=world.rank) from error
    finally:
        sys.excepthook = hook  # torch wraps it each time to show the rank
    world.on_close.append(lambda: _leave_torch(world.comms))
    world.comms.exchange("torch.distributed is ready", "", range(world.size))  # else a rank that fails at once breaks the others' start


def _leave_torch(comms: Comms) -> None:
    if not dist.is_initialized():
        return
    if isinstance(comms, ProcessComms) and comms.broken is not None:
        keep_forever(dist.group.WORLD)  # its end could wait for ranks that never come
    dist.destroy_process_group()


def _default_timeout() -> float:
    text = os.environ.get("HOSTIR_TIMEOUT", "60")
    try:
        return float(text)
    except ValueError:
        raise InputError("HOSTIR_TIMEOUT is not a number of seconds", expected="a number", got=repr(text)) from None
