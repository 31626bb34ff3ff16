"""Evaluate a Fusion with ATen, into fresh tensors or into given ones.

All inputs are read before any output is written, whatever shares memory with what. An operation writes an output itself (its ``out=``
form) only where nothing that is still to be read lies there; else the result is computed beside it and copied once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from hostir.dispatch.aliasing import Overlap, overlap, overlaps_itself
from hostir.dispatch.evaluate_code import CODE_FILE, HELPER_NAMES, CodeWriter, Plan
from hostir.errors import HostIrError, InputError
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.show import show_op
from hostir.graph.table import TABLE
from hostir.torch_types import to_torch
from hostir.types import Expr, Leaf, Sym, TensorType, Var, evaluate

Number: TypeAlias = int | float | bool
Value: TypeAlias = torch.Tensor | Number
Function: TypeAlias = Callable[[Sequence[Value], Sequence[torch.Tensor | None]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Copy:
    """Result ``result`` reaches a given output through a copy, because ``why``."""

    result: int
    why: str


class Evaluator:
    """Evaluates one Fusion. Thread-safe; ``copies`` lists the outputs that are copied even when no memory is shared."""

    plans: Final = 64

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._writer = CodeWriter(fusion)
        self._lock = threading.Lock()
        self._made: OrderedDict[Plan, tuple[Callable[..., list[Any]], Mapping[int, Op]]] = OrderedDict()
        self._first = self._producers()
        self._checks = [_Check(p) for p in fusion.params]
        self._symbolic = any(c.fixed is None and c.type is not None for c in self._checks)
        self._outs = [None if (r.value.type is None) else _Check(r.value) for r in fusion.results]
        self.copies: tuple[Copy, ...] = tuple(Copy(j, why) for j in range(len(fusion.results)) if (why := self._why_copied(j)))
        self._in_place = [(j, fusion.params.index(r.alias)) for j, r in enumerate(fusion.results) if r.alias is not None]

    # ---- running

    def run(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Evaluate on ``args`` (tensors and numbers, one for each parameter) and return every result, hidden ones too.

        ``outs`` gives each result's tensor (None: a fresh one); without it results with an alias are written into that argument.
        InputError, before anything is written, when a tensor does not have the type that the fusion says or outputs overlap.
        """
        places = self.places(args, outs)
        self.check(args, places)
        return self._call(self._plan(args, places), args, places)

    def specialise(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None] | None = None) -> Function:
        """A function like ``run`` without its checks, for arguments and outputs that lie in memory as these do.

        It may be kept and called with other numbers and with tensors of the same types that share memory in the same way.
        """
        places = self.places(args, outs)
        self.check(args, places)
        plan = self._plan(args, places)
        function, lines = self._function(plan)
        device = self._device(args, places)

        def run(a: Sequence[Value], o: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            try:
                return function(a, o, device)
            except Exception as e:
                raise _explained(e, lines) from e

        return run

    def places(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None] | None) -> list[torch.Tensor | None]:
        """Where each result goes: given outputs, aliased arguments, None for fresh tensors."""
        if outs is not None:
            if len(outs) != len(self.fusion.results):
                raise InputError(
                    f"{self.fusion.name} has {len(self.fusion.results)} results", expected=f"{len(self.fusion.results)} outputs", got=len(outs)
                )
            return list(outs)
        places: list[torch.Tensor | None] = [None] * len(self.fusion.results)
        if len(args) == len(self.fusion.params):
            for j, i in self._in_place:
                places[j] = args[i]  # type: ignore[assignment]
        return places

    def check(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None]) -> None:
        """InputError unless every argument and output has its type and no two outputs overlap."""
        name = self.fusion.name
        if len(args) != len(self._checks):
            raise InputError(f"{name} takes {len(self._checks)} arguments", expected=len(self._checks), got=len(args))
        bound: dict[str, int] = {}
        for i, (check, a) in enumerate(zip(self._checks, args, strict=True)):
            if not check.fits(a):
                check.bind(a, bound, partial(self._argument, i))
        if bound or self._symbolic:
            for i, (check, a) in enumerate(zip(self._checks, args, strict=True)):
                check.sizes(a, bound, args, self.fusion, partial(self._argument, i))
        for j, (fit, o) in enumerate(zip(self._outs, outs, strict=True)):
            if o is None:
                continue
            if fit is not None and not fit.fits(o):
                fit.bind(o, {}, partial(self._output, j))
                fit.sizes(o, bound, args, self.fusion, partial(self._output, j))
            if overlaps_itself(o):
                raise InputError(f"output {j} of {name} has elements that share memory", got=f"strides {o.stride()}", cure="give a dense tensor")
            for k in range(j):
                if (other := outs[k]) is not None and overlap(o, other) != "no":
                    raise InputError(f"outputs {k} and {j} of {name} share memory", cure="give each result its own tensor")

    def _argument(self, i: int) -> str:
        return f"argument {i} (%{self.fusion.params[i].name}) of {self.fusion.name}"

    def _output(self, j: int) -> str:
        return f"output {j} of {self.fusion.name}"

    def _call(self, plan: Plan, args: Sequence[Value], outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        function, lines = self._function(plan)
        try:
            return function(args, outs, self._device(args, outs))
        except Exception as e:
            raise _explained(e, lines) from e

    def _function(self, plan: Plan) -> tuple[Callable[..., list[Any]], Mapping[int, Op]]:
        if (found := self._made.get(plan)) is not None:
            return found
        with self._lock:
            made = self._made[plan] = self._writer.write(plan)
            while len(self._made) > self.plans:
                self._made.popitem(last=False)
        return made

    def _device(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None]) -> torch.device:
        first = next((t for t in (*args, *outs) if isinstance(t, torch.Tensor)), None)
        return torch.device("cpu") if first is None else first.device

    def source(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None] | None = None) -> str:
        """The Python text that ``run`` executes for these tensors; for reading."""
        places = self.places(args, outs)
        with self._lock:
            self._writer.write(self._plan(args, places))
            return self._writer.source

    helpers: Final[Mapping[str, Any]] = HELPER_NAMES

    def code(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None]) -> tuple[str, Mapping[str, Any], torch.device]:
        """What ``run`` would execute for tensors that lie in memory as these do: the text of ``run(a, o, device)``, the constants that
        it names, and the device. Types are checked as in ``run``."""
        places = self.places(args, outs)
        self.check(args, places)
        with self._lock:
            self._writer.write(self._plan(args, places))
            return self._writer.source, dict(self._writer.constants), self._device(args, places)

    # ---- planning

    def _producers(self) -> dict[int, int]:
        """Result -> position of the operation that could write it itself."""
        found: dict[int, int] = {}
        seen: set[TensorView] = set()
        where = {op.outs[0]: i for i, op in enumerate(self.fusion.ops) if len(op.outs) == 1}
        for j, r in enumerate(self.fusion.results):
            if r.value in where and r.value not in seen and r.value.type is not None:
                op = self.fusion.ops[where[r.value]]
                row = TABLE.get(op.name)
                if row is not None and row.out:
                    found[j] = where[r.value]
            seen.add(r.value)
        return found

    def _why_copied(self, j: int) -> str:
        if j in self._first:
            return ""
        value = self.fusion.results[j].value
        if value.definition is None:
            return f"%{value.name} is an input"
        if any(r.value is value for r in self.fusion.results[:j]):
            return f"%{value.name} is an earlier result too"
        return f"{value.definition.name} has no form that writes into a given tensor"

    def _plan(self, args: Sequence[Value], outs: Sequence[torch.Tensor | None]) -> Plan:
        if all(o is None for o in outs):
            return _NO_OUTPUTS
        shared: dict[int, dict[int, Overlap]] = {}
        for j, o in enumerate(outs):
            if o is not None:
                shared[j] = {i: s for i, a in enumerate(args) if isinstance(a, torch.Tensor) and (s := overlap(a, o)) != "no"}
        return self._arranged(shared, outs)

    def _arranged(self, shared: Mapping[int, Mapping[int, Overlap]], outs: Sequence[torch.Tensor | None]) -> Plan:
        """Which results are written directly, and in which order the rest is copied, given which outputs lie on which arguments."""
        views = self._writer.views
        results = self.fusion.results
        overwritten = {i for s in shared.values() for i in s}
        direct = {j for j in shared if j in self._first and self._may_write(j, shared[j])}
        fresh = frozenset(j for j in range(len(results)) if outs[j] is None and views[results[j].value] & overwritten)
        left = [j for j in shared if j not in direct]
        order = []
        for j in left:
            mine = views[results[j].value]
            before = {i for k in left[: left.index(j)] for i in shared[k]}
            order.append((j, bool(mine & before)))
        return Plan(frozenset(direct), tuple(order), fresh)

    def _may_write(self, j: int, shared: Mapping[int, Overlap]) -> bool:
        """True when the operation of result ``j`` can write the output: nothing is read there afterwards, or by itself in another order."""
        if not shared:
            return True
        views = self._writer.views
        at = self._first[j]
        op = self.fusion.ops[at]
        later = [tv for o in self.fusion.ops[at + 1 :] for tv in o.reads()]
        later += [r.value for k, r in enumerate(self.fusion.results) if k != j]
        if any(views[tv] & shared.keys() for tv in later):
            return False
        pointwise = TABLE[op.name].pointwise
        for tv in op.reads():
            touched = views[tv] & shared.keys()
            same = tv.definition is None and len(touched) == 1 and shared[next(iter(touched))] == "same"
            if touched and not (pointwise and same):
                return False
        return True


