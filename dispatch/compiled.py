"""Mode ``compiled``: the flat program as one generated Python function, with everything that can be bound beforehand bound.

What stays between runs: the function's text, temporaries (at stable addresses) and their views. What is bound once for a set of
input tensors and kept while the caller holds them: views of the inputs. What is made at each run: fresh outputs and their views.
Generated names are numbered; a line of the function leads back to the statement that it came from.
"""

from __future__ import annotations

import builtins
import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, Final, Self

import torch

from hostir.dispatch.arena import Arena
from hostir.dispatch.binding import Binding, shares_memory
from hostir.dispatch.bound import Bound, Code
from hostir.dispatch.expr_eval import ExprEvalExecutor
from hostir.dispatch.flatten import Action, Flat, Ref, flatten, view_text
from hostir.dispatch.inline import Late, Namespace, inline
from hostir.dispatch.interpreter import MAIN_LANE, view_of
from hostir.dispatch.lanes import Lanes
from hostir.dispatch.profiled import NO_PROBE, Nodes, Probe
from hostir.dispatch.segments import Segments
from hostir.dispatch.symmetric import SymmetricBuffers
from hostir.errors import HostIrError, VerifyError
from hostir.ir.nodes import Alloc, Call, Comm, Event, Free, Group, Index, Program, Sync, ViewOp
from hostir.ir.show import statement_text
from hostir.ir.walk import Instance, Scope
from hostir.runtime.comms.alone import Alone
from hostir.runtime.comms.protocol import CommCall, Comms
from hostir.torch_types import to_torch
from hostir.types import Epoch, Expr, Leaf, Var, leaves, source

CODE_FILE: Final = "<hostir program>"
MAX_SETS: Final = 4


