"""Run a function on N ranks from anywhere: a test, a notebook, a script.

The ranks are threads of this process or processes of their own; either way the function gets its World as the first argument, the
results come back as a list, and a failure on any rank is one RankError here. Nothing outlives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hostir.errors import InputError
from hostir.launch.mps import sharing
from hostir.launch.transport import check_ranks


def spawn(
    fn: Callable[..., Any],
    num_ranks: int,
    transport: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    device: str | torch.device | None = None,
    one_gpu: bool = False,
) -> list[Any]:
    """``fn(world, *args, **kwargs)`` on ``num_ranks`` ranks; the list of results in rank order.

    ``transport``: ``"threads"`` (N threads here; CPU or one GPU), or N processes on this machine over ``"gloo"``, ``"nccl"`` (a GPU for
    each) or ``"symm"`` (each rank addresses the memory of all); default: what suits the devices. ``one_gpu``: all ranks share one GPU and
    run at the same time, under an MPS daemon of this call's own; the default transport is then ``"symm"``. ``fn`` may be any function, a
    lambda or a closure: processes get it, the arguments and the results by value. ``timeout`` (seconds) bounds each communication, not the
    run. ``device``: default a GPU where there is one, else the CPU. Raises RankError when a rank fails: ``.rank`` failed first, ``.ranks``
    holds every failed rank's report, ``__cause__`` is its exception; the other ranks are ended.
    """
    check_ranks(num_ranks, transport, one_gpu=one_gpu)
    if not callable(fn):
        raise InputError("spawn runs a function", expected="fn(world, *args)", got=type(fn).__name__)
    keywords = dict(kwargs or {})
    match transport:
        case "threads":
            from hostir.launch.machine import pick_device
            from hostir.launch.thread_ranks import run_threads

            return run_threads(lambda world: fn(world, *args, **keywords), num_ranks, timeout=timeout, device=pick_device(device, 0))
        case _:
            where = None if device is None else str(device)
            with sharing(num_ranks, one_gpu=one_gpu) as variables:
                return _in_processes(fn, num_ranks, tuple(args), keywords, timeout, where, transport, variables)


def _in_processes(
    fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float, device: str | None,
    transport: str | None, variables: Mapping[str, str],
) -> list[Any]:  # fmt: skip
    from hostir.launch.by_value import dumps_call
    from hostir.launch.crew import Crew
    from hostir.launch.report import rank_error

    payload = dumps_call(fn, (fn, args, kwargs))
    with Crew(num_ranks, device=device, transport=transport, variables=variables) as crew:
        done = crew.run(payload, timeout=timeout, is_last=True)
    if done.reports:
        raise rank_error(list(done.reports.values()))
    return [done.values[r] for r in range(num_ranks)]
