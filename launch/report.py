"""What became of each rank, and the one error that a user sees for all of them.

When one rank fails the others fail in its wake, often sooner in time. The headline belongs to the rank that failed by itself first;
the echoes come after it.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from hostir.errors import PeerError, RankError


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


def of_exit(rank: int, code: int) -> Report:
    """A rank whose process ended without a word; a negative ``code`` is a signal."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Report(rank, f"rank {rank} was killed by {name}")
    return Report(rank, f"rank {rank} exited with code {code}")


def of_stuck(rank: int, seconds: float) -> Report:
    """A rank that did not end after another had failed."""
    return Report(rank, f"rank {rank} did not end within {seconds:g} s of the failure and was ended", is_echo=True)


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
