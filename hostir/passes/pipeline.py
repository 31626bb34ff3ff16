"""The passes in their order, and ``lower``: a sharded tensor graph becomes a host program.

Each pass is a pure function with a name and options; what it takes and gives has a text. Fusions are annotated, then taken apart; trees
hold their segments in loops; programs are statements. ``HOSTIR_DUMP=dir`` writes one file for each pass, ``HOSTIR_DEBUG=1`` says how long
each took, ``2`` shows the texts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from hostir.errors import BuildError, debug_level
from hostir.graph.fusion import Fusion
from hostir.ir.check import check_program
from hostir.ir.nodes import Program
from hostir.ir.verify import verify
from hostir.ir.walk import resolve_mesh, symbols
from hostir.passes.decompose import decompose_resharding
from hostir.passes.emit import NUM_STREAMS, emit
from hostir.passes.host_loops import host_loops
from hostir.passes.host_sum import host_sum
from hostir.passes.jam import jam
from hostir.passes.memory import memory
from hostir.passes.places import placed
from hostir.passes.plan import plan
from hostir.passes.propagate import propagate as propagate_pass
from hostir.passes.reorder import reorder_sharded
from hostir.passes.segment import Fusible, fusible, segment
from hostir.passes.sizes import bound_symbols
from hostir.passes.streams import streams
from hostir.passes.text import show_annotated
from hostir.passes.tree import Segment, Tree
from hostir.types import Var

Form: TypeAlias = Literal["fusion", "tree", "program"]
Value: TypeAlias = "Fusion | Tree | Program"


@dataclass(frozen=True)
class Pass:
    """A named step. ``options``: names of its keyword arguments; those that are no strings are converted by their default's type."""

    name: str
    takes: Form
    gives: Form
    run: Callable[..., Any]
    options: Mapping[str, Any]


def _propagate(f: Fusion, place: str = "before") -> Fusion:
    return propagate_pass(bound_symbols(f), place)


def _segment(f: Fusion, accepts: Fusible = fusible) -> Tree:
    return segment(placed(f), accepts)


def _streams(p: Program, overlap: str = "auto") -> Program:
    return streams(p, resolve_mesh(p, None), overlap=overlap)


def _memory(p: Program) -> Program:
    return memory(p, resolve_mesh(p, None))


PASSES: Final[tuple[Pass, ...]] = (
    Pass("propagate", "fusion", "fusion", _propagate, {"place": "before"}),
    Pass("decompose-resharding", "fusion", "fusion", decompose_resharding, {"place": "before"}),
    Pass("reorder-sharded", "fusion", "fusion", reorder_sharded, {"layout": "any"}),
    Pass("segment", "fusion", "tree", _segment, {}),
    Pass("host-loops", "tree", "tree", host_loops, {}),
    Pass("host-sum", "tree", "tree", host_sum, {"form": "fused"}),
    Pass("plan", "tree", "tree", plan, {"how": "auto"}),
    Pass("emit", "tree", "program", emit, {"num_streams": NUM_STREAMS}),
    Pass("jam", "program", "program", jam, {"u": 1}),
    Pass("streams", "program", "program", _streams, {"overlap": "auto"}),
    Pass("memory", "program", "program", _memory, {}),
)
LOWERING: Final = tuple(p.name for p in PASSES if p.name not in ("streams", "memory"))


def find(name: str) -> Pass:
    for p in PASSES:
        if p.name == name:
            return p
    raise BuildError(f"there is no pass {name!r}", expected=", ".join(p.name for p in PASSES), got=name)


def lower(
    f: Fusion,
    *,
    plan: str = "auto",
    host_sum: str = "fused",
    jam: int = 1,
    place: str = "before",
    num_streams: int = NUM_STREAMS,
    accepts: Fusible = fusible,
) -> Program:
    """The host program of a fusion whose tensors are laid out over a mesh, walked through by host loops, or both.

    It takes and returns each rank's local shards, in the order of the fusion's inputs and visible outputs. ``plan``: how data moves inside
    host loops (``serial``, ``collective``, ``ring``, ``direct``; ``auto`` chooses). ``host_sum``: ``fused`` adds in the unit that makes the
    terms, ``eager`` by a call of its own; ``jam`` terms are folded into one call. ``place``: whether operands move ``before`` their operation
    or results ``after`` it. ``num_streams``: how many streams trips with collectives take turns on. ``accepts`` says which operations one
    kernel may hold. The program is unscheduled: compiling it places syncs. BuildError where annotations contradict each other, PlanError
    where the plan is impossible.
    """
    options: dict[str, dict[str, Any]] = {
        "propagate": {"place": place},
        "decompose-resharding": {"place": place},
        "segment": {"accepts": accepts},
        "host-sum": {"form": host_sum},
        "plan": {"how": plan},
        "emit": {"num_streams": num_streams},
        "jam": {"u": jam},
    }
    value = run(f, [(find(name), options.get(name, {})) for name in LOWERING])
    assert isinstance(value, Program)
    check_program(value)
    return value


def propagate(f: Fusion) -> Fusion:
    """A copy of ``f`` in which every tensor has the sharding, and the streamed dimensions, that lowering gives it."""
    return _propagate(f)


def segments(f: Fusion, *, plan: str = "auto", accepts: Fusible = fusible) -> tuple[Segment, ...]:
    """The segments of ``f`` in program order: ``.kind`` is communication, view, compute or library, ``.ops`` its operations, ``.nest`` the
    loops around it, ``.how`` a communication's plan."""
    names = LOWERING[: LOWERING.index("plan") + 1]
    tree = run(f, [(find(n), {"accepts": accepts} if n == "segment" else {"how": plan} if n == "plan" else {}) for n in names])
    assert isinstance(tree, Tree)
    return tuple(tree.segments())


def run(value: Value, steps: Sequence[tuple[Pass, Mapping[str, Any]]]) -> Value:
    """Apply passes in order. BuildError where one does not take what the one before gives."""
    folder, level = os.environ.get("HOSTIR_DUMP"), debug_level()
    name = value.fusion.name if isinstance(value, Tree) else value.name
    for number, (step, options) in enumerate(steps, 1):
        if form(value) != step.takes:
            raise BuildError(f"the pass {step.name} takes a {step.takes}", expected=step.takes, got=f"a {form(value)}")
        start = time.perf_counter_ns()
        value = step.run(value, **options)
        taken = (time.perf_counter_ns() - start) / 1e6
        if folder:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{name}.{number:02d}-{step.name}.hir").write_text(f"{text_of(value)}\n", encoding="utf-8")
        if level:
            sys.stderr.write(f"hostir: {name}: {step.name} {taken:.2f} ms\n")
            if level > 1:
                sys.stderr.write(f"{text_of(value)}\n")
            _check(value)
    return value


def _check(value: Value) -> None:
    """Under HOSTIR_DEBUG a program is verified after every pass, where its sizes are known."""
    if (
        isinstance(value, Program)
        and all(a.size is not None for a in value.axes)
        and not symbols(value)
        and not any(isinstance(x, Var) for x in value.params)
    ):
        verify(value)


def form(value: Value) -> Form:
    return "fusion" if isinstance(value, Fusion) else "tree" if isinstance(value, Tree) else "program"


def text_of(value: Value) -> str:
    return show_annotated(value) if isinstance(value, Fusion) else str(value)
