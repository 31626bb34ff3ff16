"""What becomes of a mutant: rejected, equivalent, another right program, or escaped; and whether a rejection was deserved.

The judge is the program run in other orders (``tests.support.interleave``), not the checks: a program is right when its own order on
every rank gives one result, whatever was in memory before, and every other order that its streams allow gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hostir.errors import BuildError, HostIrError, ParseError
from hostir.ir.check import check_program
from hostir.ir.nodes import Program
from hostir.ir.parse import parse_program
from hostir.ir.race import happens_before
from hostir.ir.verify import verify
from hostir.mesh import Mesh
from tests.support.interleave import Malformed, Outcome, Stuck, World
from tests.support.mutations import Mutant

REJECTED, EQUIVALENT, OTHER, SAME_VALUE, ESCAPED = "rejected", "equivalent", "another value", "another order, same value", "escaped"


@dataclass(frozen=True)
class Verdict:
    """``by``: the check that rejects (build, parse, or kinds of diagnostics). ``why``: what the judge says of it, empty if it is right."""

    mutant: Mutant
    outcome: str
    by: tuple[str, ...] = ()
    why: str = ""
    program: Program | None = None

    @property
    def false_alarm(self) -> bool:
        return self.outcome == REJECTED and self.program is not None and not self.why


@dataclass
class Judge:
    """One original program, against which its mutants are held. ``runs``: how many other orders each is tried in."""

    original: Program
    mesh: Mesh
    runs: int = 200
    false_alarms: bool = True
    _orders: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = self.meaning(self.original).outputs
        assert not self.wrong(self.original), "the original is right"

    def meaning(self, p: Program, garbage: int = 0) -> Outcome:
        """The program in order on every rank."""
        return World(p, self.mesh, serial=True, loose=False).run(garbage=garbage)

    def orders(self, p: Program) -> list[object]:
        return [happens_before(p, r, self.mesh) for r in self.mesh.layout]

    def wrong(self, p: Program) -> str:
        """Why ``p`` is not right, or nothing."""
        try:
            meaning = self.meaning(p)
            if not self.meaning(p, garbage=1).agrees(meaning):
                return "reads what nothing wrote"
            for loose in (True, False):
                world = World(p, self.mesh, loose=loose)
                for seed in range(self.runs // 2):
                    if not world.run(seed, garbage=seed + 2).agrees(meaning):
                        return f"another order (seed {seed}) differs"
                for number in world.suspects():
                    if not world.run(0, delay=number, garbage=2).agrees(meaning):
                        return f"another order (action {number} late) differs"
        except Stuck as e:
            return f"stuck: {e}"
        except (Malformed, ValueError) as e:
            return f"malformed: {e}"
        except HostIrError as e:
            return f"walk: {e.message}"
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
            return Verdict(m, REJECTED, kinds, self.wrong(again) if self.false_alarms else "not asked", again)
        if why := self.wrong(again):
            return Verdict(m, ESCAPED, (), why, again)
        if self.meaning(again).outputs != self.outputs:
            return Verdict(m, OTHER, (), "", again)
        if not self._orders:
            self._orders = self.orders(self.original)
        return Verdict(m, EQUIVALENT if self.orders(again) == self._orders else SAME_VALUE, (), "", again)
