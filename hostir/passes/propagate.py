"""Fill in the annotations that the user left out.

Shardings flow forward by each operation's labels, the operand that decides (a weight) first; a mesh axis that nothing forward decides
is decided backward, by all consumers together, and is replicated where they do not agree. Streamed dimensions flow the same way, as far
as the layout along them stays the same. What the user wrote is never changed.
"""

from __future__ import annotations

from typing import Final

from hostir.errors import BuildError
from hostir.graph.annotate import tensors
from hostir.graph.axes import Axes, axes_of
from hostir.graph.copy import copied
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.sharding import Placement, Replicate, Shard, Sharding, Streamed
from hostir.mesh import Mesh
from hostir.passes.labels import check_counts, cuttable, op_streams
from hostir.types import same

Places = list[Placement | None]
_OPEN: Final = None


def propagate(f: Fusion) -> Fusion:
    """A copy of ``f`` in which every tensor has a sharding (if any has) and streams reach as far as they go. BuildError where two
    annotations cannot both hold; it names both tensors."""
    g = copied(f)
    axes = {op: axes_of(op) for op in g.ops}
    whole_meshes(g)
    if any(tv.sharding is not None for tv in tensors(g)):
        _Placements(g, axes).run()
    _streams_forward(g, axes)
    _streams_backward(g, axes)
    return g


def whole_meshes(g: Fusion) -> None:
    """A sharding on a sub-mesh becomes one on the mesh that it is part of, where the fusion uses that: replicated along the rest."""
    meshes = [tv.sharding.mesh for tv in tensors(g) if tv.sharding is not None]
    for tv in tensors(g):
        s = tv.sharding
        parent = None if s is None else s.mesh.parent
        if s is not None and parent is not None and any(m.same_as(parent) for m in meshes):
            placed = {n: p for n, p in zip(s.mesh.names, s.placements, strict=True)}
            tv.sharding = Sharding(parent, tuple(placed.get(n, Replicate()) for n in parent.names))


def consumers(f: Fusion) -> dict[TensorView, list[Op]]:
    """The operations that read each tensor, each once."""
    found: dict[TensorView, list[Op]] = {tv: [] for tv in tensors(f)}
    for op in f.ops:
        for tv in dict.fromkeys(op.reads()):
            found[tv].append(op)
    return found


class _Placements:
    """One placement for each tensor and mesh axis; None while it is open."""

    def __init__(self, f: Fusion, axes: dict[Op, Axes]) -> None:
        self.f = f
        self.axes = axes
        self.users = consumers(f)
        self.mesh: dict[TensorView, Mesh] = {tv: tv.sharding.mesh for tv in tensors(f) if tv.sharding is not None}
        self.fixed = set(self.mesh)
        self.places: dict[TensorView, Places] = {}
        self.hints: dict[TensorView, Places] = {}

    def run(self) -> None:
        self._meshes()
        for tv in tensors(self.f):
            names = self.mesh[tv].names
            self.places[tv] = list(tv.sharding.placements) if tv.sharding is not None else [_OPEN] * len(names)
        self._hint()
        for op in self.f.ops:
            for out, labels in zip(op.outs, self.axes[op].outs, strict=True):
                self._forward(op, out, labels)
        for tv in reversed(tensors(self.f)):
            self._backward(tv)
        for tv in tensors(self.f):
            if tv not in self.fixed:
                tv.sharding = Sharding(self.mesh[tv], tuple(p or Replicate() for p in self.places[tv]))

    # ---- which mesh

    def _meshes(self) -> None:
        """Results are where the operands are; bare tensors are where their first consumer is; all else on the first mesh there is."""
        for op in self.f.ops:
            if all(o in self.mesh for o in op.outs):
                continue
            known = [tv for tv, _ in self.axes[op].ins if tv in self.mesh]
            if not known:
                continue
            first = known[0]
            for other in known[1:]:
                if not self.mesh[first].same_as(self.mesh[other]):
                    raise BuildError(
                        f"%{first.name} and %{other.name}, operands of {op.name}, lie on different meshes", loc=op.loc,
                        expected=f"{self.mesh[first]} ranks {_ranks(self.mesh[first])}", got=f"{self.mesh[other]} ranks {_ranks(self.mesh[other])}",
                        cure="shard the result, which says where it is computed; or move one with hir.ops.set and shard what that gives",
                    )  # fmt: skip
            for o in op.outs:
                self.mesh.setdefault(o, self.mesh[first])
        for tv in reversed(tensors(self.f)):
            if tv not in self.mesh:
                found = next((self.mesh[o] for op in self.users[tv] for o in op.outs if o in self.mesh), None)
                if found is not None:
                    self.mesh[tv] = found
        default = next(iter(self.mesh.values()))
        for op in self.f.ops:
            for o in op.outs:
                if o not in self.mesh:
                    self.mesh[o] = next((self.mesh[tv] for tv, _ in self.axes[op].ins if tv in self.mesh), default)
        for tv in tensors(self.f):
            self.mesh.setdefault(tv, default)

    # ---- which placement

    def _hint(self) -> None:
        """What the user's annotations further on would like a tensor to be, as far as they say."""
        known = {tv: list(p) for tv, p in self.places.items()}
        for tv in reversed(tensors(self.f)):
            for a, name in enumerate(self.mesh[tv].names):
                wishes = [w for op in self.users[tv] for w in self._wishes(op, tv, a, name, known) if isinstance(w, Shard)]
                if known[tv][a] is _OPEN and wishes:
                    known[tv][a] = wishes[0]
        self.hints = known

    def _forward(self, op: Op, out: TensorView, labels: tuple[int | None, ...]) -> None:
        mesh, axes = self.mesh[out], self.axes[op]
        for a, name in enumerate(mesh.names):
            if self.places[out][a] is not _OPEN:
                continue
            votes: list[Placement | None] = []
            for tv, mine in axes.ins:
                place = self.places[tv][a] if self.mesh[tv].same_as(mesh) else None
                label = mine[place.dim] if isinstance(place, Shard) else None
                if label is not None:
                    fits = label in labels and cuttable(op, axes, label, mesh.axis_size(name))
                    votes.append(Shard(labels.index(label)) if fits else _OPEN)
            if not votes or votes[0] is _OPEN:
                continue  # a reduced label leaves the axis open
            hint = self.hints[out][a]
            self.places[out][a] = hint if hint in votes and not axes.weighted else votes[0]

    def _backward(self, tv: TensorView) -> None:
        mesh = self.mesh[tv]
        result = any(r.value is tv for r in self.f.results)
        for a, name in enumerate(mesh.names):
            if self.places[tv][a] is not _OPEN:
                continue
            wishes = [w for op in self.users[tv] for w in self._wishes(op, tv, a, name, self.places)]
            agreed = bool(wishes) and not result and all(w == wishes[0] for w in wishes)
            self.places[tv][a] = wishes[0] if agreed else Replicate()

    def _wishes(self, op: Op, tv: TensorView, a: int, name: str, places: dict[TensorView, Places]) -> list[Placement]:
        """What ``op`` would like of mesh axis ``a`` for each place where it reads ``tv``."""
        axes, mesh = self.axes[op], self.mesh[op.outs[0]]
        if not mesh.same_as(self.mesh[tv]):
            return [Replicate()]
        label: int | None = None
        for out, labels in zip(op.outs, axes.outs, strict=True):
            place = places[out][a]
            if isinstance(place, Shard):
                label = labels[place.dim]
        for other, mine in axes.ins:
            place = places[other][a] if self.mesh[other].same_as(mesh) else None
            if isinstance(place, Shard) and mine[place.dim] in axes.reduced:
                label = mine[place.dim]
                break
            if isinstance(place, Shard):
                break
        found: list[Placement] = []
        for other, mine in axes.ins:
            if other is tv:
                fits = label is not None and label in mine and cuttable(op, axes, label, mesh.axis_size(name))
                found.append(Shard(mine.index(label)) if fits else Replicate())
        return found


