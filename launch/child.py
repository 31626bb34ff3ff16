"""What a rank process does: take its work by value, run it in its World, send back the result or a report.

A rank does not outlive the process that asked for it: a thread waits for that one's end.
"""

from __future__ import annotations

import os
import pickle
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from typing import Any

import torch.distributed as dist

from hostir.launch.by_value import dumps
from hostir.launch.init import join_torch
from hostir.launch.machine import pick_device, share_cores
from hostir.launch.report import Report, of_exception
from hostir.runtime.comms.gloo import GlooWire
from hostir.runtime.comms.hub import Hub
from hostir.runtime.comms.process import ProcessComms
from hostir.runtime.comms.protocol import Comms
from hostir.runtime.comms.threads import ThreadComms
from hostir.runtime.world import World


def main(payload: bytes, environment: dict[str, str], folder: str, rank: int, num_ranks: int, results: Connection) -> None:
    """One rank of a spawned world. ``payload`` holds the function, its arguments, the device and the timeout (cloudpickle)."""
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, name="hostir: parent", daemon=True).start()
    share_cores(num_ranks)
    try:
        fn, args, kwargs, device, timeout = pickle.loads(payload)
        world = _world(folder, rank, num_ranks, device, timeout)
        with world:
            value = fn(world, *args, **kwargs)
    except SystemExit as error:
        if not error.code:
            _send(results, None)
            return
        _report(results, of_exception(rank, error))
    except BaseException as error:  # noqa: BLE001  the parent raises it
        _report(results, of_exception(rank, error))
    else:
        try:
            _send(results, value)
        except Exception as error:  # noqa: BLE001  the parent raises it
            error.add_note(f"the result of rank {rank} ({type(value).__name__}) cannot be sent to the caller: return tensors or plain data")
            _report(results, of_exception(rank, error))


def _world(folder: str, rank: int, num_ranks: int, device: str | None, timeout: float) -> World:
    comms: Comms
    chosen = pick_device(device, rank)
    if num_ranks == 1:
        return World(0, 1, 0, 1, chosen, "gloo", ThreadComms(Hub(1, timeout), 0, "gloo"))
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    store.set_timeout(timedelta(hours=24))
    comms = ProcessComms(GlooWire(loopback=True), dist.PrefixStore("hostir/0", store), rank, num_ranks, timeout)
    world = World(rank, num_ranks, rank, num_ranks, chosen, "gloo", comms)
    join_torch(world, dist.PrefixStore("torch", store), timeout)
    return world


def _send(results: Connection, value: Any) -> None:
    results.send_bytes(b"+" + dumps(value))


def _report(results: Connection, report: Report) -> None:
    """The report with its exception, or without where that cannot be pickled."""
    fields = (report.rank, report.headline, report.text, report.is_echo, report.when)
    packed: bytes | None = None
    try:
        packed = dumps(report.error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  any class may refuse in its own way
        packed = None
    results.send_bytes(b"-" + pickle.dumps((fields, packed)))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def report_of(message: bytes) -> Report:
    """The other end of ``_report``."""
    (rank, headline, text, is_echo, when), packed = pickle.loads(message)
    error: BaseException | None = None
    if packed is not None:
        try:
            error = pickle.loads(packed)
        except Exception:  # noqa: BLE001  a class that the caller's process does not have
            error = None
    return Report(rank, headline, text, error, is_echo, when)
