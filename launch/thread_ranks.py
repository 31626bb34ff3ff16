"""Ranks as threads of this process: each runs the function in its own context, with its own World."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from hostir.errors import CommTimeout
from hostir.launch import report
from hostir.runtime.comms.hub import Hub
from hostir.runtime.comms.threads import ThreadComms
from hostir.runtime.world import World

GRACE: Final = 10.0  # seconds for the other ranks to end after one has failed


def run_threads(fn: Callable[[World], Any], num_ranks: int, *, timeout: float, device: torch.device) -> list[Any]:
    """``fn(world)`` on every rank; the results in rank order, or RankError. ``timeout`` is that of each communication, in seconds."""
    results, reports = try_threads(fn, num_ranks, timeout=timeout, device=device)
    if reports:
        raise report.rank_error(list(reports.values()))
    return [results[r] for r in range(num_ranks)]


def try_threads(
    fn: Callable[[World], Any], num_ranks: int, *, timeout: float, device: torch.device, limit: float | None = None, grace: float = GRACE
) -> tuple[dict[int, Any], dict[int, report.Report]]:
    """Results and reports by rank. After ``limit`` seconds the ranks have ``grace`` seconds to end, as after a failure.

    A thread cannot be ended from outside: one that is stuck in the user's code is reported, with where it is, and left behind.
    """
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
        late = _join(threads, reports, hub, limit, grace)
    except BaseException as error:
        hub.fail(0, error)
        raise
    reports |= {r: report.of_stuck(r, None if reports else limit, where) for r, where in late.items()}
    return results, reports


def _join(threads: list[threading.Thread], reports: dict[int, report.Report], hub: Hub, limit: float | None, grace: float) -> dict[int, str]:
    """Wait for all; where those are that do not end."""
    deadline = None if limit is None else time.monotonic() + limit
    is_last_wait = False
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1 if deadline is None else min(0.1, max(deadline - time.monotonic(), 0.0)))
            is_over = deadline is not None and time.monotonic() > deadline
            if is_over and is_last_wait:
                frames = sys._current_frames()
                stuck = {r: t for r, t in enumerate(threads) if t.is_alive()}
                return {r: report.users_stack(frames[t.ident or 0]) for r, t in stuck.items() if t.ident in frames}
            if is_over and not reports:
                hub.fail(0, CommTimeout(f"the ranks had {limit:g} s"))
            if (is_over or reports) and not is_last_wait:
                is_last_wait = True
                deadline = time.monotonic() + grace
    return {}


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Rank threads share a device, not a stream."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))