def _ranks(mesh: Mesh) -> str:
    return "any" if mesh.shape is None else str(list(mesh.layout))


# --------------------------------------------------------------------------------------------------------------------- streams


def _streams_forward(g: Fusion, axes: dict[Op, Axes]) -> None:
    for op in g.ops:
        for label, (s, source, dim) in op_streams(op, axes[op]).items():
            for out, labels in zip(op.outs, axes[op].outs, strict=True):
                if label in labels and _cut_alike(source, dim, out, labels.index(label)):
                    _add(out, labels.index(label), s, source)


def _streams_backward(g: Fusion, axes: dict[Op, Axes]) -> None:
    users = consumers(g)
    results = {r.value for r in g.results}
    for tv in reversed(tensors(g)):
        if tv in results or not users[tv]:
            continue
        for dim in range(0 if tv.type is None else len(tv.type.dims)):
            wishes = [w for op in users[tv] for w in _stream_wishes(op, axes[op], tv, dim)]
            first = wishes[0] if wishes else None
            if first is not None and all(w is not None and same(w[0].chunks, first[0].chunks) for w in wishes):
                _add(tv, dim, *first)


def _stream_wishes(op: Op, axes: Axes, tv: TensorView, dim: int) -> list[tuple[Streamed, TensorView] | None]:
    streams = op_streams(op, axes)
    found: list[tuple[Streamed, TensorView] | None] = []
    for other, labels in axes.ins:
        if other is not tv:
            continue
        label = labels[dim]
        here = streams.get(label) if label is not None else None
        found.append((here[0], here[1]) if here is not None and _cut_alike(here[1], here[2], tv, dim) else None)
    return found


def _cut_alike(one: TensorView, dim: int, other: TensorView, other_dim: int) -> bool:
    """Whether the same mesh axes cut the two dimensions."""

    def cut(tv: TensorView, d: int) -> tuple[str, ...]:
        return () if tv.sharding is None else tv.sharding.axes_of(d)

    return cut(one, dim) == cut(other, other_dim)


def _add(tv: TensorView, dim: int, s: Streamed, source: TensorView) -> None:
    """Stream dimension ``dim`` of ``tv`` as ``source`` is."""
    for mine in tv.streams:
        if mine.dim == dim:
            check_counts(tv, mine.chunks, source, s.chunks)
            return
    tv.streams = (*tv.streams, Streamed(dim, s.chunks, s.swizzle))
