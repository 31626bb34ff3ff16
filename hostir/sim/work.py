"""What a call gives the device to do: its kernels, as bytes to move and multiplications to make. No machine in here.

A library operation (a matrix product, attention) is a kernel of its own. What lies between two of them is one fused kernel: it reads
each tensor from outside once and writes each one that is needed outside; what only it uses never reaches memory. Pointwise operations
on one product's result ride in that product's kernel. Views move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hostir.errors import HostIrError, InputError
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.table import TABLE, bound_of
from hostir.ir.cohort import Move
from hostir.ir.nodes import Buffer, Call
from hostir.types import Leaf, Sym, Var, evaluate


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel. ``rule`` is the cost rule of its operations (matmul, attention, reduce, pointwise, gather, copy, source, library).

    ``bytes`` go to or come from the device's memory. A matmul is ``batch`` products [m, k] x [k, n] of ``dtype``; attention is counted as
    the product of queries (m) with keys (n) over both head sizes (k), ``fraction`` of which is needed.
    """

    rule: str
    bytes: float
    elements: float
    dtype: str = ""
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    fraction: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k * self.fraction


@dataclass(slots=True)
class _Value:
    """A tensor of the unit: its sizes where they are known, what it is a view of (itself, if nothing), behind how many library calls."""

    sizes: tuple[int, ...] | None
    itemsize: int
    level: int
    root: _Value | None = None
    group: _Group | None = None
    read: float | None = None  # bytes of an argument, elements of an expanded dimension once
    outside: bool = False  # needed by other kernels, or a result

    @property
    def base(self) -> _Value:
        return self if self.root is None else self.root.base

    @property
    def bytes(self) -> float:
        if self.read is not None:
            return self.read
        return 0.0 if self.sizes is None else float(math.prod(self.sizes) * self.itemsize)


@dataclass(slots=True)
class _Group:
    """The operations that become one kernel."""

    rule: str
    ops: list[Op] = field(default_factory=list)
    reads: list[_Value] = field(default_factory=list)
    writes: list[_Value] = field(default_factory=list)
    product: Work | None = None


_RANK: Final = {"source": 0, "copy": 1, "pointwise": 2, "gather": 3, "reduce": 4}  # the rule of a group is the highest of its operations'


