"""Ranks as threads of this process: each runs the function in its own context, with its own World."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from hostir.launch import report
from hostir.runtime.comms.hub import Hub
from hostir.runtime.comms.threads import ThreadComms
from hostir.runtime.world import World

GRACE: Final = 10.0  # seconds for the other ranks to end after one has failed


def run_threads(fn: Callable[[World], Any], num_ranks: int, *, timeout: float, device: torch.device) -> list[Any]:
    """``fn(world)`` on every rank; the results in rank order, or RankError. ``timeout`` is that of each communication, in seconds."""
    hub = Hub(num_ranks, timeout)
    results: dict[int, Any] = {}
    reports: dict[int, report.Report] = {}

    def rank_main(rank: int) -> None:
        hub.enter()
        comms = ThreadComms(hub, rank)
        world = World(rank, num_ranks, rank, num_ranks, device, "threads", comms)
        try:
            with torch.autograd.set_multithreading_enabled(False), _own_stream(device), world:
                results[rank] = fn(world)
        except BaseException as error:  # noqa: BLE001  a rank's failure is reported by the caller's thread
            if isinstance(error, SystemExit) and not error.code:
                results[rank] = None
            else:
                reports[rank] = report.of_exception(rank, error)
                hub.fail(rank, error)
        finally:
            hub.finish(rank)

    threads = []
    for rank in range(num_ranks):
        context = contextvars.copy_context()
        threads.append(threading.Thread(target=context.run, args=(rank_main, rank), name=f"rank {rank}", daemon=True))
    for thread in threads:
        thread.start()
    try:
        _join(threads, reports)
    except BaseException as error:
        hub.fail(0, error)
        raise
    if reports:
        stuck = [r for r, t in enumerate(threads) if t.is_alive()]
        raise report.rank_error([*reports.values(), *(report.of_stuck(r, GRACE) for r in stuck)])
    return [results[r] for r in range(num_ranks)]


def _join(threads: list[threading.Thread], reports: dict[int, report.Report]) -> None:
    deadline = None
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)
            if reports and deadline is None:
                deadline = time.monotonic() + GRACE
            if deadline is not None and time.monotonic() > deadline:
                return  # it is stuck in the user's code; a thread cannot be ended from outside


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Rank threads share a device, not a stream."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))
