"""Mode ``checked``: the execution page of docs/ir.md in code. It follows the dry run step by step and does what each step says.

Calls run inline, in program order. A communication on another stream than main is issued and awaited at the first statement that
needs it. Every precondition is checked where it matters, every read must have been written, and fresh memory is NaN. The other
modes are judged against this one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol, assert_never

import torch

from hostir.dispatch.binding import Binding
from hostir.dispatch.symmetric import SymmetricBuffers
from hostir.errors import HostIrError, VerifyError
from hostir.ir.nodes import (
    Alloc,
    Buffer,
    Call,
    Comm,
    Event,
    Expand,
    For,
    Free,
    Group,
    If,
    Index,
    Peer,
    Permute,
    Program,
    Reshape,
    Span,
    Stmt,
    Sync,
    Transpose,
    Unit,
    View,
    ViewOp,
)
from hostir.ir.regions import Written, overlap
from hostir.ir.show import statement_text
from hostir.ir.walk import Instance, Lane, Region, Scope, Step, Walker
from hostir.runtime.comms.alone import Alone
from hostir.runtime.comms.protocol import CommCall, Comms, Work
from hostir.torch_types import to_torch
from hostir.types import Operand

Run = Callable[[Unit, Sequence[object], Sequence[torch.Tensor]], None]
MAIN_LANE: Lane = ("main", None)


class Listener(Protocol):
    """Whoever wants to know what happens: a profile. Between ``begins`` and ``ends`` a step does its work and nothing else."""

    def begins(self, step: Step) -> None: ...

    def ends(self, step: Step, work: Work | None = None) -> None:
        """The step is over; for a communication that was under way: the wait for ``work`` has returned."""


@dataclass(slots=True)
class _Pending:
    """A communication under way; ``parts`` are the steps of a group."""

    work: Work
    step: Step
    parts: tuple[Step, ...]
    lane: Lane
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


def view_of(t: torch.Tensor, op: ViewOp, number: Callable[[Operand], int]) -> torch.Tensor:
    """``op`` applied to a tensor; ranges were checked by the dry run."""
    match op:
        case Index(items):
            dim = 0
            for item in items:
                if isinstance(item, Span):
                    start = number(item.start)
                    t = t.narrow(dim, start, number(item.stop) - start)
                    dim += 1
                elif item is None:
                    dim += 1
                else:
                    t = t.select(dim, number(item))
            return t
        case Transpose():
            return t.permute(tuple(range(t.dim()))[::-1])
        case Permute(order):
            return t.permute(order)
        case Expand(dims):
            return t.expand([number(d) for d in dims])
        case Reshape(dims):
            sizes = [number(d) for d in dims]
            try:
                return t.view(sizes)
            except RuntimeError:
                raise VerifyError(
                    "this reshape would move elements, so it is no view of the tensor that was passed",
                    expected=f"strides that allow {sizes}", got=f"sizes {list(t.shape)}, strides {list(t.stride())}",
                    cure="pass a contiguous tensor, or copy it into a buffer of the program first",
                ) from None  # fmt: skip
        case Peer():
            raise VerifyError("peers' memory is addressed with the transport symm only", cure='spawn(…, transport="symm")')
        case _:
            assert_never(op)


class Interpreter:
    """One run of one program on one rank."""

    def __init__(self, p: Program, scope: Scope, binding: Binding, comms: Comms | None, run_unit: Run) -> None:
        self.program = p
        self.scope = scope
        self.device = binding.device
        self.comms = comms
        self._run_unit = run_unit
        self._walker = Walker(p, scope)
        self._tensors: dict[int, torch.Tensor] = {id(b): t for b, t in binding.tensors.items()}
        self._written: dict[Instance, Written | None] = {self._walker.region(b).root: None for b in binding.tensors}
        self._pending: list[_Pending] = []
        self._events: dict[int, list[_Pending]] = {}
        self._group: list[tuple[Step, CommCall]] = []
        self._group_left = 0
        self._count = 0
        self.preset: dict[int, torch.Tensor] = {}
        self.symmetric: SymmetricBuffers | None = None
        self.listener: Listener | None = None

    def tensor(self, b: Buffer) -> torch.Tensor:
        return self._tensors[id(b)]

    def run(self) -> None:
        """Execute every statement; on exit, also on error, nothing is left under way."""
        with nullcontext() if self.comms is None or len(self.scope.mesh.layout) == 1 else Alone(self.comms, self.scope.mesh.layout):
            self._all()

    def _all(self) -> None:
        step: Step | None = None
        try:
            if self.symmetric is not None:
                self.symmetric.enter(poison=True)
            for step in self._walker.steps():
                self._count += 1
                self._step(step)
            for b in self.program.results:
                self._need_written((self._walker.region(b),), "output")
            self._wait(list(self._pending))
        except BaseException as e:
            self._drain(e)
            if step is not None and not isinstance(e, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                self._explain(e, step)
            raise

    def _drain(self, error: BaseException) -> None:
        if self.comms is not None and self._count:
            self.comms.fail(error)
        for pending in self._pending:
            with suppress(BaseException):
                pending.work.wait()
        self._pending.clear()

    def _explain(self, e: BaseException, step: Step) -> None:
        """Add the place to an error that has none."""
        text, where = statement_text(self.program, step.op), step.op.loc
        if isinstance(e, HostIrError):
            e.with_context(program=self.program.name, statement=text, loc=where, rank=self.scope.rank)
        else:
            at = "".join(f", {k} = {v}" for k, v in step.indices.items())
            e.add_note(f"in program @{self.program.name}, statement `{text}`\n  at: {where}\n  rank: {self.scope.rank}{at}")

    # ---- steps

    def _step(self, step: Step) -> None:
        s: Stmt = step.op
        self._settle(step)
        if not isinstance(s, (Free, Alloc)):
            self._need_written(step.reads, "read")
        if self.listener is not None:
            self.listener.begins(step)
        match s:
            case Alloc(out, init):
                self._tensors[id(out)] = self._allocate(out, init)
                # What peers write is not seen here; the verifier has looked.
                self._written[self._walker.region(out).root] = Written() if out.type.memory != "symmetric" else None
            case Free(buffer):
                del self._tensors[id(buffer)]
            case View(out, source, op):
                if isinstance(op, Peer) and self.symmetric is not None:
                    self._tensors[id(out)] = self.symmetric.view(self._walker.region(out))
                else:
                    self._tensors[id(out)] = view_of(self.tensor(source), op, self.scope.number)
            case Call():
                args = [self.tensor(a) if isinstance(a, Buffer) else self.scope.value(a) for a in s.args]
                self._run_unit(s.unit, args, [self.tensor(b) for b in s.outs])
            case Comm():
                self._communicate(s, step)
            case Group():
                self._group_left = sum(isinstance(c, Comm) for c in s.body)
            case Sync(what, to):
                self._sync(what, self.scope.lane(to), step.waits)
            case For() | If():
                raise AssertionError("the dry run unrolls loops and branches")
            case _:
                assert_never(s)
        if isinstance(s, (Call, Comm)) and s.event is not None:  # a stream is in order: what it began before must have ended too
            self._events[id(s.event)] = [p for p in self._pending if p.lane == step.stream]
        if self.listener is not None and (not isinstance(s, Comm) or s.kind == "copy"):
            self.listener.ends(step)
        for region in step.writes:
            if (written := self._written.get(region.root)) is not None and region.peer is None:
                written.add(region.layout)

    def _allocate(self, b: Buffer, init: float | int | bool | None) -> torch.Tensor:
        t = self.preset.get(id(b))
        if t is None and self.symmetric is not None and b.type.memory == "symmetric":
            t = self.symmetric.tensor(self._walker.region(b).root)
            return t if init is None else t.fill_(init)  # filled with NaN before the ranks met
        if t is None:
            sizes = [self.scope.number(d) for d in b.type.dims]
            host = b.type.memory == "host"
            pinned = host and torch.cuda.is_available()
            t = torch.empty(sizes, dtype=to_torch(b.type.dtype), device="cpu" if host else self.device, pin_memory=pinned)
        if init is not None:
            t.fill_(init)
        elif b.type.dtype.kind in ("float", "complex"):
            t.fill_(float("nan"))
        return t

    def _need_written(self, regions: Sequence[Region], what: str) -> None:
        for region in regions:
            written = self._written.get(region.root)
            if written is not None and region.peer is None and not written.covers(region.layout):
                b = region.root.buffer
                raise VerifyError(
                    f"%{b.name} is {'returned' if what == 'output' else 'read'} where nothing has written it",
                    program=self.program.name, rank=self.scope.rank,
                    cure="write it first, or allocate it with zeros; reduce and gather write on the root only",
                )  # fmt: skip

    # ---- communication

    def _communicate(self, c: Comm, step: Step) -> None:
        if c.kind == "copy":
            source, out = self.tensor(c.ins[0]), self.tensor(c.outs[0])
            same_region = step.reads and step.writes and step.reads[0].root == step.writes[0].root
            out.copy_(source.clone() if same_region and overlap(step.reads[0].layout, step.writes[0].layout) else source)
            return
        if c.kind in ("signal", "wait"):
            assert self.symmetric is not None and step.value is not None
            flag = self.symmetric.address((step.writes or step.reads)[0])
            if c.kind == "signal":
                self.symmetric.signal(flag, step.value)
            else:
                self.symmetric.wait(flag, step.value, lambda: self._where(c, step))
            return
        if self.scope.rank not in step.team:
            raise VerifyError(
                f"rank {self.scope.rank} executes a communication of a team that it is not in", expected=f"a member of {list(step.team)}",
                cure="guard the statement with an if on the rank",
            )  # fmt: skip
        if self.comms is None:
            raise VerifyError("a communication, and no other ranks", cure="run under hir.launch.init() or hir.launch.spawn")
        call = self._resolve(c, step)
        if step.group is None:
            self._track(step, self.comms.issue(call), step.stream, [(step, call)])
            return
        self._group.append((step, call))
        self._group_left -= 1
        if self._group_left == 0:
            parts, self._group = self._group, []
            self._track(step, self.comms.issue_group([c for _, c in parts]), step.stream, parts)

    def _track(self, step: Step, work: Work, lane: Lane, parts: Sequence[tuple[Step, CommCall]]) -> None:
        steps = tuple(s for s, _ in parts)
        if lane == MAIN_LANE:
            work.wait()
            self._ended(steps)
            return
        reads = tuple(r for s, _ in parts for r in s.reads)
        writes = tuple(r for s, _ in parts for r in s.writes)
        pending = _Pending(work, step, steps, lane, reads, writes)
        self._pending.append(pending)

    def _resolve(self, c: Comm, step: Step) -> CommCall:
        counts = step.counts
        if counts is None and c.send is not None:
            given = [tuple(self.tensor(b).tolist()) if isinstance(b, Buffer) else tuple(map(self.scope.number, b or ())) for b in (c.send, c.recv)]
            counts = (given[0], given[1])
        number = self._count

        def where() -> str:
            return self._where(c, step, number)

        return CommCall(
            c.kind, step.team, tuple(self.tensor(b) for b in c.ins), tuple(self.tensor(b) for b in c.outs), op=c.op, dim=c.dim,
            split=c.split, cat=c.cat, to=step.to, source=step.source, send_counts=counts[0] if counts else None,
            recv_counts=counts[1] if counts else None, where=where, step=number, agreed=True,
        )  # fmt: skip

    def _where(self, c: Comm, step: Step, number: int | None = None) -> str:
        at = "".join(f", {k} = {v}" for k, v in step.indices.items())
        text = statement_text(self.program, c)
        return f"@{self.program.name}: {text} (at {c.loc}, step {number or self._count}, rank {self.scope.rank}{at})"

    # ---- order

    def _settle(self, step: Step) -> None:
        """Wait for what this step needs: in an unscheduled program everything that conflicts with it, in a scheduled one what stands
        on its own stream and conflicts, and before a call everything on that call's stream."""
        if isinstance(step.op, (Sync, View, Group, Alloc)) and not (isinstance(step.op, Alloc) and step.writes):
            return

        def needed(p: _Pending) -> bool:
            mine = p.lane == step.stream
            if isinstance(step.op, Call) and mine:
                return True
            if self.program.scheduled and not mine and not isinstance(step.op, Free):
                return False
            return conflict(p.reads, p.writes, step.reads, step.writes)

        self._wait([p for p in self._pending if needed(p)])

    def _sync(self, what: object, to: Lane, source: Lane | None) -> None:
        if isinstance(what, Event):
            self._wait(self._events.get(id(what), []))
        elif source != to:
            self._wait([p for p in self._pending if p.lane == source])

    def _wait(self, pending: Sequence[_Pending]) -> None:
        for p in pending:
            if p in self._pending:
                self._pending.remove(p)
                try:
                    p.work.wait()
                except BaseException as e:
                    self._explain(e, p.step)
                    raise
                self._ended(p.parts, p.work)

    def _ended(self, steps: Sequence[Step], work: Work | None = None) -> None:
        if self.listener is not None:
            for step in steps:
                self.listener.ends(step, work)


def conflict(reads: Sequence[Region], writes: Sequence[Region], later_reads: Sequence[Region], later_writes: Sequence[Region]) -> bool:
    """Two steps touch one element and one of them writes it."""

    def meet(a: Sequence[Region], b: Sequence[Region]) -> bool:
        return any(x.root == y.root and x.peer == y.peer and overlap(x.layout, y.layout) for x in a for y in b)

    return meet(writes, later_reads) or meet(writes, later_writes) or meet(reads, later_writes)
