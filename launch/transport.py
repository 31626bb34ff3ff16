"""Which transport a world of processes gets, and the making of it: what suits the devices, unless the caller names one.

On CPUs gloo; one GPU for each rank: NCCL; several ranks on one GPU: symmetric memory where they were started for it, else gloo, which
takes GPU tensors through pinned memory.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from hostir.errors import InputError, UnsupportedError
from hostir.launch.mps import is_one_gpu
from hostir.runtime.comms.gloo import GlooWire
from hostir.runtime.comms.process import ProcessComms
from hostir.runtime.comms.protocol import Comms
from hostir.runtime.world import World

PROCESSES: Final = ("gloo", "nccl", "symm")
TRANSPORTS: Final = (*PROCESSES, "threads")


def choose(wanted: str | None, device_type: str, num_gpus: int, local_size: int, size: int, *, one_gpu: bool) -> str:
    """The transport for ``size`` ranks, ``local_size`` of them on this machine with ``num_gpus`` GPUs; UnsupportedError, with the cure,
    where ``wanted`` cannot be."""
    if wanted is not None and wanted not in PROCESSES:
        raise UnsupportedError(f"there is no transport {wanted!r} here", refusals={wanted: f"it is one of {', '.join(PROCESSES)}"})
    crowded = device_type == "cuda" and local_size > num_gpus
    if wanted is None:
        if size == 1 or device_type != "cuda":
            return "gloo"
        return "symm" if one_gpu else "gloo" if crowded else "nccl"
    why, cure = None, None
    if wanted == "nccl" and size > 1:
        if device_type != "cuda":
            why, cure = "NCCL moves GPU tensors only, and the ranks are on the CPU", 'transport "gloo"'
        elif crowded or one_gpu:
            why = f"NCCL refuses two ranks on one GPU, and {local_size} ranks share {1 if one_gpu else num_gpus}"
            cure = "several ranks on one GPU: hostir run --one-gpu, or spawn(…, one_gpu=True)"
    if wanted == "symm" and size > 1:
        if local_size != size:
            why, cure = f"symmetric memory is within one machine, and {local_size} of {size} ranks are on this one", 'transport "nccl" or "gloo"'
        elif crowded and not one_gpu:
            why = f"{local_size} ranks share {num_gpus} GPU{'s' * (num_gpus != 1)}, and without MPS they run one after another"
            cure = "hostir run --one-gpu, or spawn(…, one_gpu=True)"
    if why is not None:
        raise UnsupportedError(f"the transport {wanted} is not possible: {why}", refusals={wanted: why}, cure=cure)
    return wanted


def choose_here(wanted: str | None, device: torch.device, local_size: int, size: int) -> str:
    """``choose`` for a rank of this machine on ``device``."""
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return choose(wanted, device.type, num_gpus, local_size, size, one_gpu=is_one_gpu())


def make_comms(transport: str, rank: int, size: int, device: torch.device, timeout: float, store: dist.Store, *, one_machine: bool) -> Comms:
    """This rank's end of a world of several processes. ``store`` is this world's own."""
    wire = GlooWire(loopback=one_machine)
    if transport == "nccl":
        from hostir.runtime.comms.nccl import NcclWire

        return ProcessComms(NcclWire(device, timeout), store, rank, size, timeout)
    if transport == "symm":
        from hostir.runtime.comms.symm import SymmComms

        return SymmComms(wire, store, rank, size, timeout)
    return ProcessComms(wire, store, rank, size, timeout)


def connect(world: World) -> None:
    """What a transport needs after torch.distributed's default group is there: symm maps the memory of all ranks."""
    if world.backend != "symm" or world.size == 1:
        return
    from hostir.runtime.comms.symm import SymmComms

    symm = world.comms
    assert isinstance(symm, SymmComms)
    if world.device.type == "cuda":
        from hostir.runtime.comms.symm_shim import CudaFabric
        from hostir.runtime.comms.symm_watch import Watch

        fabric = CudaFabric(world.device, symm.size)
        symm.connect(fabric)
        symm.on_close.append(Watch(symm, fabric).end)  # the GPU waits without the host: somebody must look
    else:
        from hostir.runtime.comms.symm_host import HostFabric

        symm.connect(HostFabric(symm.rank, symm.size, symm.exchange, symm.look))


def torch_backend(transport: str) -> str:
    """The backend of torch.distributed's default group beside ``transport``."""
    return "cpu:gloo,cuda:nccl" if transport == "nccl" else "gloo"


def check_ranks(num_ranks: int, transport: str | None, *, one_gpu: bool) -> None:
    """What ``spawn`` and ``run`` refuse before anything is started."""
    if num_ranks < 1:
        raise InputError("a world has at least one rank", expected="1 or more", got=num_ranks)
    if transport is not None and transport not in TRANSPORTS:
        why = f"it is one of {', '.join(TRANSPORTS)}"
        raise UnsupportedError(f"there is no transport {transport!r} here", refusals={transport: why}, expected=", ".join(TRANSPORTS))
    if one_gpu and transport == "threads":
        cure = 'leave one_gpu out: the threads of a process share its GPU anyway, or use transport="symm"'
        raise UnsupportedError("one_gpu is for ranks that are processes", refusals={"threads": "they are one process"}, cure=cure)
