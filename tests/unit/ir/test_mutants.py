"""Small mistakes in right programs: none is accepted and wrong. ``benchmarks/mutants.py`` makes many more of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from hostir.ir.nodes import Sync, every
from hostir.ir.verify import Report, verify
from hostir.passes.schedule import schedule
from tests.support import classify
from tests.support.classify import ESCAPED, REJECTED, Judge, Verdict
from tests.support.library import EXAMPLES, Shipped, shipped
from tests.support.mutations import mutants, put
from tests.support.peer_programs import generated_peers
from tests.support.programs import generated

SHIPPED = {s.name: s for s in shipped()}
# Mistakes that make a program wrong, or another one; the rest (moving a sync, adding a trip) is often no mistake at all.
CAUGHT = (
    "drop sync", "turn sync", "sync earlier", "sync later", "drop event", "open group", "drop group", "peer on one rank", "order on one rank",
    "operation on one rank", "drop on one rank", "free early", "dtype", "shape", "stream", "drop statement", "swap statements", "flag value",
    "drop condition", "index", "loop", "peer",
)  # fmt: skip


def judged(s: Shipped, most: int | None = None, runs: int = 20) -> list[Verdict]:
    judge = Judge(s.program, s.mesh, runs, false_alarms=False)
    found = list(mutants(s.program, s.mesh))
    if most is not None and len(found) > most:
        found = random.Random(s.name).sample(found, most)
    return [judge.judge(m) for m in found]


def escaped(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    return [(v.mutant.kind, v.mutant.where, v.why) for v in verdicts if v.outcome == ESCAPED]


@pytest.mark.parametrize("name", SHIPPED)
def test_no_mistake_in_a_program_that_ships_is_accepted_and_wrong(name: str) -> None:
    verdicts = judged(SHIPPED[name])
    assert verdicts
    assert not escaped(verdicts)


@pytest.mark.parametrize("seed", range(8))
def test_no_mistake_in_a_generated_program_is_accepted_and_wrong(seed: int) -> None:
    made = generated(seed)
    assert not escaped(judged(Shipped(str(seed), schedule(made.parse(), made.mesh), made.mesh), most=60))


@pytest.mark.parametrize("seed", range(4))
def test_no_mistake_in_a_program_of_ranks_in_each_others_memory_is_accepted_and_wrong(seed: int) -> None:
    made = generated_peers(seed, 3)
    assert not escaped(judged(Shipped(str(seed), schedule(made.parse(), made.mesh), made.mesh), most=60))


def test_every_kind_of_mistake_is_caught_somewhere() -> None:
    caught: Counter[str] = Counter()
    for name in ("ring", "rotated on 4", "exchange on 3", "rooted on 3", "messages on 4", "push on 3", "grid"):
        s = SHIPPED[name]
        judge = Judge(s.program, s.mesh, 0, false_alarms=False)
        caught.update(m.kind for m in mutants(s.program, s.mesh) if judge.judge(m).outcome == REJECTED)
    assert [kind for kind in CAUGHT if not caught[kind]] == []


@pytest.mark.parametrize(
    ("check", "name", "kind"),
    [
        ("race", "ring", "drop sync"), ("unwritten", "ring_ag_gemm on 4", "drop statement"), ("deadlock", "exchange on 3", "open group"),
        ("mismatch", "ring", "peer on one rank"), ("index", "ring", "index"), ("size", "shares", "shape"),
    ],
)  # fmt: skip
def test_without_a_check_its_mistakes_escape(check: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*args: Any, **keywords: Any) -> Report:
        report = verify(*args, **keywords)
        kept = tuple(d for d in report.diagnostics if d.kind != check)
        return Report(report.program, report.ranks, kept, report.peak_bytes, report.num_steps, report.num_walks)

    s = SHIPPED[name]
    found = [m for m in mutants(s.program, s.mesh) if m.kind == kind]
    judge = Judge(s.program, s.mesh, 40, false_alarms=False)
    assert not escaped([judge.judge(m) for m in found])
    monkeypatch.setattr(classify, "verify", blind)
    assert escaped([judge.judge(m) for m in found])


@pytest.mark.parametrize("seed", range(20, 50))
def test_every_sync_that_scheduling_adds_is_needed(seed: int) -> None:
    made = generated(seed)
    p = made.parse()
    mine = {id(s) for s in every(p.body) if isinstance(s, Sync)}
    scheduled = schedule(p, made.mesh)
    for s in every(scheduled.body):
        if isinstance(s, Sync) and id(s) not in mine:
            assert not verify(put(scheduled, s, []), made.mesh, check=False).ok


def test_every_example_is_among_the_programs_that_ship() -> None:
    folders = [f for f in sorted(EXAMPLES.iterdir()) if (f / "main.py").is_file()]
    assert len(folders) >= 2
    assert sum(name.startswith("example") for name in SHIPPED) >= 2
