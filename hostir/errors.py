"""Every error that hostir raises on purpose, and where in the user's code it came from.

The list is closed (docs/ir.md, "Errors"). An error is made where the mistake is found, with the facts known there; the layers
above add what only they know (the statement, the rank) through ``with_context`` and let the same object travel on. All errors
pickle with their fields, because most of them are born in another process than the one that shows them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Location:
    """A line of the user's source, or of a program's text."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller_location() -> Location | None:
    """The innermost frame outside hostir: the line that the user wrote."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "hostir" and not module.startswith("hostir.") and module != "contextlib":
            return Location(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


class HostIrError(Exception):
    """Base of all. ``str(error)`` is the headline, then one line for each fact that is known."""

    _facts = ("program", "statement", "loc", "rank", "expected", "got", "cure")
    _labels: Mapping[str, str] = {"loc": "at"}

    def __init__(
        self,
        message: str,
        *,
        program: str | None = None,
        statement: str | None = None,
        loc: Location | None = None,
        rank: int | None = None,
        expected: object = None,
        got: object = None,
        cure: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.program = program
        self.statement = statement
        self.loc = loc
        self.rank = rank
        self.expected = None if expected is None else str(expected)
        self.got = None if got is None else str(got)
        self.cure = cure

    def with_context(
        self,
        *,
        program: str | None = None,
        statement: str | None = None,
        loc: Location | None = None,
        rank: int | None = None,
        cure: str | None = None,
    ) -> Self:
        """Fill in facts that are still missing; what is already there was nearer to the mistake and stays."""
        for name, value in (("program", program), ("statement", statement), ("loc", loc), ("rank", rank), ("cure", cure)):
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def details(self) -> list[str]:
        """The lines under the headline."""
        lines = []
        for name in self._facts:
            value = getattr(self, name)
            if value is not None:
                label = self._labels.get(name, name)
                lines.append(f"  {label}: {'@' if name == 'program' else ''}{value}")
        return lines

    def __str__(self) -> str:
        return "\n".join([self.message, *self.details()])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[HostIrError], args: tuple[Any, ...], state: dict[str, Any]) -> HostIrError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class BuildError(HostIrError):
    """A program that cannot be built: raised at the line that wrote the mistake."""


class ParseError(HostIrError):
    """Text that is not a program; ``line`` and ``column`` count from 1 and the message shows the place with a caret."""

    def __init__(self, message: str, *, line: int, column: int, text: str, file: str = "<text>", **facts: Any) -> None:
        caret = f"{text}\n{''.join(c if c == chr(9) else ' ' for c in text[: column - 1])}^"
        super().__init__(f"{file}:{line}:{column}: {message}\n{caret}", **facts)
        self.line = line
        self.column = column
        self.text = text


class UnitTraceError(HostIrError):
    """A unit that cannot be traced into a Fusion."""


class VerifyError(HostIrError):
    """A program that is not right for every rank; ``diagnostics`` holds one text for each finding."""

    def __init__(self, message: str, *, diagnostics: Sequence[Any] = (), **facts: Any) -> None:
        super().__init__(message, **facts)
        self.diagnostics = list(diagnostics)

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"- {d}" for d in self.diagnostics), *self.details()])


class UnsupportedError(HostIrError):
    """No executor takes this fusion; ``refusals`` maps each executor's name to its reason."""

    def __init__(self, message: str, *, refusals: Mapping[str, str] | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.refusals = dict(refusals or {})

    def __str__(self) -> str:
        return "\n".join([self.message, *(f"  {name}: {why}" for name, why in self.refusals.items()), *self.details()])


class MixedFusionError(HostIrError):
    """A fusion that mixes communication and computation and so belongs to no single executor."""


class NotCompiledError(HostIrError):
    """``run`` before ``compile``."""


class InputError(HostIrError, ValueError):
    """A call refused before it started: nothing was written."""


class RankMismatchError(HostIrError):
    """Ranks disagree: on the program, on a shape, on a communication."""


class PeerError(HostIrError):
    """Another rank failed or died; ``ranks`` says which."""

    def __init__(self, message: str, *, ranks: Sequence[int] = (), **facts: Any) -> None:
        super().__init__(message, **facts)
        self.ranks = tuple(ranks)


class CommTimeout(HostIrError, TimeoutError):
    """A communication that did not end in time; ``ranks`` are those that never arrived, where that is known."""

    def __init__(self, message: str, *, ranks: Sequence[int] = (), **facts: Any) -> None:
        super().__init__(message, **facts)
        self.ranks = tuple(ranks)


class PlanError(HostIrError):
    """No memory or stream plan that keeps the program's meaning."""


class DeviceMemoryError(HostIrError):
    """Out of device memory; the message lists the plan's peak by buffer."""


class RankError(HostIrError):
    """What ``spawn`` and ``hostir run`` raise when ranks fail.

    ``rank`` failed first, ``__cause__`` is its exception where it had one, ``ranks`` maps every rank that failed to its report.
    """

    def __init__(self, message: str, *, ranks: Mapping[int, str] | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.ranks = dict(ranks or {})

    def __str__(self) -> str:
        own = self.ranks.get(self.rank if self.rank is not None else -1)
        parts = [self.message]
        if own and not self.message.endswith(own.strip()):
            parts.append(own.rstrip())
        others = {r: t for r, t in sorted(self.ranks.items()) if r != self.rank}
        if others:
            parts.append("the other ranks:")
            parts += [f"  rank {r}: {text.strip().splitlines()[0] if text.strip() else 'ended'}" for r, text in others.items()]
        return "\n".join(parts)


def debug_level() -> int:
    """``HOSTIR_DEBUG``: 0 silent, 1 passes and cache hits, 2 programs after each pass, 3 each launch."""
    try:
        return int(os.environ.get("HOSTIR_DEBUG", "0"))
    except ValueError:
        return 0