class CompiledProgram:
    """One rank's program for known sizes on one device."""

    copies_outputs = False  # whether a caller who wants fresh outputs gets copies

    def __init__(
        self, p: Program, scope: Scope, binding: Binding, segments: Segments, comms: Comms | None, *, static_outputs: bool = False,
        symmetric: SymmetricBuffers | None = None,
    ) -> None:  # fmt: skip
        self.program = p
        self.device = binding.device
        self._segments = segments
        self._comms = comms
        self._rank = scope.rank
        self._scalars = [x for x in p.params if isinstance(x, Var)]
        self.flat: Flat = flatten(p, scope, self._changes)
        self.lanes = Lanes(self.flat.lanes, self.device)
        fresh = (r.root for r in self.flat.results if r.root not in self.flat.inputs and r.root.buffer.type.memory != "symmetric")
        self._out_roots = list(dict.fromkeys(fresh))
        inner = [root for root in self.flat.roots if root not in self._out_roots]
        self.symmetric = symmetric
        self._arena = Arena(self.flat, inner, self.device)
        self._inner = {root: self._arena.tensors[root] if root in self._arena.tensors else self._allocate(root) for root in inner}
        self._static = [self._allocate(root) for root in self._out_roots] if static_outputs else None
        self._codes: dict[bool, Code] = {}
        self._sets: OrderedDict[tuple[int, ...], Bound] = OrderedDict()
        self._guard = torch.inference_mode()
        self._alone = None if comms is None or len(scope.mesh.layout) == 1 else Alone(comms, scope.mesh.layout)
        self.bound: Callable[[], Bound | None] = lambda: None  # the set of the last run
        self._given_ids: tuple[int, ...] = ()
        self.probe = NO_PROBE
        self._profiled: Self | None = None

    def _changes(self, e: object) -> bool:
        """Unit arguments that differ from run to run: scalars of the call, and the epoch."""
        return isinstance(e, Expr) and any(isinstance(x, Epoch) or (isinstance(x, Var) and x.role == "scalar") for x in leaves(e))

    def _allocate(self, root: Instance) -> torch.Tensor:
        t = root.buffer.type
        if t.memory == "symmetric" and self.symmetric is not None:
            return self.symmetric.tensor(root)
        host = t.memory == "host"
        pin = host and self.device.type == "cuda"
        with torch.inference_mode(False):
            return torch.empty(self.flat.roots[root], dtype=to_torch(t.dtype), device="cpu" if host else self.device, pin_memory=pin)

    def bound_to(self, out: torch.Tensor) -> bool:
        """Whether the last run wrote straight into ``out``."""
        return self._given_ids == (id(out),)

    @property
    def static_output(self) -> torch.Tensor | None:
        """The one output that all runs share, where the program was compiled so."""
        return None if self._static is None else self._static[0]

    @property
    def single_output(self) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Sizes and dtype where the program has one result and it is a whole buffer of its own."""
        if len(self.flat.results) != 1 or self.flat.results[0].chain or self.flat.results[0].root not in self._out_roots:
            return None
        root = self._out_roots[0]
        return self.flat.roots[root], to_torch(root.buffer.type.dtype)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the temporaries that stay allocated."""
        return self._arena.bytes

    # ---- running

    def profiled(self) -> Self:
        """The same program over the same memory, with code that marks where every action begins and ends."""
        if self._profiled is None:
            made = copy.copy(self)
            made.probe = Probe(self.flat, Nodes(self.program, self._segments, "none" if self._comms is None else self._comms.name))
            made._codes, made._sets = {}, OrderedDict()
            self._profiled = made
        return self._profiled

    def run(
        self, binding: Binding, outputs: Sequence[torch.Tensor] | None, epoch: int, marks: Sequence[Callable[..., None]] = ()
    ) -> list[torch.Tensor]:
        """The results. ``marks`` are the functions that the probe's lines call."""
        inputs = list(binding.tensors.values())
        given = self._static if outputs is None else self._given(binding, outputs)
        roots = [self._allocate(root) for root in self._out_roots] if given is None else given
        bound = self._bind(inputs, given, binding)
        self.bound = weakref.ref(bound)
        self._given_ids = () if given is None else tuple(map(id, given))
        self.execute(bound, roots if given is None else (), [*(binding.scalars[v] for v in self._scalars), *marks], epoch)
        where = dict(zip(self._out_roots, roots, strict=True))
        by_root = {root: binding.tensors[b] for root, b in self.flat.inputs.items()} | where
        results = [self._view(by_root[r.root], r) if r.root in by_root else self._view(self._inner[r.root], r).clone() for r in self.flat.results]
        if outputs is None:
            return results
        late = [(o, r.clone()) for o, r in zip(outputs, results, strict=True) if o is not r]
        for o, r in late:
            o.copy_(r)
        return list(outputs)

    def prepare(self, binding: Binding, outputs: Sequence[torch.Tensor] | None) -> None:
        """What the first run on these tensors would compile and bind."""
        given = self._static if outputs is None else self._given(binding, outputs)
        self._bind(list(binding.tensors.values()), given, binding)

    def replayer(self, bound: Bound, scalars: Sequence[object]) -> Callable[[], None] | None:
        """What runs this set of tensors without going through ``execute``, where there is something."""
        return None

    def execute(self, bound: Bound, fresh: Sequence[torch.Tensor], scalars: Sequence[object], epoch: int) -> None:
        """Run the generated function. Errors leave with their statement, after the other ranks have heard of them."""
        with self._guard:
            try:
                if self._alone is None:
                    bound.function(*fresh, *scalars, epoch)
                else:
                    with self._alone:
                        bound.function(*fresh, *scalars, epoch)
            except BaseException as e:
                self.lanes.restore()
                self._failed(e)
                raise

    def _given(self, binding: Binding, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where results go that the caller provides: the tensor itself where it can be the buffer, else a buffer beside it."""
        roots = []
        for root in self._out_roots:
            whole = [i for i, r in enumerate(self.flat.results) if r.root is root or r.root == root]
            o = outputs[whole[0]]
            alone = len(whole) == 1 and not self.flat.results[whole[0]].chain and root.buffer.type.memory == "global"
            apart = alone and not any(shares_memory(o, t) for t in (*binding.tensors.values(), *(x for x in outputs if x is not o)))
            roots.append(o if apart else self._allocate(root))
        return roots

    def _bind(self, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None, binding: Binding) -> Bound:
        held = [*inputs, *(outs or ())]
        key = tuple(map(id, held)) + ((0,) if outs is None else ())
        found = self._sets.get(key)
        if found is not None and found.fits(held):
            return found
        code = self._code(binding, outs)
        roots = {root: binding.tensors[b] for root, b in self.flat.inputs.items()} | self._inner
        if outs is not None:
            roots |= dict(zip(self._out_roots, outs, strict=True))
        values: dict[str, Any] = {"code": code, "__builtins__": builtins, **code.constants}  # C code that imports looks for them here
        for name, ref in code.views.items():
            values[name] = self._view(roots[ref.root], ref)
        for name, make in list(values.items()):
            if isinstance(make, Late):
                values[name] = make(values)
        sets = self._sets

        def gone() -> None:
            sets.pop(key, None)

        bound = Bound(held, FunctionType(code.code.replace(), values), gone)
        self._sets[key] = bound
        while len(self._sets) > MAX_SETS:
            self._sets.popitem(last=False)
        return bound

    def _view(self, t: torch.Tensor, ref: Ref) -> torch.Tensor:
        if ref.region.peer is not None and self.symmetric is not None:
            return self.symmetric.view(ref.region)
        for op in ref.chain:
            t = view_of(t, op, int)
        return t

    # ---- generating

    def _code(self, binding: Binding, outs: Sequence[torch.Tensor] | None) -> Code:
        fresh = outs is None
        if fresh not in self._codes:
            samples = [self._allocate(root) for root in self._out_roots] if outs is None else list(outs)
            roots = (
                {root: binding.tensors[b] for root, b in self.flat.inputs.items()} | self._inner | dict(zip(self._out_roots, samples, strict=True))
            )
            self._codes[fresh] = _Writer(self, roots, fresh).write()
        return self._codes[fresh]

    def source(self) -> str:
        """The generated function (of the last way of holding outputs); for reading."""
        return next(reversed(self._codes.values())).text if self._codes else ""

    # ---- errors

    def _failed(self, e: BaseException) -> None:
        if self._comms is not None:
            self._comms.fail(e)
        tb, action = e.__traceback__, None
        while tb is not None:
            made = tb.tb_frame.f_globals.get("code") if tb.tb_frame.f_code.co_filename == CODE_FILE else None
            action = made.steps.get(tb.tb_lineno) if isinstance(made, Code) else action
            tb = tb.tb_next
        if action is None:
            return
        text, where = statement_text(self.program, action.step.op), action.step.op.loc
        if isinstance(e, HostIrError):
            e.with_context(program=self.program.name, statement=text, loc=where, rank=self._rank)
        elif not isinstance(e, (KeyboardInterrupt, SystemExit)):
            trip = "".join(f", {k} = {v}" for k, v in action.step.indices.items())
            e.add_note(f"in program @{self.program.name}, statement `{text}`\n  at: {where}\n  rank: {self._rank}{trip}")


class _Writer:
    """Writes the function of a CompiledProgram."""

    def __init__(self, owner: CompiledProgram, samples: Mapping[Instance, torch.Tensor], fresh: bool) -> None:
        self.owner = owner
        self.flat = owner.flat
        self.samples = samples
        self.probe = owner.probe
        self.fresh = {root: f"o{i}" for i, root in enumerate(owner._out_roots)} if fresh else {}
        self.names = Namespace()
        self.views: dict[str, Ref] = {}
        self.lines: list[str] = []
        self.steps: dict[int, Action] = {}
        self._known: dict[object, str] = {}
        self._lane = MAIN_LANE
        self._unbound = self._rows_used()
        self._made: set[str] = set()
        self._scalar_names = {id(v): f"s{i}" for i, v in enumerate(owner._scalars)}

    # ---- names

    def ref(self, r: Ref) -> str:
        """The name of a view; a view of a fresh output is made by a line of its own, at its first use."""
        if (name := self._known.get(r.key)) is not None:
            return name
        if r.root in self.fresh:
            name = self.fresh[r.root]
            for depth, op in enumerate(r.chain):
                name = self._viewed(r.root, name, op, depth)
        else:
            name = f"v{len(self.views)}"
            self.views[name] = r
        self._known[r.key] = name
        return name

    def _viewed(self, root: Instance, base: str, op: ViewOp, depth: int) -> str:
        """One view operation on a fresh output, as a line; rows of a buffer that most of are used come from one ``unbind``."""
        if depth == 0 and isinstance(op, Index) and len(op.items) == 1 and isinstance(op.items[0], int) and root in self._unbound:
            rows = f"rows_{base}"
            if rows not in self._made:
                self._made.add(rows)
                self.lines.append(f"{rows} = {base}.unbind(0)")
            return f"{rows}[{op.items[0]}]"
        name = f"u{len(self.lines)}"
        self.lines.append(f"{name} = {base}{view_text(op)}")
        return name

    def _rows_used(self) -> set[Instance]:
        used: dict[Instance, set[object]] = {}
        for action in self.flat.actions:
            for a in (action, *action.parts):
                for r in (*a.args, *a.outs):
                    if isinstance(r, Ref) and r.root in self.fresh and r.chain and isinstance(r.chain[0], Index) and len(r.chain[0].items) == 1:
                        used.setdefault(r.root, set()).add(str(r.chain[0].items[0]))
        return {root for root, rows in used.items() if 2 * len(rows) >= self.flat.roots[root][0]}

    def sample(self, r: Ref) -> torch.Tensor:
        return self.owner._view(self.samples[r.root], r)

    def number(self, e: Any) -> str:
        """A host number in the function: a literal, or an expression of the run's scalars and epoch."""

        def leaf(x: Leaf) -> str:
            if isinstance(x, Var):
                return self._scalar_names[id(x)]
            assert isinstance(x, Epoch)
            return "epoch"

        return source(e, leaf)

    # ---- the function

    def write(self) -> Code:
        owner = self.owner
        if owner.symmetric is not None:
            self._emit([f"{self.names.constant(owner.symmetric.enter)}()"], None)
        self._emit(owner.lanes.enter(self.names), None)
        for position, action in enumerate(self.flat.actions):
            if isinstance(action.step.op, Sync):  # its waits are what it does
                self._emit(self.probe.begin(position, owner.lanes.on(action.step.stream, self.names)), action)
            self._emit(self._waits(action.waits), action)
            self._action(position, action)
        self._emit(self._waits(self.flat.last_waits), self.flat.actions[-1] if self.flat.actions else None)
        self._emit([*owner.lanes.switch(self._lane, MAIN_LANE, self.names), *owner.lanes.leave(self.names)], None)
        params = ", ".join([*self.fresh.values(), *self._scalar_names.values(), *self.probe.params, "epoch"])
        text = "\n    ".join([f"def run({params}):", *self.lines, "return"]) + "\n"
        module = compile(text, CODE_FILE, "exec")
        code = next(c for c in module.co_consts if isinstance(c, CodeType))
        return Code(code, text, self.names.values, self.views, self.steps)

    def _emit(self, lines: Sequence[str], action: Action | None) -> None:
        for line in lines:
            self.lines.append(line)
            if action is not None:
                self.steps[len(self.lines) + 1] = action

    def _waits(self, positions: Sequence[int]) -> list[str]:
        under_way = [at for at in positions if self._goes_on(self.flat.actions[at])]
        return [line for at in under_way for line in (f"w{at}.wait()", *self.probe.ended(at))]

    def _on(self, position: int, action: Action) -> None:
        lane = action.step.stream
        self._emit(self.owner.lanes.switch(self._lane, lane, self.names), action)
        self._lane = lane
        for a in (action, *action.parts):  # views of fresh outputs are made before the clock starts
            for r in (*a.args, *a.outs, *a.counts):
                if isinstance(r, Ref):
                    self.ref(r)
        self._emit(self.probe.begin(position), action)

    def _goes_on(self, action: Action) -> bool:
        """A communication that is under way after its lines. On a device a transport orders its stream in wait(), so none is."""
        s = action.step.op
        moves = isinstance(s, Group) or (isinstance(s, Comm) and s.kind not in ("copy", "signal", "wait"))
        return moves and action.step.stream != MAIN_LANE and not self.owner.lanes.real

    def _action(self, position: int, action: Action) -> None:
        s = action.step.op
        before = len(self.lines)
        match s:
            case Alloc(_, init):
                self._on(position, action)
                out = self.ref(action.outs[0])
                self._emit([f"{out}.zero_()" if str(init) in ("0", "0.0") else f"{out}.fill_({self.number(init)})"], action)
            case Call():
                self._on(position, action)
                self._call(position, action, s)
            case Comm() if s.kind == "copy":
                self._on(position, action)
                self._copy(action)
            case Comm() if s.kind in ("signal", "wait"):
                self._on(position, action)
                self._flag(position, action, s)
            case Comm() | Group():
                self._on(position, action)
                self._communicate(position, action)
            case Sync(what, _):
                if isinstance(what, Event):
                    self._emit(self.owner.lanes.await_event(id(what), action.step.stream, self.names), action)
                elif action.step.waits is not None:
                    self._emit(self.owner.lanes.sync(action.step.waits, action.step.stream, self.names), action)
            case Free():
                pass
            case _:
                raise AssertionError(s)
        if not self._goes_on(action):
            self._emit(self.probe.end(position, self.owner.lanes.on(action.step.stream, self.names) if isinstance(s, Sync) else ""), action)
        for at in range(before, len(self.lines)):
            self.steps.setdefault(at + 2, action)
        if isinstance(s, (Call, Comm)) and s.event is not None:
            self._emit(self.owner.lanes.record(id(s.event), action.step.stream, self.names), action)

    def _call(self, position: int, action: Action, s: Call) -> None:
        args = [self.ref(a) if isinstance(a, Ref) else self.number(a) for a in action.args]
        outs = [self.ref(o) for o in action.outs]
        tensors = [self.sample(a) if isinstance(a, Ref) else 1 if isinstance(a, Expr) else a for a in action.args]
        ex = self.owner._segments.ready(s.unit, tensors)
        if isinstance(ex, ExprEvalExecutor):
            into = [self.sample(o) for o in action.outs]
            self._emit(inline(ex.evaluator, tensors, into, args, outs, self.names, f"q{position}_"), action)
            return
        bind = getattr(ex, "bind", None)
        static = not any(isinstance(a, Expr) for a in action.args) and not any(
            r.root in self.fresh for r in (*action.args, *action.outs) if isinstance(r, Ref)
        )
        if bind is not None and static:
            name = f"b{position}"
            held = list(zip(args, action.args, strict=True))

            def make(values: Mapping[str, Any]) -> Any:
                return bind([values[n] if isinstance(a, Ref) else a for n, a in held], [values[n] for n in outs])

            self.names.values[name] = Late(make)
            self._emit([f"{name}()"], action)
            return
        run = self.names.constant(ex.execute)
        self._emit([f"{run}(({''.join(a + ', ' for a in args)}), ({''.join(o + ', ' for o in outs)}))"], action)

    def _copy(self, action: Action) -> None:
        source_, out = action.args[0], action.outs[0]
        assert isinstance(source_, Ref)
        a, b = self.sample(source_), self.sample(out)
        aside = ".clone()" if shares_memory(a, b) and source_.root == out.root else ""
        blocking = ", non_blocking=True" if a.device != b.device else ""
        self._emit([f"{self.ref(out)}.copy_({self.ref(source_)}{aside}{blocking})"], action)

    def _flag(self, position: int, action: Action, c: Comm) -> None:
        symmetric = self.owner.symmetric
        assert symmetric is not None
        address = symmetric.address((action.step.writes or action.step.reads)[0])
        value = self.number(action.args[1])
        if c.kind == "signal":
            self._emit([f"{self.names.constant(symmetric.signal)}({address}, {value})"], action)
        else:
            self._emit([f"{self.names.constant(symmetric.wait)}({address}, {value}, {self.names.constant(self._where(position, action))})"], action)

    def _where(self, position: int, action: Action) -> Callable[[], str]:
        """What says which statement, and where in the run, for messages."""
        program, rank, c, indices = self.owner.program, self.owner._rank, action.step.op, dict(action.step.indices)

        def where() -> str:
            at = "".join(f", {k} = {v}" for k, v in indices.items())
            return f"@{program.name}: {statement_text(program, c)} (at {c.loc}, step {position + 1}, rank {rank}{at})"

        return where

    # ---- communication

    def _communicate(self, position: int, action: Action) -> None:
        comms = self.owner._comms
        if comms is None:
            raise VerifyError("a communication, and no other ranks", cure="run under hir.launch.init() or hir.launch.spawn")
        group = isinstance(action.step.op, Group)
        parts = action.parts if group else (action,)
        calls = [self._comm_call(f"{position}_{i}", position, a) for i, a in enumerate(parts)]
        issue = self.names.constant(comms.issue_group if group else comms.issue)
        argument = f"({', '.join(calls)},)" if group else calls[0]
        self._emit([f"w{position} = {issue}({argument})" if self._goes_on(action) else f"{issue}({argument}).wait()"], action)

    def _comm_call(self, tag: str, position: int, action: Action) -> str:
        step, c = action.step, action.step.op
        assert isinstance(c, Comm)
        where = self._where(position, action)

        def call(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], counts: Sequence[torch.Tensor | None]) -> CommCall:
            send, recv = step.counts or (None, None)
            if counts[0] is not None:
                send = tuple(counts[0].tolist())
            if counts[1] is not None:
                recv = tuple(counts[1].tolist())
            return CommCall(
                c.kind, step.team, tuple(ins), tuple(outs), op=c.op, dim=c.dim, split=c.split, cat=c.cat, to=step.to, source=step.source,
                send_counts=send, recv_counts=recv, where=where, step=position + 1, agreed=True,
            )  # fmt: skip

        refs = [r for r in (*action.args, *action.outs, *action.counts) if isinstance(r, Ref)]
        ins = [self.ref(r) for r in action.args if isinstance(r, Ref)]
        outs = [self.ref(r) for r in action.outs]
        counts = [None if r is None else self.ref(r) for r in action.counts]
        if any(counts) or any(r.root in self.fresh for r in refs):
            make = self.names.constant(call)
            return f"{make}(({''.join(n + ', ' for n in ins)}), ({''.join(n + ', ' for n in outs)}), ({', '.join(map(str, counts))}))"
        name = f"m{tag}"
        self.names.values[name] = Late(lambda values: call([values[n] for n in ins], [values[n] for n in outs], (None, None)))
        return name
