"""Which kernels a segment becomes: as few as fit.

Every result looks for a kernel that visits the same points; a reduction that fits nowhere gets a kernel of its own and a temporary. A
reduction with few results and long rows is split: many programs fold a part each and store their states, which the next kernel merges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hostir.kernels.body import Body, Domain, Folded, Load, State, Store, Unfit, kept_axes, stretched, through
from hostir.kernels.folds import state_types
from hostir.kernels.layout import Arrange, Layout, Reshape, Step, chain
from hostir.kernels.nodes import Cast, Node, Part, Pick, Point, Reduce, Root, Tensor, View, below, register
from hostir.types import DType

Split: TypeAlias = Callable[[Body], int]
"""How many programs share the reduced axes of a kernel (1: no split)."""


@dataclass(frozen=True, slots=True)
class Temporary:
    """A buffer of the segment's own, dense."""

    buffer: int
    dtype: DType
    layout: Layout


@dataclass(slots=True)
class Partition:
    """Places results one after the other; ``bodies`` are the kernels in order, ``temporaries`` what they pass on."""

    buffers: dict[int, Layout]
    split: Split
    bodies: list[Body] = field(default_factory=list)
    temporaries: list[Temporary] = field(default_factory=list)
    parked: dict[Reduce, tuple[Node, ...]] = field(default_factory=dict)
    made_by: dict[int, int] = field(default_factory=dict)

    def run(self, roots: Sequence[Root], outs: Mapping[int, int]) -> None:
        """Place ``roots``; ``outs`` gives the buffer of each result."""
        for root in sorted(roots, key=lambda r: self._rank(r.node)):
            self._place(root.node, outs[root.result], root.dtype)

    def _rank(self, n: Node) -> int:
        """Results that need most of a kernel choose first: normalisations, reductions, then the rest."""
        try:
            tops = list(self._tops(n, ()))
            whole = any(self._stretch(n, q, steps) for q, steps in tops)
        except Unfit:
            return 1
        return 0 if whole else 1 if tops else 2

    def _place(self, n: Node, buffer: int, dtype: DType) -> None:
        while True:
            try:
                if not any(self._join(b, n, buffer, dtype) for b in range(len(self.bodies))):
                    self._fresh(n, buffer, dtype)
                return
            except Unfit as e:
                self._park(e.reduce)

    # ---- kernels that are there

    def _join(self, at: int, n: Node, buffer: int, dtype: DType) -> bool:
        """Store ``n`` in kernel ``at`` when it visits the right points and everything it would read exists by then."""
        body = self.bodies[at]
        if body.split > 1 or 0 in n.shape:
            return False
        for steps, whole in _ways_into(body.domain, n.shape):
            try:
                value = body.pull(n, steps)
            except Unfit:
                continue
            store = Store(buffer, through(self.buffers[buffer], steps), value, dtype, whole)
            inner = _sides(body)
            body.stores.append(store)
            if len(inner | _sides(body)) < 2 and all(self.made_by.get(v.buffer, -1) < at for v in body.values() if isinstance(v, Load)):
                return True
            body.stores.pop()
        return False

    # ---- new kernels

    def _fresh(self, n: Node, buffer: int, dtype: DType) -> None:
        domain, steps = self._domain(n)
        whole = not domain.reduced or not steps
        body = Body(domain, self.buffers, self.parked)
        store = Store(buffer, through(self.buffers[buffer], steps), body.pull(n, steps), dtype, whole)
        body.stores.append(store)
        folds = [v.fold.of for v in body.values() if isinstance(v, Folded) and not v.fold.of.merge]
        if folds and self.split(body) > 1:
            raise Unfit(folds[0])
        self.bodies.append(body)

    def _domain(self, n: Node) -> tuple[Domain, tuple[Step, ...]]:
        """The points of a kernel for ``n`` and how ``n`` is seen from them."""
        tops = list(self._tops(n, ()))
        stretches = [(q, self._stretch(n, q, steps)) for q, steps in tops]
        if (reduced := next((axes for _, axes in stretches if axes), None)) is not None:
            for q, axes in stretches:
                if axes != reduced:
                    raise Unfit(q)
            return Domain(n.shape, reduced), ()
        if not tops:
            return Domain(n.shape), ()
        q, steps = tops[0]
        placed = kept_axes(q, self._seen(n, q, steps))
        assert placed is not None
        shape = q.operands[0].shape
        rest = [d for d in range(len(shape)) if d not in q.dims]
        sources: list[int | None] = [None] * len(shape)
        for axis, d in enumerate(placed):
            if d is not None:
                sources[rest[d]] = axis
        sizes = tuple(size if d in q.dims or sources[d] is not None else 1 for d, size in enumerate(shape))
        return Domain(sizes, frozenset(q.dims)), (Arrange(tuple(sources), sizes),)

    def _stretch(self, n: Node, q: Reduce, steps: tuple[Step, ...]) -> frozenset[int]:
        """The axes of ``n`` along which the reduction ``q`` is repeated; Unfit when views in between do more than that."""
        placed = kept_axes(q, self._seen(n, q, steps))
        if placed is None:
            raise Unfit(q)
        return frozenset(a for a, d in enumerate(placed) if d is None and n.shape[a] != 1)

    @staticmethod
    def _seen(n: Node, q: Reduce, steps: tuple[Step, ...]) -> Layout:
        return through(Layout.row_major(q.shape), steps)

    def _tops(self, n: Node, steps: tuple[Step, ...]) -> Iterator[tuple[Reduce, tuple[Step, ...]]]:
        """The reductions that ``n`` reads without another one in between, and how it sees them."""
        seen: set[object] = set()
        stack = [(n, steps)]
        while stack:
            x, steps = stack.pop()
            if (x, steps) in seen:
                continue
            seen.add((x, steps))
            match x:
                case Part() if (held := self.parked.get(x.of)) is not None:
                    stack.append((held[x.index], steps))
                case Part() if x.of.count == 1:
                    stack += [(y, chain(Reshape(x.of.shape), steps)) for y in x.of.operands]
                case Part():
                    yield x.of, steps
                case View():
                    stack.append((x.x, chain(x.step, steps)))
                case Cast():
                    stack.append((x.x, steps))
                case Point():
                    stack += [(y, stretched(y.shape, x.shape, steps)) for _, y in x.operands]
                case Pick():
                    stack.append((x.fill, steps))
                    for y in below((x.piece,)):
                        if isinstance(y, Part) and y.of not in self.parked and y.of.count != 1:
                            raise Unfit(y.of)
                case _:
                    pass

    # ---- reductions of their own

    def _park(self, q: Reduce) -> None:
        """Compute ``q`` into temporaries, in a kernel of its own or in one that visits the same points."""
        while q not in self.parked:
            try:
                self._store_reduce(q)
            except Unfit as e:
                self._park(e.reduce)

    def _store_reduce(self, q: Reduce) -> None:
        domain = Domain(q.operands[0].shape, frozenset(q.dims))
        strides = self._kept_strides(domain)
        rest = tuple(d for d in range(len(domain.sizes)) if d not in domain.reduced)
        steps = (Arrange(tuple(rest.index(a) if a in rest else None for a in range(len(domain.sizes))), domain.sizes),)
        layout = Layout(domain.sizes, strides)
        body = Body(domain, self.buffers, self.parked)
        values = [body.pull(Part(q, i), steps) for i in range(len(q.dtypes))]
        body.stores = [Store(-1, layout, v, register(d), False) for v, d in zip(values, q.dtypes, strict=True)]
        body.split = 1 if q.merge else self.split(body)
        if body.split > 1 and (nested := [r for r in body.folds if r is not q]):
            raise Unfit(nested[0])  # each program sees a part of the row only
        at = self._companion(body)
        if at < len(self.bodies):
            body = self.bodies[at]
            values = [body.pull(Part(q, i), steps) for i in range(len(q.dtypes))]
        else:
            body.stores = []
            self.bodies.append(body)
        if body.split == 1:
            temps = [self._temporary(register(d), q.shape) for d in q.dtypes]
            self.parked[q] = tuple(temps)
        else:
            temps = [self._temporary(d, (body.split, *q.shape)) for d in state_types(q)]
            values = [State(body.folds[q], i, t.dtype) for i, t in enumerate(temps)]
            merged = Reduce(q.kind, tuple(temps), (0,), q.shape, q.dtypes, merge=True)
            self.parked[q] = tuple(Part(merged, i) for i in range(len(q.dtypes)))
        body.stores += [Store(t.buffer, layout, v, t.dtype, False) for t, v in zip(temps, values, strict=True)]
        self.made_by |= dict.fromkeys((t.buffer for t in temps), at)

    def _companion(self, body: Body) -> int:
        """The kernel that visits the same points in the same way and comes after all that ``body`` reads; else the number of a new one."""
        ready = max((self.made_by.get(v.buffer, -1) for v in body.values() if isinstance(v, Load)), default=-1)
        for at, other in enumerate(self.bodies):
            if at > ready and other.domain == body.domain and other.split == body.split and len(_sides(other) | _sides(body)) < 2:
                return at
        return len(self.bodies)

    @staticmethod
    def _kept_strides(domain: Domain) -> tuple[int, ...]:
        """Row-major over the kept axes, nothing along the reduced ones."""
        strides, step = [0] * len(domain.sizes), 1
        for a in reversed(domain.kept):
            strides[a] = step if domain.sizes[a] != 1 else 0
            step *= domain.sizes[a]
        return tuple(strides)

    def _temporary(self, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        buffer = max(self.buffers, default=-1) + 1
        layout = Layout.row_major(shape)
        self.buffers[buffer] = layout
        self.temporaries.append(Temporary(buffer, dtype, layout))
        return Tensor(buffer, dtype, shape)


def _sides(body: Body) -> set[bool]:
    """For each load that moves along kept and along reduced axes: whether elements side by side are folded (True) or kept. A tile suits one
    of the two."""
    found = set()
    domain = body.domain
    for v in body.values():
        if isinstance(v, Load):
            moves = [(abs(s), a in domain.reduced) for a, s in enumerate(v.layout.strides) if s and domain.sizes[a] != 1]
            if len({side for _, side in moves}) == 2:
                found.add(min(moves)[1])
    return found


def _ways_into(domain: Domain, shape: tuple[int, ...]) -> Iterator[tuple[tuple[Step, ...], bool]]:
    """How a value of ``shape`` can be seen from ``domain``: at every point, or once for all reduced axes."""
    if shape == domain.sizes:
        yield (), True
    if not domain.reduced:
        return
    own = [a for a in domain.kept if domain.sizes[a] != 1]
    dims = [d for d, n in enumerate(shape) if n != 1]
    if [domain.sizes[a] for a in own] == [shape[d] for d in dims]:
        sources: list[int | None] = [None] * len(domain.sizes)
        for a, d in zip(own, dims, strict=True):
            sources[a] = d
        yield (Arrange(tuple(sources), domain.sizes),), False
