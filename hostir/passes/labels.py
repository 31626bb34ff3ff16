"""Small questions about an operation's labels that several passes ask: may a label be cut, is it streamed, and what would the operation
like its operands and results to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from hostir.errors import BuildError
from hostir.graph.axes import Axes, Labels
from hostir.graph.fusion import Op, TensorView
from hostir.graph.sharding import Partial, Placement, Replicate, Shard, Sharding, Streamed, even
from hostir.mesh import Mesh
from hostir.types import Dim, dims_equal, product, same

PLACES: Final = ("before", "after")
Found: TypeAlias = dict[int, tuple[Streamed, TensorView, int]]


def extents(op: Op, axes: Axes, label: int) -> list[Dim]:
    """The different sizes of the dimensions with this label (a merged and a split dimension have different ones)."""
    found: list[Dim] = []
    for tv, labels in (*axes.ins, *zip(op.outs, axes.outs, strict=True)):
        for d, mine in enumerate(labels):
            if mine == label:
                size = tv.known.dims[d]
                if not any(dims_equal(size, other) is True for other in found):
                    found.append(size)
    return found


def cuttable(op: Op, axes: Axes, label: int, parts: Dim) -> bool:
    """Whether cutting every dimension of ``label`` into ``parts`` cuts them all at the same elements."""
    sizes = extents(op, axes, label)
    if axes.reduced.get(label) in ("max", "min") and any(_may_be_empty(n, parts) for n in sizes):
        return False  # there is no extremum of nothing
    return len(sizes) < 2 or all(even(n, parts) for n in sizes)


def _may_be_empty(n: Dim, parts: Dim) -> bool:
    """Whether some part may have no elements, by the ceil rule."""
    if isinstance(n, int) and isinstance(parts, int):
        return (parts - 1) * -(-n // parts) >= n
    return not even(n, parts)


def op_streams(op: Op, axes: Axes) -> Found:
    """The streamed labels of an operation, each with an annotation that says so and where that stands. BuildError where two annotations
    give different counts."""
    found: Found = {}
    for tv, labels in (*zip(op.outs, axes.outs, strict=True), *axes.ins):
        for s in tv.streams:
            label = labels[s.dim]
            if label is None or not cuttable(op, axes, label, s.chunks):
                continue
            if label in found:
                check_counts(found[label][1], found[label][0].chunks, tv, s.chunks)
                if s.swizzle is not None and found[label][0].swizzle is None:
                    found[label] = (s, tv, s.dim)
            else:
                found[label] = (s, tv, s.dim)
    return found


def check_counts(a: TensorView, chunks: Dim, b: TensorView, others: Dim) -> None:
    if not same(chunks, others):
        raise BuildError(
            f"%{a.name} and %{b.name} share a host loop with different numbers of chunks", expected=f"{chunks} chunks (%{a.name})",
            got=f"{others} chunks (%{b.name})", cure="stream both alike, or put hir.ops.set between them",
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- what an operation needs


@dataclass(frozen=True)
class Needs:
    """The layouts in which an operation computes part by part: one for each entry of ``Axes.ins``, and what its results then are."""

    ins: tuple[Sharding, ...]
    outs: tuple[Sharding, ...]


def needs(op: Op, axes: Axes, place: str = "before") -> Needs:
    """How ``op`` is to be computed, given how its operands and results are to lie. ``place``: where layouts disagree, operands change
    before it, or the result after it. BuildError where a partial result is wanted and nothing is reduced."""
    sharding = op.outs[0].sharding
    assert sharding is not None
    mesh = sharding.mesh
    chosen: dict[str, int] = {}
    for name in mesh.names:
        label = _label(op, axes, mesh, name, place)
        if label is None:
            continue
        parts = product((mesh.axis_size(name), *(mesh.axis_size(n) for n, other in chosen.items() if other == label)))
        if cuttable(op, axes, label, parts):
            chosen[name] = label

    def place_of(name: str, labels: Labels) -> Placement:
        label = chosen.get(name)
        if label is None:
            return Replicate()
        return Shard(labels.index(label)) if label in labels else Replicate()

    def result(name: str, labels: Labels) -> Placement:
        label = chosen.get(name)
        return Partial(axes.reduced[label]) if label is not None and label in axes.reduced else place_of(name, labels)

    ins = tuple(Sharding(mesh, tuple(place_of(n, labels) for n in mesh.names)) for _, labels in axes.ins)
    outs = tuple(Sharding(mesh, tuple(result(n, labels) for n in mesh.names)) for labels in axes.outs)
    return Needs(ins, outs)


def _label(op: Op, axes: Axes, mesh: Mesh, name: str, place: str) -> int | None:
    """The label that mesh axis ``name`` cuts in this operation; None: every member computes the whole."""
    wish: int | None = None
    partial = None
    for out, labels in zip(op.outs, axes.outs, strict=True):
        p = _on(out, mesh, name)
        if isinstance(p, Shard):
            wish = labels[p.dim]
        partial = p if isinstance(p, Partial) else partial
    votes = [labels[p.dim] for tv, labels in axes.ins if isinstance(p := _on(tv, mesh, name), Shard)]
    first = next((v for v in votes if v is not None), None)
    if first is not None and first in axes.reduced and first not in axes.composite:
        return first
    if partial is not None:
        if reducible := [label for label in axes.reduced if label not in axes.composite and axes.reduced[label] == partial.op]:
            return reducible[0]
        raise BuildError(
            f"%{op.outs[0].name} cannot be {partial} on {name}: {op.name} reduces nothing in that way", loc=op.loc,
            cure="make it Replicate() or Shard(dim)",
        )  # fmt: skip
    if place == "after" and first is not None and first not in axes.composite:
        return first
    if wish is not None:
        return wish
    alone = len(axes.ins) == 1 and first is not None and first not in axes.composite
    return first if alone and not _sharded(op, mesh, name) else None


def _sharded(op: Op, mesh: Mesh, name: str) -> bool:
    return any(isinstance(_on(o, mesh, name), Shard) for o in op.outs)


def _on(tv: TensorView, mesh: Mesh, name: str) -> Placement | None:
    s = tv.sharding
    return s.on(name) if s is not None and s.mesh.same_as(mesh) else None