_NO_OUTPUTS: Final = Plan()


class _Check:
    """One parameter's or result's type, as quick comparisons."""

    def __init__(self, p: TensorView | Var) -> None:
        self.kind = p.kind if isinstance(p, Var) else None
        self.type: TensorType | None = None if isinstance(p, Var) else p.known
        self.dtype = None if self.type is None else to_torch(self.type.dtype)
        dims = () if self.type is None else self.type.dims
        sizes = [d for d in dims if isinstance(d, int)]
        self.fixed = torch.Size(sizes) if len(sizes) == len(dims) and self.type is not None else None
        self.rank = len(dims)

    def fits(self, a: Value) -> bool:
        """True where one look tells that the type is right: sizes without symbols."""
        return self.fixed is not None and isinstance(a, torch.Tensor) and a.dtype is self.dtype and a.shape == self.fixed

    def bind(self, a: Value, bound: dict[str, int], who: Callable[[], str]) -> None:
        if self.type is None:
            allowed: tuple[type, ...] = {"int": (int,), "float": (int, float), "bool": (bool,)}[self.kind or "int"]
            if not isinstance(a, allowed) or (self.kind == "int" and isinstance(a, bool)):
                raise InputError(f"{who()} is a number", expected=self.kind, got=_described(a))
            return
        if not isinstance(a, torch.Tensor) or a.dtype != self.dtype or a.dim() != self.rank or (self.fixed is not None and a.shape != self.fixed):
            raise InputError(f"{who()} has another type", expected=self.type, got=_described(a))
        if self.fixed is None:
            for d, size in zip(self.type.dims, a.shape, strict=True):
                if isinstance(d, Sym):
                    bound.setdefault(d.name, size)

    def sizes(self, a: Value, bound: Mapping[str, int], args: Sequence[Value], f: Fusion, who: Callable[[], str]) -> None:
        if self.type is None or self.fixed is not None:
            return
        assert isinstance(a, torch.Tensor)

        def env(leaf: Leaf) -> Any:
            if isinstance(leaf, Sym) and leaf.name in bound:
                return bound[leaf.name]
            return args[f.params.index(leaf)] if isinstance(leaf, Var) else None

        for at, (d, size) in enumerate(zip(self.type.dims, a.shape, strict=True)):
            want = evaluate(d, env) if isinstance(d, Expr) else d
            if want != size:
                raise InputError(f"dim {at} of {who()} has another size", expected=f"{want} ({self.type})", got=_described(a))


def _described(a: object) -> str:
    return f"{str(a.dtype).removeprefix('torch.')} of shape {list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a)


def _explained(e: Exception, lines: Mapping[int, Op]) -> Exception:
    """torch's exception with the operation that raised it; out of memory stays what it is."""
    tb = e.__traceback__
    op = None
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == CODE_FILE:
            op = lines.get(tb.tb_lineno)
        tb = tb.tb_next
    if isinstance(e, torch.OutOfMemoryError):
        return e
    if isinstance(e, HostIrError):
        return e.with_context(statement=None if op is None else show_op(op), loc=None if op is None else op.loc)
    return InputError(f"torch could not evaluate it: {e}", statement=None if op is None else show_op(op), loc=None if op is None else op.loc)


def evaluator(fusion: Fusion) -> Evaluator:
    """An Evaluator of ``fusion``, which must be finished: operations added later are not seen."""
    return Evaluator(fusion)
