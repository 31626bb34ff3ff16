"""What became of each rank, and the one error that a user sees for all of them.

When one rank fails the others fail in its wake, often sooner in time. The headline belongs to the rank that failed by itself first;
the echoes come after it.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

from hostir.errors import PeerError, RankError

_HERE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True)
class Report:
    """How one rank failed: ``rank 2: ValueError: …``, ``rank 1 exited with code 9``; ``when`` is in seconds of the wall clock."""

    rank: int
    headline: str
    text: str = ""
    error: BaseException | None = None
    is_echo: bool = False
    when: float = field(default_factory=time.time)


def first_line(error: BaseException) -> str:
    """``ValueError: what it says``."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def of_exception(rank: int, error: BaseException) -> Report:
    """A rank whose function raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("hostir.launch."):
        trace = trace.tb_next  # what started the function is not the user's concern
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    headline = f"rank {rank}: {first_line(error)}"
    if isinstance(error, SystemExit):
        headline = f"rank {rank} exited with code {error.code}"
    return Report(rank, headline, text, error, isinstance(error, PeerError))


def users_part(stacks: str) -> str:
    """Stacks as faulthandler prints them, innermost first, without the frames that started the user's function."""
    threads = []
    for text in stacks.strip().split("\n\n"):
        lines = text.splitlines()
        ours = next((i for i, line in enumerate(lines) if f'File "{_HERE}' in line), len(lines))
        if "in _end_with_parent" not in text:
            threads.append("\n".join(lines[:ours]))
    return "\n".join(threads)


def users_stack(frame: FrameType) -> str:
    """Where a thread is, outermost first, without the frames that started the user's function."""
    frames = traceback.extract_stack(frame)
    first = max((i + 1 for i, f in enumerate(frames) if f.filename.startswith(_HERE)), default=0)
    return "".join(traceback.format_list(frames[first:])).rstrip()


def of_exit(rank: int, code: int) -> Report:
    """A rank whose process ended without a word; a negative ``code`` is a signal."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Report(rank, f"rank {rank} was killed by {name}")
    return Report(rank, f"rank {rank} exited with code {code}")


def of_stuck(rank: int, limit: float | None, where: str = "") -> Report:
    """A rank that was ended: it did not end within ``limit`` seconds, or (None) when another had failed. ``where``: its stacks."""
    when = "after the failure" if limit is None else f"within {limit:g} s"
    return Report(rank, f"rank {rank} did not end {when} and was ended", where, is_echo=limit is None)


def _short(report: Report) -> str:
    return report.headline.removeprefix(f"rank {report.rank}").lstrip(": ")


def rank_error(reports: Sequence[Report]) -> RankError:
    """One error for all reports; its ``__cause__`` is the first rank's own exception, where there is one."""
    first = min(reports, key=lambda r: (r.is_echo, r.when))
    texts = {r.rank: f"{_short(r)}\n{r.text}".rstrip() for r in reports}
    texts[first.rank] = first.text or _short(first)
    out = RankError(first.headline, rank=first.rank, ranks=texts)
    out.__cause__ = first.error
    return out
