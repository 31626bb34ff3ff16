"""The race check against other orders: what it accepts gives the same bits in every order, and of what it rejects an order is shown.

Programs here are scheduled and often wrong: right ones with a few syncs moved, dropped or turned round and streams changed, or streams
with syncs thrown in at random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from hostir.errors import BuildError, HostIrError
from hostir.ir.check import check_program
from hostir.ir.nodes import MAIN, Call, Comm, Group, Program, Stmt, Sync, every
from hostir.ir.verify import verify
from hostir.mesh import Mesh
from hostir.passes.schedule import schedule
from hostir.types import Expr
from tests.support.classify import Judge
from tests.support.made import Made
from tests.support.mutations import Block, edited, mutants
from tests.support.programs import generated

KINDS: Final = frozenset({"drop sync", "sync earlier", "sync later", "turn sync", "stream", "event elsewhere", "drop event", "swap statements"})


def disturbed(made: Made, rng: random.Random) -> Program:
    """A scheduled program with up to four changes to its order."""
    p = schedule(made.parse(), made.mesh)
    for _ in range(rng.randrange(5)):
        found = [m for m in mutants(p, made.mesh) if m.kind in KINDS]
        if not found:
            break
        changed = rng.choice(found).make()
        try:
            check_program(changed)
        except BuildError:
            continue
        p = changed
    return p


def thrown_in(made: Made, rng: random.Random) -> Program:
    """The streams as wished for, and syncs anywhere between those whose index is a number."""
    p = made.parse().with_(scheduled=True)
    used = {
        (s.stream.name, s.stream.index): s.stream
        for s in every(p.body)
        if isinstance(s, (Call, Comm, Group)) and not isinstance(s.stream.index, Expr)
    }
    streams = [MAIN, *(s for s in used.values() if s.name != MAIN.name)]
    parts = {id(x) for g in every(p.body) if isinstance(g, Group) for x in g.body}
    often = rng.choice([2, 3, 6])

    def change(body: Block) -> Block:
        out: list[Stmt] = []
        for s in body:
            if isinstance(s, (Call, Comm, Group)) and id(s) not in parts and len(streams) > 1 and rng.randrange(often):
                what, to = rng.sample(streams, 2)
                out.append(Sync(what, to))
            out.append(s)
        return tuple(out)

    return edited(p, change)


@dataclass
class Tally:
    """``shown``: races of which an order differs in bits; ``marked``: those that show once every write marks what it writes;
    ``unseen``: there is no order, and nothing reads what it leaves; ``wrong`` and ``missing`` name seeds where the check is at fault."""

    accepted: int = 0
    races: int = 0
    shown: int = 0
    marked: int = 0
    unseen: int = 0
    others: int = 0
    wrong: list[tuple[int, str]] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def add(self, seed: int, p: Program, mesh: Mesh, runs: int) -> None:
        report = verify(p, mesh, check=False)
        judge = Judge(p, mesh, runs, trusted=True)
        if report.ok:
            self.accepted += 1
            if why := judge.wrong(p):
                self.wrong.append((seed, why))
        elif {d.kind for d in report.diagnostics} == {"race"}:
            self.races += 1
            why = judge.deserved(p, report)
            self.shown += bool(why) and not why.startswith(("same bits", "unseen"))
            self.marked += why.startswith("same bits")
            self.unseen += why.startswith("unseen")
            if not why:
                self.missing.append(seed)
        else:
            self.others += 1


def differential(seeds: range, runs: int, size: int | None = None) -> Tally:
    """Two wild programs a seed."""
    tally = Tally()
    for seed in seeds:
        made, rng = generated(seed, size), random.Random(seed)
        for make in (disturbed, thrown_in):
            try:
                p = make(made, rng)
            except HostIrError as e:
                tally.wrong.append((seed, str(e)))
                continue
            tally.add(seed, p, made.mesh, runs)
    return tally
