"""Measuring, for every benchmark: versions run in turn, medians over rounds, and what was measured on."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Version = Callable[[], object]


def header(what: str) -> None:
    """Date, device, versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    try:
        import triton

        kernels = f", triton {triton.__version__}"
    except ImportError:
        kernels = ""
    print(f"# {what}: {datetime.date.today()}, {device}, torch {torch.__version__}{kernels}, Python {sys.version.split()[0]}")


def host_us(versions: Mapping[str, Version], *, repeats: int = 40, rounds: int = 41) -> dict[str, list[float]]:
    """Microseconds of host time for one call of every version, round by round. On a GPU the device is idle before each round."""
    times: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(rounds):
        for name, run in versions.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(repeats):
                run()
            times[name].append((time.perf_counter_ns() - start) / repeats / 1e3)
    return times


def gpu_ms(versions: Mapping[str, Version], *, rounds: int = 31, warm: int = 3) -> dict[str, list[float]]:
    """Milliseconds of device time for one call of every version, round by round, between CUDA events."""
    for run in versions.values():
        for _ in range(warm):
            run()
    times: dict[str, list[float]] = {name: [] for name in versions}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(rounds):
        for name, run in versions.items():
            torch.cuda.synchronize()
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def median(values: list[float]) -> float:
    return statistics.median(values)


def row(**facts: Any) -> None:
    """One JSON line."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}))
