"""What is read was written, nothing is used after it was freed, and how much memory that takes.

All three follow one dry run in program order, buffer by buffer. Most reads are of exactly what an earlier statement wrote, so that is
asked first; only other reads look at intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from hostir.ir.cohort import Cohort, Move, PerRank, Use
from hostir.ir.diagnostics import Diagnostic, Findings, Place, Texts
from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Free
from hostir.ir.race import Order
from hostir.ir.regions import Layout, Written, runs
from hostir.ir.teams import Ints
from hostir.ir.walk import Instance

Remote: TypeAlias = dict[tuple[Buffer, int, int], list[Layout]]  # (buffer, its how-manieth life, rank) -> what peers write there


class _Contents:
    """What has been written of one root buffer on each rank of a cohort."""

    def __init__(self, num_ranks: int, sizes: tuple[int, ...], remote: Sequence[Layout] = ()) -> None:
        self.num_ranks = num_ranks
        self.sizes = sizes
        self._exact: set[tuple[object, ...]] = set()
        self._history: list[Use] = []
        self._ranks: dict[int, tuple[Written, int]] = {}
        self._remote = remote
        self._uniform = True

    def write(self, u: Use) -> None:
        self._history.append(u)
        self._uniform &= u.offsets is None and u.only is None
        if u.only is None:
            self._exact.add(_key(u))

    def missing(self, u: Use) -> list[tuple[int, Layout]]:
        """The ranks (by place in the cohort) on which ``u`` reads what nothing has written, and what they read."""
        if not u.layout.numel or _key(u) in self._exact:
            return []
        uniform = self._uniform and u.offsets is None and u.only is None
        found = []
        for k in [0] if uniform else range(self.num_ranks):
            if u.only is not None and not u.only[k]:
                continue
            layout = _at(u, k)
            if not self._written(k).covers(layout):
                found.append((k, layout))
        if not found and u.only is None:
            self._exact.add(_key(u))
        return [(k, found[0][1]) for k in range(self.num_ranks)] if uniform and found else found

    def first_gap(self, rank: int, layout: Layout) -> int:
        """Some element (of the root, flat) that the region has and nothing wrote."""
        written = self._written(rank)
        for dim in range(len(layout.sizes)):
            while (n := layout.sizes[dim]) > 1:
                half = _narrow(layout, dim, 0, n // 2)
                layout = _narrow(layout, dim, n // 2, n - n // 2) if written.covers(half) else half
        return layout.offset

    def _written(self, k: int) -> Written:
        written, done = self._ranks.get(k) or (Written(), -1)
        if done < 0:
            done = 0
            for layout in self._remote:
                written.add(layout)
        offsets: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for u in self._history[done:]:
            if u.only is None or u.only[k]:
                offset = u.layout.offset if u.offsets is None else int(u.offsets[k])
                offsets.setdefault((u.layout.sizes, u.layout.strides), []).append(offset)
        for shape, at in offsets.items():
            starts, stops = runs(Layout(0, *shape))
            shift = np.array(at, np.int64)[:, None]
            written.add_runs((starts + shift).reshape(-1), (stops + shift).reshape(-1))
        self._ranks[k] = (written, len(self._history))
        return written


def _key(u: Use) -> tuple[object, ...]:
    return (u.layout.sizes, u.layout.strides, u.layout.offset if u.offsets is None else u.offsets.tobytes())


def _at(u: Use, k: int) -> Layout:
    return u.layout if u.offsets is None else Layout(int(u.offsets[k]), u.layout.sizes, u.layout.strides)


def _narrow(layout: Layout, dim: int, start: int, length: int) -> Layout:
    sizes = (*layout.sizes[:dim], length, *layout.sizes[dim + 1 :])
    return Layout(layout.offset + start * layout.strides[dim], sizes, layout.strides)


# -------------------------------------------------------------------------------------------------------------------- contents


def find_unwritten(c: Cohort, findings: Findings, texts: Texts, remote: Remote | None = None) -> None:
    """Reads and outputs of what nothing has written, uses after free. ``remote`` holds what peers write (whole run)."""
    contents: dict[int, _Contents | None] = {}  # by serial of the instance; None: all of it is written
    freed: dict[int, Move] = {}
    copies = c.copies

    def of(root: Instance) -> _Contents | None:
        return contents.get(root.serial)

    def check(m: Move | None, u: Use) -> None:
        if (held := of(u.root)) is not None and (gaps := held.missing(u)):
            element = _element(u.root.buffer.name, held.first_gap(*gaps[0]), held.sizes)
            _unwritten(m, u, element, [c.ranks[k] for k, _ in gaps], findings, texts)

    for m in c.moves:
        op = m.step.op
        if isinstance(op, Alloc):
            u = m.uses[0]
            if op.init is None and u.layout.numel:
                peers = (remote or {}).get((op.out, copies.get(u.root, 0), c.ranks[0]), ())
                contents[u.root.serial] = _Contents(len(c.ranks), u.layout.sizes, peers)
            continue
        for u in m.uses:
            if (before := freed.get(u.root.serial)) is not None:
                _after_free(c, before, m, u, findings, texts)
            elif isinstance(op, Free):
                freed[u.root.serial] = m
        if isinstance(op, Call) or (isinstance(op, Comm) and op.kind not in ("wait", "signal")):
            flags = op.awaits.root if isinstance(op, Call) and op.awaits is not None else None
            uses = m.uses if m.counts is None else _counted(m)
            for u in uses:
                if not u.write and u.peer is None and u.root.buffer is not flags:
                    check(m, u)
            for u in uses:
                if u.write and u.peer in (None, c.ranks[0]) and (held := of(u.root)) is not None:
                    held.write(u)
    for u in c.results:
        if (before := freed.get(u.root.serial)) is not None:
            _after_free(c, before, None, u, findings, texts)
        check(None, u)


def row_total(counts: Sequence[PerRank]) -> Ints:
    """The rows that an alltoallv sends, or receives, in all: one number for all ranks of a cohort, or one each."""
    return np.asarray(sum(np.asarray(n, np.int64) for n in counts))


def _counted(m: Move) -> list[Use]:
    """The uses of an alltoallv whose counts are known: of as many rows as are sent and received, and no more."""
    assert m.counts is not None
    found: list[Use] = []
    for u in m.uses:
        total = row_total(m.counts[u.write])
        for n in np.unique(total).tolist():
            layout = Layout(u.layout.offset, (n, *u.layout.sizes[1:]), u.layout.strides)
            mine = None if total.ndim == 0 else total == n
            only = u.only if mine is None else mine if u.only is None else mine & u.only
            found.append(u._replace(layout=layout, only=None if only is None or only.all() else only))
    return found


def _element(name: str, flat: int, sizes: tuple[int, ...]) -> str:
    """``%y[1, 0]`` for a flat element number of a dense root buffer."""
    index: list[int] = []
    for n in reversed(sizes):
        index.append(flat % n)
        flat //= n
    return f"%{name}[{', '.join(map(str, reversed(index)))}]" if index else f"%{name}"


def _unwritten(m: Move | None, u: Use, element: str, ranks: list[int], findings: Findings, texts: Texts) -> None:
    name = u.root.buffer.name
    cure = f"write all of %{name} first, or allocate it with zeros"

    def make() -> Diagnostic:
        if m is None:
            return Diagnostic("unwritten", f"the output %{name} is not fully written: for example {element}", cure=cure)
        place = texts.place(m.step.op, m.at, f"reads %{name}")
        return Diagnostic("unwritten", f"this reads {element}, which nothing has written", (place,), cure=cure)

    findings.add(("unwritten", id(m.step.op) if m is not None else 0, u.root.buffer), ranks, make)


def _after_free(c: Cohort, before: Move, m: Move | None, u: Use, findings: Findings, texts: Texts) -> None:
    name = u.root.buffer.name

    def make() -> Diagnostic:
        places: tuple[Place, ...] = (texts.place(before.step.op, before.at, f"frees %{name}"),)
        if m is None:
            return Diagnostic("lifetime", f"the output %{name} was freed", places, cure="an output is never freed")
        twice = isinstance(m.step.op, Free)
        places += (texts.place(m.step.op, m.at, "frees it again" if twice else f"{'writes' if u.write else 'reads'} %{name}"),)
        what = f"%{name} is freed twice" if twice else f"%{name} is used after it was freed"
        return Diagnostic("lifetime", what, places, cure="free a buffer once, after its last use")

    findings.add(("free", id(m.step.op) if m is not None else 0, u.root.buffer), c.ranks, make)


# ---------------------------------------------------------------------------------------------------------------------- memory


def peak_bytes(c: Cohort, order: Order | None) -> int:
    """The most that the program's own buffers hold at once (outputs in, inputs out), on each rank of a cohort.

    A buffer lives from its ``alloc`` to its ``free`` or, where none is written, to its last use (a pass frees it there); an output
    to the end. With the ``order`` of a scheduled program, the copy of an earlier trip counts until its last use is before the new one's.
    """
    kept = {u.root.serial for u in c.results}
    start: dict[int, tuple[Instance, int, int]] = {}
    end: dict[int, int] = {}
    uses: dict[int, list[int]] = {}
    for i, m in enumerate(c.moves):
        op = m.step.op
        if isinstance(op, Alloc):
            u = m.uses[0]
            start[u.root.serial] = (u.root, i, u.layout.numel * op.out.type.dtype.itemsize)
            end[u.root.serial] = i
            if op.init is not None:
                uses.setdefault(u.root.serial, []).append(i)
            continue
        for u in m.uses:
            if u.root.serial in start:
                end[u.root.serial] = i
                uses.setdefault(u.root.serial, []).append(i)
    for serial in kept & set(end):
        end[serial] = len(c.moves)
    if order is not None:
        _overlapping_trips(order, start, end, uses)
    change = np.zeros(len(c.moves) + 2, np.int64)
    for serial, (_, i, size) in start.items():
        change[i] += size
        change[end[serial] + 1] -= size
    return int(np.cumsum(change).max(initial=0))


def _overlapping_trips(order: Order, start: dict[int, tuple[Instance, int, int]], end: dict[int, int], uses: dict[int, list[int]]) -> None:
    """Later lives of a body buffer begin before the streams are done with earlier ones: those end where the order says so."""
    living: dict[Buffer, list[int]] = {}
    for serial, (root, i, _) in start.items():
        first = uses.get(serial, [i])[0]
        waiting = []
        for old in living.get(root.buffer, []):
            if not all(order.before(j, first) for j in _last_on_lanes(order, uses.get(old, []))):
                end[old] = max(end[old], first)
                waiting.append(old)
        living[root.buffer] = [*waiting, serial]


def _last_on_lanes(order: Order, moves: Sequence[int]) -> list[int]:
    last = {int(order.lane[j]): j for j in moves if order.lane[j] >= 0}
    return list(last.values())