class _Unit:
    """One unit at one call: values with sizes, groups in order."""

    def __init__(self, fusion: Fusion, env: Mapping[object, int], read: Sequence[float]) -> None:
        self.env = env
        self.values: dict[TensorView, _Value] = {}
        self.groups: list[_Group] = []
        self.fused: dict[int, _Group] = {}
        given = iter(read)
        for p in fusion.params:
            if isinstance(p, TensorView):
                self.values[p] = self._value(p, 0)
                self.values[p].read = next(given, None)
        for op in fusion.ops:
            self._op(op)
        for r in fusion.results:
            self.values[r.value].base.outside = True

    def _value(self, tv: TensorView, level: int) -> _Value:
        if tv.type is None:
            return _Value(None, 0, level)
        try:
            sizes = tuple(int(evaluate(d, self._leaf)) for d in tv.type.dims)
        except HostIrError:
            return _Value(None, tv.type.dtype.itemsize, level)
        return _Value(sizes, tv.type.dtype.itemsize, level)

    def _leaf(self, e: Leaf) -> int:
        key: object = e.name if isinstance(e, Sym) else e
        if key not in self.env:
            raise InputError("a size of the unit is not known here")
        return self.env[key]

    def _op(self, op: Op) -> None:
        row = TABLE.get(op.name)
        args = [self.values[tv] for tv in op.reads()]
        level = max((a.level for a in args), default=0)
        rule = "library" if row is None else row.cost
        if rule == "view" and args:
            for out in op.outs:
                self.values[out] = self._value(out, level)
                self.values[out].root = args[0]
            return
        alone = row is None or row.library
        if alone:
            group = _Group(rule)
            self.groups.append(group)
        else:
            group = self._join(op, args, level, rule)
        group.ops.append(op)
        group.reads += args
        for a in args:
            if a.base.group is not group:
                a.base.outside = True
        for out in op.outs:
            v = self.values[out] = self._value(out, level + 1 if alone else level)
            v.group = group
            group.writes.append(v)
        if rule in ("matmul", "attention"):
            group.product = self._product(op, rule)

    def _join(self, op: Op, args: Sequence[_Value], level: int, rule: str) -> _Group:
        """The group of a fused operation: the product whose result it continues, else that of its level."""
        products = {id(g): g for a in args if (g := a.base.group) is not None and g.product is not None and a.level == level}
        if rule == "pointwise" and len(products) == 1 and level not in self.fused:
            (group,) = products.values()
            shape = self._value(op.outs[0], level).sizes
            whole = all(a.sizes == shape for a in args if a.base.group is group)
            if whole and all(a.level < level or a.base.group in (None, group) for a in args):
                return group
        if level not in self.fused:
            self.fused[level] = _Group(rule)
            self.groups.append(self.fused[level])
        group = self.fused[level]
        group.rule = max(group.rule, rule, key=lambda r: _RANK.get(r, 0))
        return group

    def _product(self, op: Op, rule: str) -> Work | None:
        bound = bound_of(op.name, op.args, op.attrs)
        out = self.values[op.outs[0]].sizes
        operands = [self.values[v] for name in ("x", "y", "w", "q", "k", "v") if isinstance(v := bound.get(name), TensorView)]
        sizes = [v.sizes for v in operands]
        first = next(v for name in ("x", "q") if isinstance(v := bound.get(name), TensorView))
        if out is None or any(s is None for s in sizes) or first.type is None:
            return None
        known = [s for s in sizes if s is not None]
        dtype = first.type.dtype.name
        if rule == "attention":
            q, k, v = known
            fraction = 0.5 if bound.get("causal") else 1.0
            return Work(rule, 0, math.prod(out), dtype, q[-2], k[-2], q[-1] + v[-1], math.prod(q[:-2]), fraction)
        x, y = known
        n = out[-1] if len(y) >= 2 and out else 1
        total = math.prod(out)
        m = (x[-2] if len(x) >= 2 else 1) if len(y) > 2 else total // max(n, 1)
        return Work(rule, 0, total, dtype, m, n, x[-1], total // max(m * n, 1))

    def works(self) -> Iterator[Work]:
        for g in self.groups:
            moved, elements = 0.0, 0.0
            roots: dict[int, tuple[_Value, dict[int, float]]] = {}
            for v in g.reads:
                if v.base.group is not g:
                    roots.setdefault(id(v.base), (v.base, {}))[1][id(v)] = v.bytes
            for root, parts in roots.values():
                moved += min(root.bytes, sum(parts.values()))
                elements = max(elements, root.bytes / max(root.itemsize, 1))
            for v in g.writes:
                if v.outside:
                    moved += v.bytes
                elements = max(elements, 0.0 if v.sizes is None else float(math.prod(v.sizes)))
            p = g.product
            if p is not None:
                yield replace(p, bytes=moved)
            else:
                yield Work("library" if g.rule in ("matmul", "attention") else g.rule, moved, elements)


def works(m: Move) -> list[Work]:
    """The kernels of a call, for the sizes that it has in this move."""
    op = m.step.op
    assert isinstance(op, Call)
    fusion = op.unit.fusion
    env: dict[object, int] = {}
    read: list[float] = []
    uses = iter(m.uses)
    for param, arg in zip(fusion.params, op.args, strict=True):
        if isinstance(arg, Buffer):
            u = next(uses)
            assert isinstance(param, TensorView)
            size = math.prod(n if s else min(n, 1) for n, s in zip(u.layout.sizes, u.layout.strides, strict=True))
            read.append(float(size * u.root.buffer.type.dtype.itemsize))
            for d, n in zip(param.known.dims, u.layout.sizes, strict=True):
                if isinstance(d, Sym):
                    env.setdefault(d.name, n)
        elif isinstance(param, Var) and isinstance(arg, int):
            env[param] = arg
    unit = _Unit(fusion, env, read)
    found = list(unit.works())
    outs = [u for u in m.uses if u.write]
    passed = [u for r, u in zip(fusion.results, outs, strict=False) if unit.values[r.value].base.group is None]
    if passed:  # results that are arguments, or views of them, are copied
        size = sum(u.layout.numel * u.root.buffer.type.dtype.itemsize for u in passed)
        found.append(Work("copy", 2.0 * size, float(max(u.layout.numel for u in passed))))
    unknown = [u for r, u in zip(fusion.results, outs, strict=False) if unit.values[r.value].sizes is None]
    if unknown and found:  # what only torch knows the size of: at least it fills the buffers that it is given
        extra = sum(u.layout.numel * u.root.buffer.type.dtype.itemsize for u in unknown)
        found[-1] = replace(found[-1], bytes=found[-1].bytes + extra)
    return found
