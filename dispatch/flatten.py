"""A program for one rank and known sizes, laid out flat: loops unrolled, branches taken, every view and number resolved.

The compiled mode works on this list. Work under way is tracked while flattening, so the flat list also says where each asynchronous
communication is waited for (the rules of the execution page, applied once instead of at every run).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from hostir.dispatch.interpreter import MAIN_LANE, conflict
from hostir.errors import HostIrError, PlanError
from hostir.ir.nodes import (
    Alloc,
    Buffer,
    Call,
    Comm,
    Event,
    Expand,
    Free,
    Group,
    Index,
    Peer,
    Permute,
    Program,
    Reshape,
    Span,
    Sync,
    Transpose,
    View,
    ViewOp,
)
from hostir.ir.show import statement_text
from hostir.ir.walk import Instance, Lane, Region, Scope, Step, Walker
from hostir.types import Operand, substitute

MAX_STEPS = 50_000


@dataclass(frozen=True, slots=True)
class Ref:
    """A view of a root: the operations that lead to it, numbers resolved. ``key`` is equal for equal elements in equal order."""

    root: Instance
    chain: tuple[ViewOp, ...]
    region: Region

    @property
    def key(self) -> tuple[int, object]:
        layout = self.region.layout
        return (self.root.serial, (self.region.peer, layout.offset, layout.sizes, layout.strides))


@dataclass(slots=True)
class Action:
    """One step that does something. ``waits``: actions (by position) whose communication must have ended before this one starts."""

    step: Step
    args: tuple[Ref | object, ...] = ()
    outs: tuple[Ref, ...] = ()
    counts: tuple[Ref | None, Ref | None] = (None, None)
    waits: tuple[int, ...] = ()
    parts: tuple[Action, ...] = ()


@dataclass(slots=True)
class Flat:
    """The whole: actions in order, the roots that the program allocates, where its results are."""

    actions: list[Action] = field(default_factory=list)
    roots: dict[Instance, tuple[int, ...]] = field(default_factory=dict)
    results: list[Ref] = field(default_factory=list)
    inputs: dict[Instance, Buffer] = field(default_factory=dict)
    last_waits: tuple[int, ...] = ()
    lanes: tuple[Lane, ...] = ()


def concrete(op: ViewOp, rank: int, number: Callable[[Operand], int]) -> ViewOp:
    """``op`` on a buffer of ``rank`` dimensions with its host expressions replaced by their values."""
    match op:
        case Index(items):
            return Index(tuple(Span(number(i.start), number(i.stop)) if isinstance(i, Span) else None if i is None else number(i) for i in items))
        case Reshape(dims):
            return Reshape(tuple(number(d) for d in dims))
        case Expand(dims):
            return Expand(tuple(number(d) for d in dims))
        case Peer(other):
            return Peer(number(other))
        case Transpose():
            return Permute(tuple(range(rank))[::-1])
        case Permute():
            return op


def view_text(op: ViewOp) -> str:
    """A resolved view operation as it is written after a tensor."""
    match op:
        case Index(items):
            written = [f"{i.start}:{i.stop}" if isinstance(i, Span) else ":" if i is None else str(i) for i in items]
            return f"[{', '.join(written) or '...'}]"  # no items: all of it
        case Permute(order):
            return f".permute({', '.join(map(str, order))})"
        case Reshape(dims):
            return f".view({', '.join(map(str, dims))})"
        case Expand(dims):
            return f".expand({', '.join(map(str, dims))})"
        case Peer():
            raise AssertionError("outputs are not symmetric")
        case Transpose():
            raise AssertionError("flattened to a permutation")
        case _:
            assert_never(op)


class _Flattener:
    def __init__(self, p: Program, scope: Scope, run_time: Callable[[object], bool]) -> None:
        self.program = p
        self.scope = scope
        self.walker = Walker(p, scope)
        self.flat = Flat()
        self._refs: dict[int, Ref] = {}
        self._pending: dict[int, tuple[Lane, tuple[Region, ...], tuple[Region, ...]]] = {}
        self._events: dict[int, tuple[int, ...]] = {}
        self._group: Action | None = None
        self._group_left = 0
        self._run_time = run_time
        for x in p.params:
            if isinstance(x, Buffer):
                self._root(x, given=True)

    def _root(self, b: Buffer, *, given: bool = False) -> None:
        region = self.walker.region(b)
        self._refs[id(b)] = Ref(region.root, (), region)
        if given:
            self.flat.inputs[region.root] = b
        else:
            self.flat.roots[region.root] = region.layout.sizes

    def run(self) -> Flat:
        lanes: dict[Lane, None] = {}
        for count, step in enumerate(self.walker.steps()):
            if count > MAX_STEPS:
                raise PlanError(f"the program has more than {MAX_STEPS} steps on one rank", program=self.program.name, cure='mode="checked"')
            try:
                self._step(step)
            except HostIrError as e:
                raise e.with_context(program=self.program.name, statement=statement_text(self.program, step.op), loc=step.op.loc) from None
            if not isinstance(step.op, (Alloc, View, Free)):
                lanes[step.stream] = None
                if step.waits is not None:
                    lanes[step.waits] = None
        self.flat.results = [self._refs[id(b)] for b in self.program.results]
        self.flat.last_waits = tuple(self._pending)
        self.flat.lanes = tuple(lane for lane in lanes if lane != MAIN_LANE)
        return self.flat

    def _step(self, step: Step) -> None:
        s = step.op
        match s:
            case View(out, source, op):
                base = self._refs[id(source)]
                self._refs[id(out)] = Ref(base.root, (*base.chain, concrete(op, len(source.type.dims), self.scope.number)), self.walker.region(out))
            case Alloc(out, init):
                self._root(out)
                if init is not None:
                    self._add(Action(step, outs=(self._refs[id(out)],)))
            case Call():
                args = tuple(self._refs[id(a)] if isinstance(a, Buffer) else self._number(a) for a in s.args)
                self._add(Action(step, args, tuple(self._refs[id(b)] for b in s.outs)))
                self._name(s, step)
            case Comm():
                counts = tuple(self._refs[id(c)] if isinstance(c, Buffer) else None for c in (s.send, s.recv))
                args = tuple(self._refs[id(b)] for b in s.ins)
                if s.kind in ("signal", "wait") and s.value is not None:
                    args = (*args, self._number(s.value))
                action = Action(step, args, tuple(self._refs[id(b)] for b in s.outs), (counts[0], counts[1]))
                self._comm(s, step, action)
            case Group():
                self._group = Action(step)
                self._group_left = sum(isinstance(c, Comm) for c in s.body)
            case Sync() | Free():
                self._add(Action(step))
            case _:
                raise AssertionError("the dry run unrolls loops and branches")

    def _number(self, e: Operand | bool) -> Operand | bool:
        """A call's number: known now, or an expression of what only a run knows, the rest filled in."""
        if not self._run_time(e):
            return self.scope.value(e)  # type: ignore[no-any-return]
        return substitute(e, lambda leaf: leaf if self._run_time(leaf) else self.scope.value(leaf))  # type: ignore[no-any-return]

    def _comm(self, c: Comm, step: Step, action: Action) -> None:
        if step.group is None:
            at = self._add(action)
            self._track(at, step, step.reads, step.writes)
            self._name(c, step)
            return
        assert self._group is not None
        self._group.parts += (action,)
        self._group_left -= 1
        if self._group_left == 0:
            whole = self._group
            reads = tuple(r for a in whole.parts for r in a.step.reads)
            writes = tuple(r for a in whole.parts for r in a.step.writes)
            at = self._add(whole, reads, writes)
            self._track(at, step, reads, writes)

    def _name(self, s: Call | Comm, step: Step) -> None:
        """A stream is in order: an event waits for what its stream began before as well."""
        if s.event is not None:
            self._events[id(s.event)] = tuple(at for at, (lane, _, _) in self._pending.items() if lane == step.stream)

    def _track(self, at: int, step: Step, reads: tuple[Region, ...], writes: tuple[Region, ...]) -> None:
        if step.stream != MAIN_LANE and not (isinstance(step.op, Comm) and step.op.kind in ("copy", "signal", "wait")):
            self._pending[at] = (step.stream, reads, writes)

    def _add(self, action: Action, reads: tuple[Region, ...] | None = None, writes: tuple[Region, ...] | None = None) -> int:
        step = action.step
        reads, writes = step.reads if reads is None else reads, step.writes if writes is None else writes

        def needed(at: int) -> bool:
            lane, r, w = self._pending[at]
            if isinstance(step.op, Sync):
                if isinstance(step.op.what, Event):
                    return at in self._events.get(id(step.op.what), ())
                return step.waits == lane and lane != step.stream
            if isinstance(step.op, Call) and lane == step.stream:
                return True
            if self.program.scheduled and lane != step.stream and not isinstance(step.op, Free):
                return False
            return conflict(r, w, reads, writes)

        action.waits = tuple(at for at in self._pending if needed(at))
        for at in action.waits:
            del self._pending[at]
        self.flat.actions.append(action)
        return len(self.flat.actions) - 1


def flatten(p: Program, scope: Scope, run_time: Callable[[object], bool] = lambda _: False) -> Flat:
    """``p`` as rank ``scope.rank`` runs it. ``run_time(e)``: leave this argument of a unit as an expression (it changes by run)."""
    return _Flattener(p, scope, run_time).run()


__all__ = ["MAX_STEPS", "Action", "Flat", "Mapping", "Ref", "concrete", "flatten", "view_text"]
