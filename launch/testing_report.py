"""Many ranks, one test: from what each rank says to what pytest hears, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from hostir.errors import RankError
from hostir.launch import report
from hostir.launch.testing import OnRank

FAILURE: Final = pytest.StashKey["Failure"]()

_RULE: Final = 60


@dataclass(frozen=True)
class Said:
    """How a rank's body ended other than with an exception: ``kind`` is passed, skipped or xfailed."""

    kind: str
    why: str = ""


@dataclass(frozen=True)
class Failure:
    """A failed phase of a test: the exception that pytest gets, and what is shown instead of its traceback."""

    error: BaseException
    shown: RanksRepr


class Crash:
    """Where pytest's summary line takes its text from."""

    def __init__(self, path: str, lineno: int, message: str) -> None:
        self.path = path
        self.lineno = lineno
        self.message = message


class RanksRepr:
    """What is shown of a failure: the rank that failed first in full, then the others."""

    def __init__(self, reports: Sequence[report.Report], num_ranks: int, path: str, line: int) -> None:
        self.first = min(reports, key=lambda r: (r.is_echo, r.when))
        self.others = sorted((r for r in reports if r is not self.first), key=lambda r: r.rank)
        self.num_ranks = num_ranks
        self.reprcrash = Crash(path, line, self.first.headline)

    def lines(self) -> list[tuple[str, bool]]:
        """Each line, and whether it is a title."""
        failed = len(self.others) + 1
        title = f"{self.first.headline}   ({'failed first; ' if self.others else ''}{failed} of {self.num_ranks} ranks failed)"
        out = [(title, True), *((line, False) for line in self.first.text.splitlines())]
        for r in self.others:
            if not r.is_echo and _without_rank(r) == _without_rank(self.first):
                out.append((f"rank {r.rank}: the same", True))
            elif r.is_echo:
                details = [line.strip() for line in str(r.error or "").splitlines() if line.strip().startswith(("statement:", "at:"))]
                out.append((r.headline, True))
                out += [(f"  {line}", False) for line in details or r.text.splitlines()]
            else:
                out += [(r.headline, True), *((line, False) for line in r.text.splitlines())]
        return out

    def toterminal(self, tw: Any) -> None:
        for line, is_title in self.lines():
            if is_title:
                tw.line(f"{line} ".ljust(_RULE, "-"), bold=True, red=True)
            else:
                tw.line(line)

    def __str__(self) -> str:
        return "\n".join(line for line, _ in self.lines())


def _without_rank(r: report.Report) -> str:
    return r.headline.removeprefix(f"rank {r.rank}")


def verdict(said: Mapping[int, Said], reports: Mapping[int, report.Report]) -> BaseException | None:
    """The exception that stands for all ranks, or None when the test has passed.

    A failure counts before a skip, and a skip before those who failed because a rank had left them.
    """
    own = [r for r in reports.values() if not r.is_echo]
    for kind in ("skipped", "xfailed"):
        ranks = [r for r, s in said.items() if s.kind == kind]
        if ranks and not own:
            where = "" if len(ranks) == len(said) + len(reports) else f"rank {ranks[0]}: "
            why = f"{where}{said[ranks[0]].why}"
            return pytest.skip.Exception(why, _use_item_location=True) if kind == "skipped" else pytest.xfail.Exception(why)
    if not reports:
        return None
    error = report.rank_error(list(reports.values()))
    return error.__cause__ or error


def raise_failure(item: pytest.Item, error: BaseException, reports: Mapping[int, report.Report], num_ranks: int) -> None:
    """Raise ``error``; pytest will show ``reports`` for it."""
    if reports:
        path, line, _ = item.location
        item.stash[FAILURE] = Failure(error, RanksRepr(list(reports.values()), num_ranks, path, (line or 0) + 1))
    raise error


def show_ranks(item: pytest.Item, call: pytest.CallInfo[Any], made: pytest.TestReport) -> pytest.TestReport:
    """Put what the ranks said into pytest's report of a failure."""
    failure = item.stash.get(FAILURE, None)
    if failure is not None and made.failed and call.excinfo is not None and call.excinfo.value is failure.error:
        made.longrepr = failure.shown  # type: ignore[assignment]
    return made


def run_body(world: Any, fn: Any, arguments: dict[str, Any]) -> Said:
    """On a rank: the test's own function. The other ranks hear of a skip, which would leave them waiting."""
    try:
        call_body(world, fn, arguments)
    except pytest.skip.Exception as error:
        world.comms.fail(error)
        return Said("skipped", str(error.msg))
    except pytest.xfail.Exception as error:
        world.comms.fail(error)
        return Said("xfailed", str(error.msg))
    return Said("passed")


def call_body(world: Any, fn: Any, arguments: dict[str, Any]) -> None:
    """Call ``fn`` with what belongs to this rank in place of what stands for it."""
    fn(**{name: world if value is WORLD else value.make(world) if isinstance(value, OnRank) else value for name, value in arguments.items()})


class _StandsForTheWorld:
    """The fixture ``world`` in the process that runs pytest: only the ranks have one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RankError(
            f"the fixture world has no {name!r} in this process: the World exists on the ranks, where the test's body runs",
            cure="use it in the test itself, or let the fixture return hostir.launch.testing.on_rank(lambda world: …)",
        )

    def __reduce__(self) -> str:
        return "WORLD"


WORLD: Final = _StandsForTheWorld()
