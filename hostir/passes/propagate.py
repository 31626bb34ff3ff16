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
from hostir.passes.labels import Needs, check_counts, cuttable, needs, op_streams
from hostir.types import same

Places = list[Placement | None]
_OPEN: Final = None


def propagate(f: Fusion, place: str = "before") -> Fusion:
    """A copy of ``f`` in which every tensor has a sharding (if any has) and streams reach as far as they go. BuildError where two
    annotations cannot both hold; it names both tensors."""
    g = copied(f)
    axes = {op: axes_of(op) for op in g.ops}
    whole_meshes(g)
    if any(tv.sharding is not None for tv in tensors(g)):
        _Placements(g, axes).run()
    _Streams(g, axes, place).run()
    return g


def whole_meshes(g: Fusion) -> None:
    """A sharding on a sub-mesh becomes one on the mesh that it is part of, where the fusion uses that: replicated along the rest."""
    meshes = [tv.sharding.mesh for tv in tensors(g) if tv.sharding is not None]
    for tv in tensors(g):
        s = tv.sharding
        parent = None if s is None else s.mesh.parent
        if s is not None and parent is not None and any(m.same_as(parent) for m in meshes):
            placed = dict(zip(s.mesh.names, s.placements, strict=True))
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


class _Streams:
    """A stream goes on where the operation computes with the layout that the tensor has along that dimension: else a resharding stands
    between, and its chunks are another matter."""

    def __init__(self, g: Fusion, axes: dict[Op, Axes], place: str) -> None:
        self.g = g
        self.axes = axes
        self.users = consumers(g)
        self._needs = {op: self._layouts(op, place) for op in g.ops}

    def run(self) -> None:
        for op in self.g.ops:
            for label, (s, source, _) in op_streams(op, self.axes[op]).items():
                for i, (out, labels) in enumerate(zip(op.outs, self.axes[op].outs, strict=True)):
                    if label in labels and self._stays(op, out, labels.index(label), out=i):
                        _add(out, labels.index(label), s, source)
        results = {r.value for r in self.g.results}
        for tv in reversed(tensors(self.g)):
            if tv not in results and tv.type is not None:
                for dim in range(len(tv.type.dims)):
                    self._backward(tv, dim)

    def _layouts(self, op: Op, place: str) -> Needs | None:
        if op.outs[0].sharding is None:
            return None
        (source, *_) = dict.fromkeys(op.reads()) or (None,)
        if op.name == "set" and source is not None and source.sharding is not None:
            return Needs((op.outs[0].sharding,), (source.sharding,))  # what is cut alike on both sides stays
        return needs(op, self.axes[op], place)

    def _stays(self, op: Op, tv: TensorView, dim: int, *, out: int | None = None, operand: int = 0) -> bool:
        """Whether ``op`` computes with the cut that ``tv`` has along ``dim``."""
        want = self._needs[op]
        if want is None or tv.sharding is None:
            return True
        here = want.outs[out] if out is not None else want.ins[operand]
        return here.mesh.same_as(tv.sharding.mesh) and here.axes_of(dim) == tv.sharding.axes_of(dim)

    def _backward(self, tv: TensorView, dim: int) -> None:
        """All consumers walk through ``dim`` in the same chunks: so does what makes ``tv``."""
        wishes = [w for op in self.users[tv] for w in self._wishes(op, tv, dim)]
        first = wishes[0] if wishes else None
        if first is not None and all(w is not None and same(w[0].chunks, first[0].chunks) for w in wishes):
            _add(tv, dim, *first)

    def _wishes(self, op: Op, tv: TensorView, dim: int) -> list[tuple[Streamed, TensorView] | None]:
        streams = op_streams(op, self.axes[op])
        found: list[tuple[Streamed, TensorView] | None] = []
        for i, (other, labels) in enumerate(self.axes[op].ins):
            if other is tv:
                label = labels[dim]
                here = streams.get(label) if label is not None and self._stays(op, tv, dim, operand=i) else None
                found.append(None if here is None else (here[0], here[1]))
        return found


def _add(tv: TensorView, dim: int, s: Streamed, source: TensorView) -> None:
    """Stream dimension ``dim`` of ``tv`` as ``source`` is."""
    for mine in tv.streams:
        if mine.dim == dim:
            check_counts(tv, mine.chunks, source, s.chunks)
            return
    tv.streams = (*tv.streams, Streamed(dim, s.chunks, s.swizzle))
