"""How a program is run while a profile is on: the same steps, each between two marks.

The interpreter tells a ``StepRecorder`` of every step. The compiled mode has a second generated function, made at the first profiled
run, in which a ``Probe`` has put lines round every action; the one that runs without a profile stays as it is. Which steps count, and
what each reads and writes, is said once, in ``Nodes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from hostir.dispatch.binding import Binding
from hostir.dispatch.flatten import Flat
from hostir.dispatch.interpreter import Interpreter
from hostir.dispatch.segments import Segments
from hostir.ir.nodes import Alloc, Call, Comm, Program, Stmt, Sync, every
from hostir.ir.regions import Layout
from hostir.ir.show import UnitNames, statement_text
from hostir.ir.walk import Lane, Region, Step
from hostir.runtime.comms.protocol import Work
from hostir.runtime.profile import Profile
from hostir.runtime.recording import Node, Run

if TYPE_CHECKING:
    from hostir.dispatch.compiled import CompiledProgram


def lane_name(lane: Lane) -> str:
    """``comm``, ``s[2]``."""
    name, index = lane
    return name if index is None else f"{name}[{index}]"


def _elements(layout: Layout) -> int:
    """How many elements a view shows; those of an expanded dimension once."""
    return math.prod(n if stride else min(n, 1) for n, stride in zip(layout.sizes, layout.strides, strict=True))


def region_bytes(regions: Iterable[Region]) -> int:
    """Bytes of the regions; one that is named twice counts once."""
    return sum(_elements(r.layout) * r.root.buffer.type.dtype.itemsize for r in dict.fromkeys(regions))


class Nodes:
    """What the steps of one program are called in a profile."""

    def __init__(self, p: Program, segments: Segments, transport: str) -> None:
        self._program = p
        self._segments = segments
        self._transport = transport
        self._texts: dict[int, str] = {}
        self._names = UnitNames()
        for s in every(p.body):
            if isinstance(s, Call):
                self._names(s.unit)

    def of(self, step: Step) -> Node | None:
        """The node of a step, or None for one that does nothing at run time (views, frees, memory that is not filled)."""
        s = step.op
        match s:
            case Call():
                return self._segment(step, s)
            case Comm():
                return self._communication(step, s)
            case Sync():
                return Node(self._text(s), "host", lane_name(step.stream), program=self._program.name, args=self._place(step))
            case Alloc(_, init) if init is not None:
                size = region_bytes(step.writes)
                args = {**self._place(step), "output_bytes": size}
                return Node(self._text(s), "host", lane_name(step.stream), program=self._program.name, output_bytes=size, args=args)
            case _:
                return None

    def _segment(self, step: Step, s: Call) -> Node:
        reads = step.reads if s.awaits is None else step.reads[:-1]
        return Node(
            self._names(s.unit), "segment", lane_name(step.stream), key=self._names(s.unit), program=self._program.name,
            input_bytes=region_bytes(reads), output_bytes=region_bytes(step.writes), labels=self._segments.executor(s.unit),
            args=self._place(step),
        )  # fmt: skip

    def _communication(self, step: Step, s: Comm) -> Node:
        local = s.kind == "copy"
        reads, writes = step.reads[: len(s.ins)], step.writes
        sent, received = region_bytes(reads), region_bytes(writes)
        if step.counts is not None:
            sent, received = (_rows(r, sum(n)) for r, n in zip((reads, writes), step.counts, strict=True))
        return Node(
            s.kind, "copy" if local else "communication", lane_name(step.stream), key=self._text(s), program=self._program.name,
            input_bytes=sent, output_bytes=received, comm=s.kind, team=step.team, transport="memory" if local else self._transport,
            args=self._place(step),
        )  # fmt: skip

    def _place(self, step: Step) -> dict[str, object]:
        args: dict[str, object] = {"statement": self._text(step.op)}
        if step.indices:
            args["indices"] = dict(step.indices)
        if step.op.loc is not None:
            args["at"] = str(step.op.loc)
        return args

    def _text(self, s: Stmt) -> str:
        if id(s) not in self._texts:
            self._texts[id(s)] = statement_text(self._program, s)
        return self._texts[id(s)]


def _rows(regions: Sequence[Region], num: int) -> int:
    """Bytes of the first ``num`` rows."""
    if not regions:
        return 0
    (r,) = regions
    return num * math.prod(r.layout.sizes[1:]) * r.root.buffer.type.dtype.itemsize


# ------------------------------------------------------------------------------------------------------------- checked mode


class StepRecorder:
    """Hears from the interpreter when a step begins and when it has ended."""

    def __init__(self, run: Run, nodes: Nodes) -> None:
        self._run = run
        self._nodes = nodes
        self._found: list[Node] = []
        self._open: dict[int, tuple[Step, int]] = {}
        run.nodes = self._found

    def begins(self, step: Step) -> None:
        if (node := self._nodes.of(step)) is not None:
            number = len(self._found)
            self._found.append(node)
            self._open[id(step)] = step, number
            self._run.begin(number)

    def ends(self, step: Step, work: Work | None = None) -> None:
        """``work`` was waited for; without one the step simply is over."""
        if (found := self._open.pop(id(step), None)) is None:
            return
        if work is None:
            self._run.end(found[1])
        else:
            self._run.ended(found[1], work)


def run_checked(profile: Profile, interpreter: Interpreter, segments: Segments) -> None:
    """``interpreter.run()``, recorded."""
    comms = interpreter.comms
    with profile.recording(interpreter.device, interpreter.scope.rank) as run:
        interpreter.listener = StepRecorder(run, Nodes(interpreter.program, segments, "none" if comms is None else comms.name))
        interpreter.run()


# ------------------------------------------------------------------------------------------------------------ compiled mode


class Probe:
    """Lines of generated code that leave marks, by position of the action. They call the parameters that ``params`` names."""

    def __init__(self, flat: Flat | None = None, nodes: Nodes | None = None) -> None:
        self.params: tuple[str, ...] = () if nodes is None else ("begin", "end", "ended")
        self.nodes: list[Node] = []
        self._numbers: dict[int, list[int]] = {}
        for position, action in enumerate(flat.actions if flat is not None else ()):
            found = [] if nodes is None else [n for a in (action.parts or (action,)) if (n := nodes.of(a.step)) is not None]
            self._numbers[position] = list(range(len(self.nodes), len(self.nodes) + len(found)))
            self.nodes += found

    def begin(self, position: int, stream: str = "") -> list[str]:
        """Before the action. ``stream`` is the expression of a stream that is not the current one."""
        return self._lines("begin", position, stream)

    def end(self, position: int, stream: str = "") -> list[str]:
        """After an action that is over when its lines are."""
        return self._lines("end", position, stream)

    def ended(self, position: int) -> list[str]:
        """After the wait for communication ``position``."""
        return self._lines("ended", position, f"w{position}")

    def _lines(self, call: str, position: int, argument: str) -> list[str]:
        return [f"{call}({number}{', ' * bool(argument)}{argument})" for number in self._numbers.get(position, ())]


NO_PROBE: Final = Probe()


def run_compiled(
    profile: Profile, plan: CompiledProgram, binding: Binding, outputs: Sequence[torch.Tensor] | None, epoch: int, rank: int
) -> list[torch.Tensor]:
    """``plan.run``, recorded: its profiled variant with the same memory."""
    variant = plan.profiled()
    with profile.recording(plan.device, rank) as run:
        run.nodes = variant.probe.nodes
        return variant.run(binding, outputs, epoch, (run.begin, run.end, run.ended))
