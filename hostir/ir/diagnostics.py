"""What a check found, in the form that a person reads: the statements with their lines, the ranks, the trip, and the cure.

The same mistake shows up on every rank and in every trip of a loop. ``Findings`` folds those into one diagnostic that lists the ranks
and keeps the first trip; the statements' text is made only when there is something to say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hostir.errors import HostIrError, Location
from hostir.ir.nodes import MAIN, Call, Comm, For, Group, If, Program, Stmt, blocks, every
from hostir.ir.show import Printer, printer
from hostir.types import Var


@dataclass(frozen=True, slots=True)
class Place:
    """One execution of a statement: its text, its source line, the loop indices there, and what it does (``writes %y``)."""

    text: str
    loc: Location | None = None
    indices: tuple[tuple[str, int], ...] = ()
    role: str = ""

    def __str__(self) -> str:
        trip = ", ".join(f"%{name} = {value}" for name, value in self.indices)
        parts = [self.text, f"[{trip}]" if trip else "", f"({self.role})" if self.role else "", f"at {self.loc}" if self.loc else ""]
        return "  ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. ``kind`` is one of form, index, size, unwritten, lifetime, race, mismatch, deadlock.

    ``ranks`` are the world ranks that have it, ``places`` the statements of the first of them, ``count`` how often it was found.
    """

    kind: str
    message: str
    places: tuple[Place, ...] = ()
    ranks: tuple[int, ...] = ()
    cure: str | None = None
    details: tuple[str, ...] = ()
    count: int = 1

    @property
    def statements(self) -> tuple[str, ...]:
        return tuple(p.text for p in self.places)

    @property
    def locs(self) -> tuple[Location | None, ...]:
        return tuple(p.loc for p in self.places)

    @property
    def indices(self) -> tuple[dict[str, int], ...]:
        return tuple(dict(p.indices) for p in self.places)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind, "message": self.message, "ranks": list(self.ranks), "cure": self.cure, "details": list(self.details),
            "count": self.count,
            "places": [{"text": p.text, "at": str(p.loc) if p.loc else None, "indices": dict(p.indices), "role": p.role} for p in self.places],
        }  # fmt: skip

    def __str__(self) -> str:
        where = f" ({show_ranks(self.ranks)})" if self.ranks else ""
        lines = [f"{self.kind}: {self.message}{where}", *(f"  {p}" for p in self.places), *(f"  {d}" for d in self.details)]
        if self.count > 1:
            lines.append(f"  found {self.count} times; the first is shown")
        if self.cure:
            lines.append(f"  cure: {self.cure}")
        return "\n".join(lines)


def show_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 .. 7``, ``ranks 0, 2, 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = sorted(ranks)
    if len(listed) > 2 and listed[-1] - listed[0] == len(listed) - 1:
        return f"ranks {listed[0]} .. {listed[-1]}"
    shown = ", ".join(map(str, listed[:8]))
    return f"ranks {shown}" + (f", … ({len(listed)} in all)" if len(listed) > 8 else "")


class Texts:
    """Text and loops of the statements of one program, made at the first question."""

    def __init__(self, p: Program) -> None:
        self.program = p

    @cached_property
    def _printed(self) -> tuple[Printer, dict[int, str]]:
        pr = printer(self.program)
        return pr, {id(s): next(pr.lines(_head(s))) for s in every(self.program.body)}

    @cached_property
    def _loops(self) -> dict[int, tuple[Var, ...]]:
        return loops_of(self.program)

    def line(self, s: Stmt) -> str:
        """The first line of a statement, as the program prints it."""
        return self._printed[1].get(id(s), "")

    def bare(self, s: Stmt) -> str:
        """The same without stream and event."""
        self.line(s)
        return next(self._printed[0].lines(replace(s, stream=MAIN, event=None))) if isinstance(s, (Call, Comm)) else self.line(s)

    def var(self, v: Var) -> str:
        """The printed name of a loop index."""
        return self._printed[0].var(v)

    def loops(self, s: Stmt) -> tuple[Var, ...]:
        return self._loops.get(id(s), ())

    def place(self, s: Stmt, at: Sequence[int] = (), role: str = "") -> Place:
        """``at`` holds the values of the loops around ``s``, outermost first."""
        return Place(self.line(s), s.loc, tuple((self.var(v), i) for v, i in zip(self.loops(s), at, strict=False)), role)


def _head(s: Stmt) -> Stmt:
    """The statement without its inner blocks, so that its parts are named in text order."""
    match s:
        case For():
            return replace(s, body=())
        case If():
            return replace(s, then=(), orelse=())
        case Group():
            return replace(s, body=())
        case _:
            return s


def loops_of(p: Program) -> dict[int, tuple[Var, ...]]:
    """By id of a statement: the loop indices that it stands under, outermost first."""
    found: dict[int, tuple[Var, ...]] = {}

    def visit(body: tuple[Stmt, ...], loops: tuple[Var, ...]) -> None:
        for s in body:
            found[id(s)] = loops
            inner = (*loops, s.var) if isinstance(s, For) else loops
            for block in blocks(s):
                visit(block, inner)

    visit(p.body, ())
    return found


class Findings:
    """Collects findings; those with equal keys become one diagnostic with all their ranks."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Diagnostic, set[int], int]] = {}

    def add(self, key: Hashable, ranks: Iterable[int], make: Callable[[], Diagnostic], count: int = 1) -> None:
        """``make`` is called for the first finding with this key only."""
        if (known := self._found.get(key)) is None:
            self._found[key] = (make(), set(ranks), count)
        else:
            known[1].update(ranks)
            self._found[key] = (known[0], known[1], known[2] + count)

    def __len__(self) -> int:
        return len(self._found)

    def all(self) -> tuple[Diagnostic, ...]:
        return tuple(replace(d, ranks=tuple(sorted(ranks)), count=count) for d, ranks, count in self._found.values())


def of_error(kind: str, e: HostIrError, indices: tuple[tuple[str, int], ...] = ()) -> Diagnostic:
    """An error that stopped a check, as a diagnostic."""
    places = (Place(e.statement or "", e.loc, indices),) if e.statement or e.loc else ()
    facts = tuple(f"{name}: {value}" for name, value in (("expected", e.expected), ("got", e.got)) if value is not None)
    return Diagnostic(kind, e.message, places, cure=e.cure, details=facts)
