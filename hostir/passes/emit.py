"""From the tree to a host program: buffers, views of them, loops, calls of units and communications.

A value is a buffer where it is kept (``homes``); an operation in a loop reads and writes views of its chunks. Program order is that of the
tree, so the program is right as it stands; streams only say what may overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from hostir.graph.fusion import Op, TensorView
from hostir.graph.sharding import plus, times
from hostir.graph.show import identifier
from hostir.graph.table import TABLE
from hostir.ir.nodes import MAIN, Axis, Buffer, Program, ProgramData, Stream
from hostir.mesh import Mesh
from hostir.passes import emit_moves, emit_parts, emit_views, places
from hostir.passes.homes import Homes, Path
from hostir.passes.loops import LoopAxis, Where, changed_axis, is_move
from hostir.passes.plan import part_of
from hostir.passes.sizes import chunk, local_dims, local_type
from hostir.passes.tree import Finish, Item, Loop, Segment, Sum, Tree
from hostir.passes.unit_builder import UnitBuilder, unit_name
from hostir.passes.writer import Writer
from hostir.types import Dim, DType, Operand, Rank, TensorType, Var, binary, same

NUM_STREAMS: Final = 4


@dataclass(frozen=True)
class Stored:
    """Where a value is: ``buffer`` holds its chunk of ``loops``, and the whole along everything else."""

    buffer: Buffer
    loops: frozenset[LoopAxis] = frozenset()


def emit(tree: Tree, num_streams: int = NUM_STREAMS) -> Program:
    """The program of a planned tree, its streams wishes still. ``num_streams``: how many streams the trips of a loop with collectives
    take turns on."""
    return Emitter(tree, num_streams).program()


class Emitter:
    def __init__(self, tree: Tree, num_streams: int) -> None:
        self.tree = tree
        self.loops = tree.loops
        self.homes = Homes(tree)
        self.num_streams = num_streams
        self.w = Writer()
        self.stored: dict[TensorView, Stored] = {}
        self.sums: dict[TensorView, Stored] = {}
        self.terms: dict[TensorView, emit_parts.Travelling] = {}
        self.parts: dict[int, emit_parts.Travelling] = {}
        self.index: dict[LoopAxis, Operand] = {}
        self.vars: dict[LoopAxis, Var] = {}
        self.path: Path = ()
        self.mesh = _mesh(tree)
        self.num_ranks = places.num_ranks(tree.fusion) if isinstance(self.mesh, places.PlacedMesh) else 0
        self.guarded: dict[int, Dim] = {}

    # ---- the program

    def program(self) -> Program:
        params: list[Buffer | Var] = []
        for p in self.tree.fusion.params:
            if isinstance(p, TensorView):
                self.stored[p] = Stored(Buffer(identifier(p.name), self._guarded(p, local_type(p))))
                self._guard(p, self.stored[p].buffer)
                params.append(self.stored[p].buffer)
            else:
                params.append(p)
        self.block(self.tree.items)
        results: list[Buffer] = []
        written: list[Buffer] = []
        for r in self.tree.fusion.results:
            out = self.stored[r.value].buffer
            if r.alias is not None:
                target = self.stored[r.alias].buffer
                if target is not out:
                    self.w.copy(out, target)
                written.append(target)
                out = target
            if not r.hidden:
                results.append(out)
        mesh = self.mesh
        axes = () if mesh is None else tuple(Axis(n, None if mesh.shape is None else mesh.shape[i]) for i, n in enumerate(mesh.names))
        if self.num_ranks:
            axes = (Axis(places.WORLD, self.num_ranks),)
        data = ProgramData(
            identifier(self.tree.fusion.name), tuple(params), frozenset(written), axes, False, self.w.body, tuple(results), "lowered"
        )  # fmt: skip
        return Program(data)

    def block(self, items: tuple[Item, ...]) -> None:
        for item in items:
            if isinstance(item, Loop):
                self._loop(item)
            elif isinstance(item, Finish):
                self._finish(item.sum)
            elif self.num_ranks:
                self._on_its_ranks(item)
            else:
                self.segment(item)

    # ---- several meshes

    def _guarded(self, tv: TensorView, t: TensorType) -> TensorType:
        """The type of a buffer that ranks outside its mesh have nothing of."""
        s = tv.sharding
        if not self.num_ranks or s is None or not t.dims:
            return t
        first = times(t.dims[0], places.indicator(s.mesh.layout, self.num_ranks))
        return TensorType(t.dtype, (first, *t.dims[1:]), t.memory)

    def _guard(self, tv: TensorView, b: Buffer) -> None:
        dims = local_dims(tv)
        if dims and b.type.dims[0] is not dims[0]:
            self.guarded[id(b)] = dims[0]

    def _on_its_ranks(self, s: Segment) -> None:
        for tv in self.homes.read_outside(s):
            b = self.w.alloc(identifier(tv.name), self._guarded(tv, local_type(tv)))
            self._guard(tv, b)
            self.stored[tv] = Stored(b)
        out = s.ops[0].outs[0].sharding
        assert out is not None
        crosses = is_move(s.ops[0]) and changed_axis(s.ops[0]) is None
        if crosses or set(out.mesh.layout) == set(range(self.num_ranks)):
            self.segment(s)
        else:
            with self.w.when(places.member(out.mesh.layout)):
                self.segment(s)

    def over(self, kind: str, out: Buffer, x: Buffer, mesh: Mesh, axis: str, **fields: object) -> None:
        """A collective over the team of this rank along a mesh axis."""
        if not isinstance(mesh, places.PlacedMesh):
            self.w.comm(kind, out, x, team=(axis,), **fields)
            return
        teams = mesh.teams(axis)
        for team in teams:
            if len(teams) == 1:
                self.w.comm(kind, out, x, team=team, **fields)
            else:
                with self.w.when(places.member(team)):
                    self.w.comm(kind, out, x, team=team, **fields)

    # ---- loops

    def _loop(self, loop: Loop) -> None:
        self._outer_buffers(loop)
        parts = [p for s in loop.body if isinstance(s, Segment) and (p := part_of(s, self.loops)) is not None and p.loop is loop.axis and s.how]
        states = [emit_parts.before(self, loop, p) for p in parts]
        self.parts.update({id(p.segment): t for p, t in zip(parts, states, strict=True) if t is not None})
        with self._streams(loop) as index_stream, self.w.loop(loop.axis.name, loop.axis.trips) as var:
            index_stream(var)
            outer = self.path
            self.path = (*outer, loop)
            self.index[loop.axis], self.vars[loop.axis] = chunk_index(loop, var), var
            emit_parts.trip(self, loop, var, states)
            kept = dict(self.stored)
            self.block(loop.body)
            self.stored = {tv: s for tv, s in self.stored.items() if tv in kept or len(self.homes.home.get(tv, ())) < len(self.path)}
            del self.index[loop.axis]
            self.path = outer
        for state in states:
            emit_parts.after(self, state)

    @contextmanager
    def _streams(self, loop: Loop) -> Iterator[Callable[[Var], None]]:
        """A loop with whole collectives in its body has its trips on streams that take turns; else only communication is aside."""
        kept = self.w.stream, self.w.comm_stream
        turns = kept[0] is MAIN and loop.rotation is None and _collectives(loop) and not _has_sums(loop, loop.axis)

        def index(var: Var) -> None:
            if turns:
                most = min(self.num_streams, loop.axis.trips) if isinstance(loop.axis.trips, int) else self.num_streams
                self.w.stream = self.w.comm_stream = Stream("s", binary("%", var, most))

        yield index
        self.w.stream, self.w.comm_stream = kept

    def _outer_buffers(self, loop: Loop) -> None:
        """Buffers for what the loop makes and this block keeps."""
        for s in _segments(loop.body):
            if s.how and part_of(s, self.loops) is not None:
                continue  # its own way of moving says what it needs
            sums = {x.value: x for x in s.sums}
            for tv in self.homes.read_outside(s):
                here = self.homes.home[tv] == self.path
                x = sums.get(tv)
                if x is not None and tv not in self.sums and (here if x.dtype is tv.dtype else self.homes.whole[tv] == self.path):
                    self.sums[tv] = self.allocate(tv, x.dtype, identity(x.op, x.dtype))
                    if x.dtype is tv.dtype:
                        self.stored[tv] = self.sums[tv]
                elif here and tv not in self.stored and tv not in self.sums and tv not in self.terms and not self._is_view(s):
                    self.stored[tv] = self.allocate(tv)

    def _is_view(self, s: Segment) -> bool:
        return s.kind == "view" and not s.nest

    # ---- sizes

    def chunks(self, tv: TensorView, path: Path) -> frozenset[LoopAxis]:
        """The loops of ``path`` in whose body ``tv`` is a chunk."""
        axes = {loop.axis for loop in path}
        return frozenset(a for d in range(len(tv.known.dims)) if (a := self.loops.of(tv, d)) is not None and a in axes)

    def dims(self, tv: TensorView, path: Path) -> tuple[Dim, ...]:
        """The sizes of the buffer that holds ``tv`` in the body of ``path``: chunks are as long as the longest."""
        inside = self.chunks(tv, path)
        dims = list(local_dims(tv))
        for d in range(len(dims)):
            axis = self.loops.of(tv, d)
            if axis is not None and axis in inside:
                dims[d] = chunk(tv, d, axis, self.index[axis]).most
        return tuple(dims)

    def allocate(self, tv: TensorView, dtype: DType | None = None, init: float | None = None) -> Stored:
        """A buffer for ``tv`` in this block; a chunk that may be short is a view of one of full length."""
        b = self.w.alloc(identifier(tv.name), TensorType(dtype or tv.dtype, self.dims(tv, self.path)), init)
        inside = self.chunks(tv, self.path)
        short = {}
        for d in range(len(tv.known.dims)):
            axis = self.loops.of(tv, d)
            if axis is not None and axis in inside and not (c := chunk(tv, d, axis, self.index[axis])).full:
                short[d] = (0, c.size)
        return Stored(self.w.spans(b, short), inside)

    # ---- reading and writing

    def part(self, s: Stored, tv: TensorView, where: Where) -> Buffer:
        """The chunk of ``tv`` that an operation touches which walks through ``where``."""
        spans: dict[int, tuple[Operand, Dim]] = {}
        for d, axis in where:
            if axis not in s.loops and axis in self.index:
                c = chunk(tv, d, axis, self.index[axis])
                spans[d] = (c.start, c.size)
        if id(s.buffer) in self.guarded:
            spans.setdefault(0, (0, self.guarded[id(s.buffer)]))
        return self.w.spans(s.buffer, spans)

    def read(self, tv: TensorView, where: Where) -> Buffer:
        return self.part(self.stored[tv], tv, where)

    def target(self, tv: TensorView, where: Where) -> Buffer:
        """Where to write ``tv``: a new buffer of this block, or this trip's part of one outside."""
        if tv not in self.stored:
            self.stored[tv] = self.allocate(tv)
        return self.part(self.stored[tv], tv, where)

    def inside(self, s: Segment, op: Op) -> tuple[tuple[Where, ...], tuple[Where, ...]]:
        """What ``op`` reads and writes chunk by chunk, here: only the loops that it is in."""
        ins, outs = self.loops.chunked(op)

        def mine(where: Where) -> Where:
            return tuple((d, a) for d, a in where if a in s.nest)

        return tuple(map(mine, ins)), tuple(map(mine, outs))

    # ---- segments

    def segment(self, s: Segment) -> None:
        self.w.loc = s.ops[0].loc
        if s.kind == "communication":
            emit_moves.move(self, s)
        elif s.kind != "view" or not emit_views.view(self, s):
            self.unit(s)

    def unit(self, s: Segment) -> None:
        """One call."""
        read_outside = self.homes.read_outside(s)
        if not read_outside:
            return
        sums = {x.value: x for x in s.sums}
        accs = {tv: b for tv in s.made() if (b := self._accumulator(tv, s, sums)) is not None}
        ub = UnitBuilder(unit_name(s.ops, "_acc" if accs else ""))
        params = self._params(s, ub)
        added = {tv: ub.tensor(b, "acc") for tv, b in accs.items()}
        values: dict[TensorView, TensorView] = {}
        writes: dict[TensorView, Where] = {}
        for op in s.ops:
            axes = self.loops.axes[op]
            ins, outs = self.inside(s, op)
            given = [values[tv] if tv in values else params[id(self.read(tv, where))] for (tv, _), where in zip(axes.ins, ins, strict=True)]
            by_place: dict[object, TensorView] = dict(zip(axes.where or [tv for tv, _ in axes.ins], given, strict=True))
            writes.update(zip(op.outs, outs, strict=True))
            made = ub.op(op, by_place, self._here(op.outs[0], outs[0]), **_wide(op, sums.get(op.outs[0])))
            values.update(zip(op.outs, made, strict=True))
        results: list[TensorView] = []
        targets: list[Buffer] = []
        eager: list[tuple[TensorView, Buffer]] = []
        for tv in read_outside:
            if tv in added:
                how = sums[tv].op if tv in sums else self.terms[tv].op
                results.append(ub.accumulate(values[tv], added[tv], how))
                targets.append(accs[tv])
            elif tv in sums:
                eager.append((tv, self.w.alloc("term", TensorType(tv.dtype, self._here(tv, writes[tv])))))
            else:
                results.append(values[tv])
                targets.append(self.target(tv, writes[tv]))
        unit = ub.done([*results, *(values[tv] for tv, _ in eager)])
        self.w.call(unit, ub.args, [*targets, *(b for _, b in eager)])
        for tv, term in eager:
            self.add_into(term, self.part(self.sums[tv], tv, writes[tv]), sums[tv].op)

    def _params(self, s: Segment, ub: UnitBuilder) -> dict[int, TensorView]:
        """The unit's parameters, by the buffers that are passed: in the order in which operations name them. A single operation has its
        row's names, so equal ones are one unit."""
        params: dict[int, TensorView] = {}
        made: set[TensorView] = set()
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        for op in s.ops:
            axes = self.loops.axes[op]
            entries = sorted(
                zip(axes.ins, self.inside(s, op)[0], axes.where or [("x", 0)] * len(axes.ins), strict=True), key=lambda e: _place(op, e[2])
            )
            for (tv, _), where, (name, _) in entries:
                if tv not in made and id(b := self.read(tv, where)) not in params:
                    params[id(b)] = ub.tensor(b, name if len(s.ops) == 1 else next(letters, "p"))
            made |= set(op.outs)
        return params

    def _accumulator(self, tv: TensorView, s: Segment, sums: dict[TensorView, Sum]) -> Buffer | None:
        if tv in self.terms:
            return emit_parts.accumulator_of(self, self.terms[tv])
        if tv not in sums or sums[tv].eager:
            return None
        op = next(op for op in s.ops if tv in op.outs)
        return self.part(self.sums[tv], tv, self.inside(s, op)[1][op.outs.index(tv)])

    def _here(self, tv: TensorView, where: Where) -> tuple[Dim, ...]:
        """The sizes of ``tv`` in this trip."""
        if tv.type is None:
            return ()
        dims = list(local_dims(tv))
        for d, axis in where:
            dims[d] = chunk(tv, d, axis, self.index[axis]).size
        return tuple(dims)

    def add_into(self, term: Buffer, acc: Buffer, how: str) -> None:
        """``acc`` combined with ``term`` by the reduction ``how``, by a call of its own."""
        ub = UnitBuilder("add_out")
        a, t = ub.tensor(acc, "acc"), ub.tensor(term, "term")
        self.w.call(ub.done([ub.accumulate(t, a, how)]), ub.args, [acc])

    def cast(self, x: Buffer, out: Buffer) -> None:
        """``x`` in the dtype of ``out``."""
        if x.type.dtype is out.type.dtype:
            self.w.copy(x, out)
            return
        ub = UnitBuilder("cast")
        t = ub.tensor(x, "x")
        self.w.call(ub.done([ub.add("cast", t, dtype=out.type.dtype)]), ub.args, [out])

    def _finish(self, x: Sum) -> None:
        where = tuple((d, a) for d in range(len(x.value.known.dims)) if (a := self.loops.of(x.value, d)) is not None and a in self.index)
        self.cast(self.part(self.sums[x.value], x.value, where), self.target(x.value, where))


