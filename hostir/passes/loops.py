"""Host loops of a fusion: which streamed dimensions walk together, and through which loops each operation goes.

Streamed dimensions that an operation maps onto each other, cut alike by the mesh, are one *loop axis*. A resharding that takes a mesh
axis off a streamed dimension goes through the loop of its result: each trip needs another member's part. One that reduces onto a mesh
axis goes through the loop of its source: each trip finishes another member's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hostir.errors import BuildError
from hostir.graph.annotate import tensors
from hostir.graph.axes import Axes, axes_of
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import Partial, Placement, Replicate, Shard, ceil_div, even
from hostir.passes.labels import op_streams
from hostir.types import Dim, product, same, show_expr

NAMES: Final = "ijklmnpq"


@dataclass(frozen=True, eq=False)
class LoopAxis:
    """``chunks`` of the whole dimension; ``trips`` of this rank's part of it, which mesh axes ``cut``. ``swizzle``: the mesh axis by whose
    rank the order of chunks is rotated."""

    name: str
    chunks: Dim
    trips: Dim
    cut: tuple[str, ...] = ()
    swizzle: str | None = None

    @property
    def single(self) -> bool:
        """One trip: no loop at all."""
        return isinstance(self.trips, int) and self.trips == 1

    def __str__(self) -> str:
        return f"{self.name} in {show_expr(self.trips)}"


Where = tuple[tuple[int, LoopAxis], ...]
"""The dimensions of a tensor that an operation reads or writes chunk by chunk, and in which loop."""


def is_move(op: Op) -> bool:
    """Whether ``op`` brings data to another layout: a ``set`` whose operand and result lie differently."""
    if op.name != "set":
        return False
    (source,) = dict.fromkeys(op.reads())
    old, new = source.sharding, op.outs[0].sharding
    return old is not None and new is not None and not old.same_as(new)


def changed_axis(op: Op) -> tuple[str, Placement, Placement] | None:
    """The mesh axis that a move changes, before and after; None where it goes to another mesh."""
    (source,) = dict.fromkeys(op.reads())
    old, new = source.sharding, op.outs[0].sharding
    assert old is not None and new is not None
    if not old.mesh.same_as(new.mesh):
        return None
    names = [n for n in old.mesh.names if old.on(n) != new.on(n)]
    assert len(names) == 1, "a move changes one mesh axis"
    return names[0], old.on(names[0]), new.on(names[0])


class Loops:
    """The loop axes of a decomposed fusion, by tensor and dimension."""

    def __init__(self, f: Fusion) -> None:
        self.f = f
        self.axes: dict[Op, Axes] = {op: axes_of(op) for op in f.ops}
        self._parent: dict[tuple[TensorView, int], tuple[TensorView, int]] = {}
        self.order: list[LoopAxis] = []
        for tv in tensors(f):
            for s in tv.streams:
                self._parent[(tv, s.dim)] = (tv, s.dim)
        for op in f.ops:
            self._join(op)
        self._of = self._axes()
        self._cache: dict[Op, tuple[tuple[Where, ...], tuple[Where, ...]]] = {}

    # ---- which dimensions are one

    def _find(self, x: tuple[TensorView, int]) -> tuple[TensorView, int]:
        while self._parent[x] != x:
            x = self._parent[x]
        return x

    def _union(self, members: list[tuple[TensorView, int]]) -> None:
        known = [m for m in members if m in self._parent]
        for m in known[1:]:
            a, b = self._find(known[0]), self._find(m)
            if a != b:
                self._parent[b] = a

    def _join(self, op: Op) -> None:
        axes = self.axes[op]
        if is_move(op):
            (source,) = dict.fromkeys(op.reads())
            for s in source.streams:
                if _cut(source, s.dim) == _cut(op.outs[0], s.dim) and _one_mesh(source, op.outs[0]):
                    self._union([(source, s.dim), (op.outs[0], s.dim)])
            return
        for label in op_streams(op, axes):
            pairs = (*zip(op.outs, axes.outs, strict=True), *axes.ins)
            self._union([(tv, d) for tv, labels in pairs for d, mine in enumerate(labels) if mine == label])

    def _axes(self) -> dict[tuple[TensorView, int], LoopAxis]:
        found: dict[tuple[TensorView, int], LoopAxis] = {}
        by_root: dict[tuple[TensorView, int], LoopAxis] = {}
        swizzles = {self._find((tv, s.dim)): s.swizzle for tv in tensors(self.f) for s in tv.streams if s.swizzle is not None}
        for tv in tensors(self.f):
            for s in tv.streams:
                root = self._find((tv, s.dim))
                if root not in by_root:
                    axis = self._axis(tv, s.dim, s.chunks, swizzles.get(root))
                    by_root[root] = axis
                    if not axis.single:
                        self.order.append(axis)
                if not same(by_root[root].chunks, s.chunks):
                    from hostir.passes.labels import check_counts

                    check_counts(root[0], by_root[root].chunks, tv, s.chunks)
                if all(found.get((tv, d)) is not by_root[root] for d in range(len(tv.known.dims))):
                    found[(tv, s.dim)] = by_root[root]  # one loop walks through one dimension of a tensor
        return found

    def _axis(self, tv: TensorView, dim: int, chunks: Dim, swizzle: str | None) -> LoopAxis:
        name = NAMES[len(self.order) % len(NAMES)]
        cut, n = _cut(tv, dim), tv.known.dims[dim]
        if not cut:
            return LoopAxis(name, chunks, chunks, cut, swizzle)
        assert tv.sharding is not None
        parts = product(tuple(tv.sharding.mesh.axis_size(a) for a in cut))
        trips = 1
        if isinstance(chunks, int) and isinstance(parts, int):
            trips = chunks // parts if even(chunks, parts) else 1
        elif not same(chunks, parts):
            raise BuildError(
                f"%{tv.name} is sharded and streamed, and a size is not known", expected="numbers", got=f"{chunks} chunks on {parts} ranks"
            )
        if trips > 1:
            size, whole = ceil_div(n, chunks), ceil_div(n, parts)
            if isinstance(size, int) and isinstance(whole, int) and size * trips != whole:
                raise BuildError(
                    f"%{tv.name} is cut into {parts} shards and {chunks} chunks that do not end together", expected=f"{trips} chunks a shard",
                    got=f"{n} elements: shards of {whole}, chunks of {size}", cure="other sizes, or one chunk a shard",
                )  # fmt: skip
        return LoopAxis(name, chunks, trips, cut, swizzle)

    # ---- what an operation does

    def of(self, tv: TensorView, dim: int) -> LoopAxis | None:
        """The loop that walks through a dimension of a tensor, by its own annotation; None where none does."""
        axis = self._of.get((tv, dim))
        return None if axis is None or axis.single else axis

    def chunked(self, op: Op) -> tuple[tuple[Where, ...], tuple[Where, ...]]:
        """For each entry of ``axes.ins``, and for each result: the dimensions that ``op`` reads, or writes, chunk by chunk."""
        if op not in self._cache:
            self._cache[op] = self._move(op) if is_move(op) else self._compute(op)
        return self._cache[op]

    def _compute(self, op: Op) -> tuple[tuple[Where, ...], tuple[Where, ...]]:
        axes = self.axes[op]
        streams = op_streams(op, axes)
        first = [labels[s.dim] for out, labels in zip(op.outs, axes.outs, strict=True) for s in out.streams if self.of(out, s.dim) is not None]
        by_label: dict[int, LoopAxis] = {}
        for label in dict.fromkeys([x for x in first if x in streams] + list(streams)):
            _, tv, dim = streams[label]
            axis = self.of(tv, dim)
            if axis is not None and axis not in by_label.values():
                by_label[label] = axis

        def where(labels: tuple[int | None, ...]) -> Where:
            return tuple((d, by_label[label]) for d, label in enumerate(labels) if label in by_label)

        return tuple(where(labels) for _, labels in axes.ins), tuple(where(labels) for labels in axes.outs)

    def _move(self, op: Op) -> tuple[tuple[Where, ...], tuple[Where, ...]]:
        (source,) = dict.fromkeys(op.reads())
        out = op.outs[0]
        reads: list[tuple[int, LoopAxis]] = []
        writes: list[tuple[int, LoopAxis]] = []
        change = changed_axis(op)
        for d in range(len(out.known.dims)):
            mine, its = self.of(source, d), self.of(out, d)
            if (
                change is not None
                and isinstance(change[1], Partial)
                and change[2] == Shard(d)
                and mine is not None
                and _aligned(source, d, change[0], mine)
            ):
                reads.append((d, mine))  # each trip finishes one member's part
            elif its is not None and change is not None:
                if _cut(source, d) == _cut(out, d):
                    writes.append((d, its))
                    reads.append((d, its))
                elif change[1] == Shard(d) and change[2] == Replicate() and _aligned(out, d, change[0], its):
                    writes.append((d, its))  # each trip fetches one member's part
        return (tuple(reads),), (tuple(writes),)

    def nest(self, op: Op) -> tuple[LoopAxis, ...]:
        """The loops around ``op``, outermost first."""
        ins, outs = self.chunked(op)
        mine = {axis for where in (*ins, *outs) for _, axis in where}
        return tuple(a for a in self.order if a in mine)

    def summed(self, op: Op) -> dict[LoopAxis, str]:
        """The loops of ``op`` whose trips each give a term of its results, and how the terms combine."""
        if is_move(op):
            return {}
        axes = self.axes[op]
        found = {}
        for (_, labels), where in zip(axes.ins, self.chunked(op)[0], strict=True):
            found.update({axis: axes.reduced[label] for d, axis in where if (label := labels[d]) in axes.reduced and label is not None})
        return found

    def finishes(self, op: Op) -> tuple[LoopAxis, ...]:
        """The loops after which, and not before, the results of ``op`` are whole: sums over trips, and moves onto a mesh axis."""
        if is_move(op):
            (reads,), (writes,) = self.chunked(op)
            return tuple(axis for d, axis in reads if (d, axis) not in writes)
        return tuple(self.summed(op))

    def source_part(self, op: Op) -> tuple[int, LoopAxis, str] | None:
        """For a move inside the loop over the dimension whose mesh axis it takes off or puts on: dimension, loop, mesh axis."""
        change = changed_axis(op) if is_move(op) else None
        if change is None:
            return None
        (reads,), (writes,) = self.chunked(op)
        name, before, after = change
        for d, axis in writes:
            if before == Shard(d) and isinstance(after, Replicate) and (d, axis) not in reads:
                return d, axis, name
        for d, axis in reads:
            if isinstance(before, Partial) and after == Shard(d) and (d, axis) not in writes:
                return d, axis, name
        return None


def _aligned(tv: TensorView, dim: int, name: str, axis: LoopAxis) -> bool:
    """Whether the chunks of ``tv`` that ``axis`` walks through are parts of the shards that mesh axis ``name`` cuts it into, or the other way
    round: only then does each trip deal with whole members."""
    assert tv.sharding is not None
    parts, trips, n = tv.sharding.mesh.axis_size(name), axis.trips, tv.known.dims[dim]
    if not (isinstance(parts, int) and isinstance(trips, int) and isinstance(n, int)):
        return same(parts, trips) and not axis.cut
    for outer in axis.cut:
        size = tv.sharding.mesh.axis_size(outer)
        if not isinstance(size, int) or n % size:
            return False
        n //= size
    if trips % parts == 0:
        return -(-n // trips) * (trips // parts) == -(-n // parts)
    return parts % trips == 0 and n % parts == 0


def _cut(tv: TensorView, dim: int) -> tuple[str, ...]:
    return () if tv.sharding is None else tv.sharding.axes_of(dim)


def _one_mesh(a: TensorView, b: TensorView) -> bool:
    return a.sharding is not None and b.sharding is not None and a.sharding.mesh.same_as(b.sharding.mesh)
