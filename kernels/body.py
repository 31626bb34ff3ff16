"""One kernel as values over a domain: which elements are read, what is computed, what is folded over which axes, what is stored.

``Body.pull`` asks a value of the graph at every point of the domain. Views on the way are steps that end up in the layouts of the loads;
a fold fits only where the domain's reduced axes are what it reduces and the others what it keeps; else ``Unfit`` names it, and the
partition gives it a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from hostir.kernels.folds import FOLDS
from hostir.kernels.layout import Arrange, Cut, Layout, Reshape, Step, chain
from hostir.kernels.nodes import BOOL, I64, Cast, Node, Number, Part, Pick, Point, Position, Reduce, Tensor, View
from hostir.types import DType, Operand, Predicate


@dataclass(frozen=True, slots=True)
class Domain:
    """The points that a kernel visits: axes with sizes, of which ``reduced`` are folded away."""

    sizes: tuple[int, ...]
    reduced: frozenset[int] = frozenset()

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.sizes)) if a not in self.reduced)

    @property
    def folded(self) -> tuple[int, ...]:
        return tuple(sorted(self.reduced))

    def count(self, axes: tuple[int, ...]) -> int:
        n = 1
        for a in axes:
            n *= self.sizes[a]
        return n


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    """An element of a buffer; where ``guard`` is false nothing is read."""

    buffer: int
    layout: Layout
    dtype: DType
    guard: Value | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """A number: in the code, or (``given``, or an expression) an argument."""

    value: Operand | Predicate | bool
    dtype: DType
    given: bool


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """The number that ``layout`` gives at a point: an index."""

    layout: Layout
    dtype: DType = I64


@dataclass(frozen=True, eq=False, slots=True)
class Calc:
    """An expression; see ``nodes.Point``. ``compute`` None: operands as they are."""

    expr: str
    operands: tuple[tuple[str, Value], ...]
    compute: DType | None
    dtype: DType


@dataclass(frozen=True, eq=False, slots=True)
class Rounded:
    x: Value
    dtype: DType


@dataclass(frozen=True, eq=False, slots=True)
class Fold:
    """A fold of ``operands`` over the reduced axes. ``of`` is the reduction that it computes."""

    kind: str
    operands: tuple[Value, ...]
    of: Reduce


@dataclass(frozen=True, eq=False, slots=True)
class Folded:
    """Value number ``index`` of a fold."""

    fold: Fold
    index: int
    dtype: DType


@dataclass(frozen=True, eq=False, slots=True)
class State:
    """Number ``index`` of a fold's collapsed state, over the part of the reduced axes that one program visits."""

    fold: Fold
    index: int
    dtype: DType


Value: TypeAlias = Load | Constant | Place | Calc | Rounded | Folded | State


@dataclass(frozen=True, eq=False, slots=True)
class Store:
    """``value`` as ``dtype`` into a buffer; ``whole``: at every point of the domain, else once for all reduced axes."""

    buffer: int
    layout: Layout
    value: Value
    dtype: DType
    whole: bool


class Unfit(Exception):
    """``reduce`` cannot be computed inside the kernel that was tried."""

    def __init__(self, reduce: Reduce) -> None:
        super().__init__("a reduction needs a kernel of its own")
        self.reduce = reduce


def parts(v: Value) -> tuple[Value, ...]:
    """What ``v`` is computed from."""
    match v:
        case Load():
            return () if v.guard is None else (v.guard,)
        case Calc():
            return tuple(x for _, x in v.operands)
        case Rounded():
            return (v.x,)
        case Folded() | State():
            return v.fold.operands
        case _:
            return ()


