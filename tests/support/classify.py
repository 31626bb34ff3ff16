"""What becomes of a mutant: rejected, equivalent, another right program, or escaped; and whether a rejection was deserved.

The judge is the program run in other orders (``tests.support.interleave``), not the checks: a program is right when its own order on
every rank gives one result, whatever was in memory before, and every other order that its streams allow gives the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hostir.errors import BuildError, HostIrError, ParseError
from hostir.ir.check import check_program
from hostir.ir.nodes import Program
from hostir.ir.parse import parse_program
from hostir.ir.race import happens_before
from hostir.ir.verify import Report, verify
from hostir.mesh import Mesh
from tests.support.actions import Malformed, Stuck
from tests.support.interleave import Outcome, World
from tests.support.mutations import Mutant

REJECTED, EQUIVALENT, OTHER, SAME_VALUE, ESCAPED = "rejected", "equivalent", "another value", "another order, same value", "escaped"

# Two uses without an order that write the same bits; whose result nobody reads; a wait that may end early beside what fills its flag; a
# rule of the language that no order shows.
EXCUSES: Final = ("same bits", "unseen", "flag", "rule")


@dataclass(frozen=True)
class Verdict:
    """``by``: the check that rejects (build, parse, or kinds of diagnostics). ``why``: what the judge says of the mutant, nothing if it
    is right; of a rejected one also what excuses the rejection, see ``EXCUSES``."""

    mutant: Mutant
    outcome: str
    by: tuple[str, ...] = ()
    why: str = ""
    program: Program | None = None

    @property
    def false_alarm(self) -> bool:
        """Rejected, and right in every order that was tried."""
        return self.outcome == REJECTED and (not self.why or self.why.startswith(EXCUSES))


@dataclass
class Judge:
    """One original program, against which its mutants are held. ``runs``: how many other orders each is tried in. ``trusted``: the
    original itself is not looked at."""

    original: Program
    mesh: Mesh
    runs: int = 200
    false_alarms: bool = True
    trusted: bool = False
    _orders: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.trusted:
            return
        self.outputs = self.meaning(self.original).outputs
        assert not self.wrong(self.original), "the original is right"

    def meaning(self, p: Program, garbage: int = 0) -> Outcome:
        """The program in order on every rank."""
        return World(p, self.mesh, serial=True, loose=False).run(garbage=garbage)

    def orders(self, p: Program) -> list[object]:
        return [happens_before(p, r, self.mesh) for r in self.mesh.layout]

    def wrong(self, p: Program, runs: int | None = None, *, tagged: bool = False, suspects: bool = False) -> str:
        """Why ``p`` is not right, or nothing. With ``suspects`` every action that may be late is late once."""
        try:
            meaning = World(p, self.mesh, serial=True, loose=False, tagged=tagged)
            expected = meaning.run()
            if not meaning.run(garbage=1).agrees(expected):
                return "reads what nothing wrote"
            for loose in (True, False):
                world = World(p, self.mesh, loose=loose, tagged=tagged)
                for seed in range((self.runs if runs is None else runs) // 2):
                    if not world.run(seed, garbage=seed + 2).agrees(expected):
                        return f"another order (seed {seed}) differs"
                for number in world.suspects() if suspects else ():
                    if not world.run(0, delay=number, garbage=2).agrees(expected):
                        return f"another order (action {number} late) differs"
        except Stuck as e:
            return f"stuck: {e}"
        except (Malformed, ValueError) as e:
            return f"malformed: {e}"
        except HostIrError as e:
            return f"walk: {e.message}"
        return ""

    def deserved(self, p: Program, report: Report) -> str:
        """Why a rejected program is not right, or what excuses the rejection, or nothing."""
        if why := self.wrong(p, 20) or self.wrong(p, 0, suspects=True):
            return why
        if why := self.wrong(p, 20, tagged=True, suspects=True):
            return f"same bits: {why}"
        if all(d.kind == "mismatch" and d.message.endswith(": stream") for d in report.diagnostics):
            return "rule: a collective is on one stream on all members"
        if all(d.kind == "race" for d in report.diagnostics):
            if all(any(text.lstrip("!e_0123456789= ").startswith(("wait(", "signal(")) for text in d.statements) for d in report.diagnostics):
                return "flag: a wait or signal beside what fills the flag"
            if pairs := World(p, self.mesh).unordered():
                return f"unseen: {pairs[0]}"
        return ""

    def judge(self, m: Mutant) -> Verdict:
        try:
            p = m.make()
            check_program(p)
        except BuildError:
            return Verdict(m, REJECTED, ("build",), "not well-formed")
        try:
            if (again := parse_program(str(p))) != p:
                return Verdict(m, ESCAPED, (), "its text parses back to another program", p)
        except ParseError:
            return Verdict(m, REJECTED, ("parse",), "not well-formed")
        report = verify(again, self.mesh, check=False)
        if not report.ok:
            kinds = tuple(sorted({d.kind for d in report.diagnostics}))
            return Verdict(m, REJECTED, kinds, self.deserved(again, report) if self.false_alarms else "not asked", again)
        if why := self.wrong(again):
            return Verdict(m, ESCAPED, (), why, again)
        if self.meaning(again).outputs != self.outputs:
            return Verdict(m, OTHER, (), "", again)
        if not self._orders:
            self._orders = self.orders(self.original)
        return Verdict(m, EQUIVALENT if self.orders(again) == self._orders else SAME_VALUE, (), "", again)


def table(verdicts: Sequence[Verdict]) -> str:
    """Kinds of mistakes by what became of them; of the rejected ones how many were right in every order that was tried."""
    outcomes = (REJECTED, EQUIVALENT, OTHER, SAME_VALUE, ESCAPED)
    counts: dict[str, Counter[str]] = {}
    for v in verdicts:
        row = counts.setdefault(v.mutant.kind, Counter())
        row[v.outcome] += 1
        row["false alarms"] += v.false_alarm
    columns = (*outcomes, "false alarms")
    lines = [f"{'mistake':<24}" + "".join(f"{name:>{len(name) + 3}}" for name in columns)]
    for kind, row in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        lines.append(f"{kind:<24}" + "".join(f"{row[name]:>{len(name) + 3}}" for name in columns))
    return "\n".join(lines)