def _place(op: Op, where: tuple[str, int]) -> tuple[int, int]:
    """Where a parameter stands in its row."""
    row = TABLE.get(op.name)
    return (0, 0) if row is None else (next(i for i, p in enumerate(row.params) if p.name == where[0]), where[1])


def _wide(op: Op, x: Sum | None) -> dict[str, DType]:
    """A sum that is kept in a longer dtype is taken in that dtype from the start, where the operation can."""
    row = TABLE.get(op.name)
    if x is None or x.eager or row is None or x.dtype is op.outs[0].dtype or all(p.name != "dtype" for p in row.params):
        return {}
    return {"dtype": x.dtype}


def _mesh(tree: Tree) -> Mesh | None:
    for tv in (*tree.fusion.inputs, *(o for op in tree.fusion.ops for o in op.outs)):
        if tv.sharding is not None:
            return tv.sharding.mesh
    return None


def chunk_index(loop: Loop, var: Var) -> Operand:
    """Which chunk trip ``var`` is: rotated loops begin with another one on each rank."""
    r = loop.rotation
    if r is None:
        return var
    owner, inner, per = position(loop, var)
    return plus(times(owner, per), inner)


def position(loop: Loop, var: Operand) -> tuple[Operand, Operand, Dim]:
    """Of a rotated loop: whose part trip ``var`` takes, which chunk of it, and how many chunks a part has."""
    r = loop.rotation
    assert r is not None
    per: Dim = 1
    if not same(loop.axis.trips, r.size):
        assert isinstance(loop.axis.trips, int) and isinstance(r.size, int)
        per = loop.axis.trips // r.size
    step = var if same(per, 1) else binary("//", var, per)
    inner: Operand = 0 if same(per, 1) else binary("%", var, per)
    turned = plus(step, r.offset)
    owner = binary("%", binary("-" if r.step == 1 else "+", Rank(r.axis), turned), r.size)
    return owner, inner, per


def identity(op: str, dtype: DType) -> float | int | bool:
    """What a reduction begins with."""
    if op == "sum":
        return 0
    if op == "prod":
        return 1
    if dtype.name == "bool":
        return op == "min"
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    bits = 8 * dtype.itemsize
    low, high = (0, 2**bits - 1) if dtype.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return low if op == "max" else high


def _segments(items: tuple[Item, ...]) -> list[Segment]:
    return [s for i in items for s in ((i,) if isinstance(i, Segment) else _segments(i.body) if isinstance(i, Loop) else ())]


def _collectives(loop: Loop) -> bool:
    """Whether a communication in the body waits for what the body computes, trip by trip."""
    return any(s.kind == "communication" and s.how != "broadcast" for s in _segments(loop.body))


def _has_sums(loop: Loop, axis: LoopAxis) -> bool:
    return any(axis in x.loops for s in _segments(loop.body) for x in s.sums)
