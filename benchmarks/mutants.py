"""How many small mistakes do the checks let through? Every program that ships and random right ones, changed in one place at a time.

    python benchmarks/mutants.py --programs 50 --seed 0
    python benchmarks/mutants.py --programs 0 --differential 300

A mutant that is accepted is run in other orders than program order; one of them that differs is an escape, and there must be none. A
rejected one is run as well: where no order differs the rejection was a false alarm, counted with what excuses it. "same bits": two uses
have no order, and both orders happen to write the same. "unseen": nothing reads what the unordered writes leave. "flag": a wait beside
what fills or frees its flag. "rule": the collectives of a team are on one stream on all members.

``--differential N``: 2 N wild schedules. Of those that are accepted every order must give the same bits; of those with a race an order
that differs is shown, for at least 95 of 100.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostir.passes.schedule import schedule
from tests.support.classify import ESCAPED, Judge, table
from tests.support.differential import differential
from tests.support.library import Shipped, shipped
from tests.support.mutations import mutants
from tests.support.peer_programs import generated_peers
from tests.support.programs import generated


def programs(num: int, seed: int) -> list[Shipped]:
    """What ships, ``num`` generated programs, and a third as many whose ranks touch each other's memory."""
    made = [(f"generated {s}", generated(s)) for s in range(seed, seed + num)]
    made += [(f"generated peers {s}", generated_peers(s)) for s in range(seed, seed + num // 3)]
    return [*shipped(), *(Shipped(name, schedule(m.parse(), m.mesh), m.mesh) for name, m in made)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=50, help="generated programs (a third as many one-sided ones come on top)")
    parser.add_argument("--seed", type=int, default=0, help="of the first generated program")
    parser.add_argument("--runs", type=int, default=200, help="other orders in which an accepted mutant is run")
    parser.add_argument("--most", type=int, default=0, help="mutants of one generated program at most (0: all)")
    parser.add_argument("--differential", type=int, default=0, help="seeds for wild schedules, on which check and orders are compared")
    given = parser.parse_args()
    torch.set_num_threads(1)
    fine = mutation(given) if given.programs else True
    fine &= compare(given) if given.differential else True
    return 0 if fine else 1


def compare(given: argparse.Namespace) -> bool:
    """What the race check says of wild schedules against what their orders say."""
    start = time.perf_counter()
    t = differential(range(given.seed, given.seed + given.differential), given.runs)
    row = {
        "target": "differential", "accepted": t.accepted, "accepted_and_wrong": len(t.wrong), "races": t.races, "shown": t.shown,
        "same_bits": t.marked, "unseen": t.unseen, "not_shown": len(t.missing), "shown_percent": round(100 * t.shown / max(t.races, 1), 1),
        "runs": given.runs, "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    print(
        f"accepted {t.accepted}, of them wrong {len(t.wrong)}; races {t.races}, "
        f"shown {row['shown_percent']} % (same bits {t.marked}, unseen {t.unseen})"
    )
    print(json.dumps(row))
    return not t.wrong and not t.missing and t.shown >= 0.95 * t.races


def mutation(given: argparse.Namespace) -> bool:
    """All mistakes in all programs."""
    start, verdicts, escapes = time.perf_counter(), [], []
    todo = programs(given.programs, given.seed)
    for name, p, mesh in todo:
        judge = Judge(p, mesh, given.runs)
        found = list(mutants(p, mesh))
        if given.most and len(found) > given.most:
            found = random.Random(name).sample(found, given.most)
        for m in found:
            v = judge.judge(m)
            verdicts.append(v)
            if v.outcome == ESCAPED:
                escapes.append(v)
                print(f"ESCAPED from {name}: {m.kind}, {m.where}: {v.why}")
        print(f"{name}: {len(found)} mutants", file=sys.stderr)
    print(table(verdicts))
    alarms = Counter(v.why.partition(":")[0] or "unexplained" for v in verdicts if v.false_alarm)
    by = Counter(check for v in verdicts for check in v.by)
    row = {
        "target": "mutants", "programs": len(todo), "mutants": len(verdicts), "escaped": len(escapes), "by_check": dict(by.most_common()),
        "outcomes": dict(Counter(v.outcome for v in verdicts).most_common()), "false_alarms": dict(alarms.most_common()),
        "runs": given.runs, "seconds": round(time.perf_counter() - start),
    }  # fmt: skip
    print(json.dumps(row))
    return not escapes and not alarms["unexplained"]


if __name__ == "__main__":
    sys.exit(main())