@dataclass(slots=True)
class Body:
    """A kernel under construction. ``buffers`` gives each buffer's layout, ``parked`` the reductions that temporaries hold; ``split``: so many
    programs share the reduced axes and each stores its states."""

    domain: Domain
    buffers: Mapping[int, Layout]
    parked: Mapping[Reduce, tuple[Node, ...]]
    split: int = 1
    stores: list[Store] = field(default_factory=list)
    memo: dict[object, Value] = field(default_factory=dict)
    folds: dict[Reduce, Fold] = field(default_factory=dict)

    def pull(self, n: Node, steps: tuple[Step, ...], guard: Value | None = None) -> Value:
        """The value of ``n``, looked at through ``steps``, at a point of the domain."""
        key = (n, steps, guard)
        if (found := self.memo.get(key)) is None:
            found = self.memo[key] = self._pull(n, steps, guard)
        return found

    def _pull(self, n: Node, steps: tuple[Step, ...], guard: Value | None) -> Value:
        match n:
            case Tensor():
                return self._load(n, steps, guard)
            case Number():
                return Constant(n.value, n.dtype, n.given)
            case View():
                return self.pull(n.x, chain(n.step, steps), guard)
            case Point():
                values = tuple((name, self.pull(x, stretched(x.shape, n.shape, steps), guard)) for name, x in n.operands)
                return Calc(n.expr, values, n.compute, n.dtype)
            case Cast():
                return Rounded(self.pull(n.x, steps, guard), n.dtype)
            case Position():
                unit = Layout(n.shape, tuple(int(d == n.dim) for d in range(len(n.shape))))
                return self._unique(Place(through(unit, steps)), "place")
            case Pick():
                return self._pick(n, steps, guard)
            case Part():
                return self._part(n, steps, guard)

    def values(self) -> Iterator[Value]:
        """Everything that the stores need, operands first."""
        seen: set[Value] = set()
        stack: list[tuple[Value, bool]] = [(s.value, False) for s in reversed(self.stores)]
        while stack:
            v, ready = stack.pop()
            if ready:
                yield v
            elif v not in seen:
                seen.add(v)
                stack.append((v, True))
                stack += [(x, False) for x in reversed(parts(v))]

    def layouts(self) -> list[Layout]:
        """How the domain's axes are walked: stores first, then loads and indices."""
        return [s.layout for s in self.stores] + [v.layout for v in self.values() if isinstance(v, (Load, Place))]

    def _unique(self, v: Value, *what: object) -> Value:
        layout = v.layout if isinstance(v, (Load, Place)) else None
        return self.memo.setdefault((*what, layout), v)

    def _load(self, n: Tensor, steps: tuple[Step, ...], guard: Value | None) -> Value:
        return self._unique(Load(n.buffer, through(self.buffers[n.buffer], steps), n.dtype, guard), n.buffer, guard)

    def _pick(self, n: Pick, steps: tuple[Step, ...], guard: Value | None) -> Value:
        size = n.piece.shape[n.dim]
        fill = self.pull(n.fill, steps, guard)
        if size == 0:
            return fill
        place = self.pull(Position(n.dim, n.shape), steps)
        first, end = (Constant(v, I64, True) for v in (n.start, n.start + size))
        inside: Value = Calc("(i >= first) & (i < end)", (("i", place), ("first", first), ("end", end)), I64, BOOL)
        if guard is not None:
            inside = Calc("a & b", (("a", guard), ("b", inside)), None, BOOL)
        piece = self.pull(n.piece, chain(Cut(n.dim, -n.start, 1, n.shape[n.dim]), steps), inside)
        return Calc("tl.where(cond, x, y)", (("cond", inside), ("x", piece), ("y", fill)), None, n.dtype)

    def _part(self, n: Part, steps: tuple[Step, ...], guard: Value | None) -> Value:
        if (held := self.parked.get(n.of)) is not None:
            return self.pull(held[n.index], steps, guard)
        if n.of.count == 1:
            inner = chain(Reshape(n.of.shape), steps)
            names = zip(("x", "place"), n.of.operands, strict=False)
            given = tuple((name, self.pull(x, inner, guard)) for name, x in names)
            return Calc(FOLDS[n.of.kind].one[n.index], given, None, n.dtype)
        fold = self.folds.get(n.of)
        arrange = self._fit(n.of, steps)
        if guard is not None:
            raise Unfit(n.of)
        if fold is None:
            values = tuple(self.pull(x, (Arrange(arrange, self.domain.sizes),)) for x in n.of.operands)
            fold = self.folds.setdefault(n.of, Fold(n.of.kind, values, n.of))
        return Folded(fold, n.index, n.dtype)

    def _fit(self, q: Reduce, steps: tuple[Step, ...]) -> tuple[int | None, ...]:
        """For each axis of the domain the dim of the reduction's operands that it is; Unfit when it is not so."""
        placed = kept_axes(q, through(Layout.row_major(q.shape), steps))
        if placed is None:
            raise Unfit(q)
        sizes, reduced = self.domain.sizes, self.domain.folded
        sources: list[int | None] = [None] * len(sizes)
        rest = [d for d in range(len(q.operands[0].shape)) if d not in q.dims]
        for axis, d in enumerate(placed):
            if sizes[axis] != 1 and (d is None) != (axis in self.domain.reduced):
                raise Unfit(q)
            if d is not None:
                sources[axis] = rest[d]
        axes = [a for a in reduced if sizes[a] != 1]
        dims = [d for d in q.dims if q.operands[0].shape[d] != 1]
        if [sizes[a] for a in axes] != [q.operands[0].shape[d] for d in dims]:
            raise Unfit(q)
        for axis, d in zip(axes, dims, strict=True):
            sources[axis] = d
        return tuple(sources)


def through(layout: Layout, steps: tuple[Step, ...]) -> Layout:
    for step in steps:
        layout = step.apply(layout)
    return layout


def stretched(shape: tuple[int, ...], to: tuple[int, ...], steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """``steps`` of a result of the sizes ``to`` as those of an operand that was broadcast to it."""
    if shape == to:
        return steps
    extra = len(to) - len(shape)
    sources = tuple(d - extra if d >= extra and shape[d - extra] == n else None for d, n in enumerate(to))
    return chain(Arrange(sources, to), steps)


def kept_axes(q: Reduce, placed: Layout) -> tuple[int | None, ...] | None:
    """For each axis the dim of ``q``'s result that runs along it (None: none), or None when some view in between is more than a
    rearrangement. ``placed`` is the result's row-major layout looked at through those views."""
    if placed.inner is not None or placed.offset:
        return None
    own = Layout.row_major(q.shape)
    left = {d: own.strides[d] for d, n in enumerate(q.shape) if n != 1}
    out: list[int | None] = []
    for n, stride in zip(placed.sizes, placed.strides, strict=True):
        if n == 1 or stride == 0:
            out.append(None)
            continue
        d = next((d for d, s in left.items() if s == stride and q.shape[d] == n), None)
        if d is None:
            return None
        del left[d]
        out.append(d)
    return None if left else tuple(out)
