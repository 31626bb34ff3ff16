"""Is a program right on every rank? All checks in one call, before anything runs.

Well-formed first; then each rank's dry run (indices, sizes, what is read was written, lifetimes, races); then all ranks together
(agreement, deadlock). Ranks that take one path are checked once. The report lists every finding with its cure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hostir.errors import BuildError, InputError, VerifyError
from hostir.graph.unify import result_types, unify
from hostir.ir.check import check_program
from hostir.ir.cohort import Cohort, Move, cohorts, one_sided
from hostir.ir.diagnostics import Diagnostic, Findings, Texts, of_error
from hostir.ir.kinds import COMMS
from hostir.ir.lifetimes import find_unwritten, peak_bytes, row_total
from hostir.ir.nodes import Alloc, Buffer, Call, Comm, Program, every
from hostir.ir.onesided import find_remote_races, remote_writes
from hostir.ir.race import Order, find_races, order_of
from hostir.ir.ranks import End, find_disagreements
from hostir.ir.teams import Teams
from hostir.ir.walk import resolve_mesh, symbols
from hostir.mesh import Mesh
from hostir.types import TensorType, Var

Meshes: TypeAlias = Mesh | int | Mapping[str, int] | None


@dataclass(frozen=True)
class Report:
    """What ``verify`` found. ``peak_bytes`` is the most that the program's own buffers hold at once on the rank that holds most."""

    program: str
    ranks: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...]
    peak_bytes: int
    num_steps: int
    num_walks: int

    @property
    def ok(self) -> bool:
        return not self.diagnostics

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "program": self.program, "ok": self.ok, "ranks": len(self.ranks), "peak_bytes": self.peak_bytes, "steps": self.num_steps,
            "diagnostics": [d.as_dict() for d in self.diagnostics],
        }  # fmt: skip

    def __str__(self) -> str:
        world = f"{len(self.ranks)} rank{'s' if len(self.ranks) != 1 else ''}"
        if self.ok:
            paths = "" if self.num_walks == 1 else f", {self.num_walks} different paths"
            return f"@{self.program} is right on {world}: {self.num_steps} steps at most{paths}, peak {self.peak_bytes:,} bytes"
        where = f" on {world}" if self.ranks else ""
        head = f"@{self.program} is not right{where}: {len(self.diagnostics)} finding{'s' if len(self.diagnostics) != 1 else ''}"
        return "\n".join([head, *map(str, self.diagnostics)])


def verify(
    p: Program,
    mesh: Meshes = None,
    *,
    dims: Mapping[str, int] | None = None,
    scalars: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Report:
    """Check ``p`` for every rank of ``mesh`` (an int for one axis, a dict, or a Mesh; default: the sizes in its text).

    ``dims`` gives the symbolic sizes, ``scalars`` the host numbers. With ``check`` a finding raises VerifyError with all diagnostics;
    InputError says which size is missing.
    """
    report = _verify(p, mesh, dims or {}, scalars or {})
    if check and not report.ok:
        raise VerifyError(str(report).splitlines()[0], diagnostics=report.diagnostics, program=p.name)
    return report


def _verify(p: Program, mesh: Meshes, dims: Mapping[str, int], scalars: Mapping[str, Any]) -> Report:
    data = p.data
    texts, findings = Texts(p), Findings()
    try:
        check_program(p)
    except BuildError as e:
        at = [s for s in every(data.body) if s.loc is not None and s.loc == e.loc]
        if len(at) == 1 and not any(isinstance(s, Comm) and s.kind not in COMMS for s in every(data.body)):
            e.with_context(statement=texts.line(at[0]))
        return Report(p.name, (), (of_error("form", e),), 0, 0, 0)
    sized = _mesh(p, mesh)
    _sizes_known(p, dims, scalars)
    teams = Teams(sized)
    found = cohorts(p, sized, dims=dims, scalars=scalars, teams=teams)
    for c in found:
        if (error := c.error) is not None:
            findings.add(("index", error.statement, str(error.loc)), c.ranks, lambda c=c: _of_error(c, texts))  # type: ignore[misc]
        _check_sizes(c, findings, texts)
    orders = [order_of(c.moves) if p.scheduled else None for c in found]
    _check_contents(p, found, orders, teams, findings, texts)
    peak = max((peak_bytes(c, order) for c, order in zip(found, orders, strict=True)), default=0)
    steps = max((len(c.moves) for c in found), default=0)
    return Report(p.name, sized.layout, findings.all(), peak, steps, len(found))


def _check_contents(p: Program, found: Sequence[Cohort], orders: Sequence[Order | None], teams: Teams, findings: Findings, texts: Texts) -> None:
    """Ranks whose dry run failed are not asked further, and then neither is how all of them meet."""
    complete = all(c.error is None for c in found)
    remote = remote_writes(found) if one_sided(p) else None
    for c, order in zip(found, orders, strict=True):
        if complete or (c.error is None and remote is None):
            find_unwritten(c, findings, texts, remote)
            find_races(c, order if remote is None else None, findings, texts)
    if complete:
        before = len(findings)
        ends: list[End] | None = None if remote is None else []
        find_disagreements(p, found, teams, findings, texts, ends)
        if ends is not None and len(findings) == before:
            find_remote_races(p, found, ends, findings, texts)


def _of_error(c: Cohort, texts: Texts) -> Diagnostic:
    assert c.error is not None
    found = (s for s in every(texts.program.body) if s.loc == c.error.loc and texts.line(s) == c.error.statement)
    at = next(found, None)
    loops = texts.loops(at) if at is not None else ()
    return of_error("index", c.error, tuple((texts.var(v), c.values[v]) for v in loops if v in c.values))


def _mesh(p: Program, mesh: Meshes) -> Mesh:
    if mesh is None and not p.axes:
        listed = [int(r) for s in every(p.body) if isinstance(s, Comm) and s.team for r in s.team]
        mesh = max(listed, default=0) + 1
    return resolve_mesh(p, mesh)


def _sizes_known(p: Program, dims: Mapping[str, int], scalars: Mapping[str, Any]) -> None:
    needed = symbols(p)
    if missing := [s for s in needed if s not in dims]:
        given = ", ".join(f'"{s}": …' for s in missing)
        raise InputError(f"@{p.name} has sizes without a value: {', '.join(missing)}", cure=f"dims={{{given}}}")
    if unknown := sorted(set(dims) - set(needed)):
        raise InputError(f"@{p.name} has no symbolic size {unknown[0]}", expected=", ".join(needed) or "none", got=unknown[0])
    names = [v.name for v in p.params if isinstance(v, Var)]
    if unknown := sorted(set(scalars) - set(names)):
        raise InputError(f"@{p.name} has no host number {unknown[0]}", expected=", ".join(names) or "none", got=unknown[0])


# ----------------------------------------------------------------------------------------------------------------------- sizes


def _check_sizes(c: Cohort, findings: Findings, texts: Texts) -> None:
    """What only numbers can tell: that symbolic sizes fit."""
    known: set[tuple[object, ...]] = set()
    for m in c.moves:
        op = m.step.op
        if isinstance(op, Alloc):
            key: tuple[object, ...] = (id(op), m.uses[0].layout.sizes)
        elif isinstance(op, Call):
            key = (id(op), tuple(u.layout.sizes for u in m.uses))
        elif isinstance(op, Comm):
            key = (id(op), m.sizes, len(m.step.team), _counts_key(m))
        else:
            continue
        if key not in known:
            known.add(key)
            if (wrong := _size_error(m)) is not None:
                place = texts.place(op, m.at)
                findings.add(("size", id(op)), c.ranks, lambda wrong=wrong, place=place: Diagnostic(  # type: ignore[misc]
                    "size", wrong.message, (place,), cure=wrong.cure,
                    details=tuple(f"{n}: {v}" for n, v in (("expected", wrong.expected), ("got", wrong.got)) if v is not None),
                ))  # fmt: skip


def _size_error(m: Move) -> BuildError | None:
    op = m.step.op
    if isinstance(op, Alloc):
        negative = any(n < 0 for n in m.uses[0].layout.sizes)
        return BuildError(f"%{op.out.name} has a negative size", got=list(m.uses[0].layout.sizes)) if negative else None
    if isinstance(op, Call):
        return _call_error(op, m)
    assert isinstance(op, Comm)
    return _comm_error(op, m.sizes, len(m.step.team)) or _counts_error(op, m)


def _call_error(op: Call, m: Move) -> BuildError | None:
    uses = iter(m.uses)
    args = [TensorType(a.type.dtype, next(uses).layout.sizes) if isinstance(a, Buffer) else a for a in op.args]
    outs = [u.layout.sizes for u in m.uses[len(m.uses) - len(op.outs) :]]
    try:
        bound = unify(op.unit.fusion, args, op.unit.name)
    except BuildError as e:
        return e
    for b, sizes, want in zip(op.outs, outs, result_types(op.unit.fusion, bound, {}), strict=True):
        got = TensorType(b.type.dtype, sizes)
        if want is not None and got.agrees(want) is False:
            return BuildError(f"@{op.unit.name} does not fit into %{b.name}", expected=want, got=got)
    return None


def _counts_key(m: Move) -> object:
    return m.counts and tuple(x.tobytes() if isinstance(x, np.ndarray) else x for side in m.counts for x in side)


def _counts_error(op: Comm, m: Move) -> BuildError | None:
    """Whether an alltoallv has the rows that it counts, on the ranks where it counts most (and least)."""
    if m.counts is None:
        return None
    for name, side, sizes, b in zip(("sends", "receives"), m.counts, m.sizes, (op.ins[0], op.outs[0]), strict=True):
        most, least = int(np.max(row_total(side))), min(int(np.min(n)) for n in side)
        if most > sizes[0] or least < 0:
            return BuildError(
                f"alltoallv {name} {most if least >= 0 else least} rows, and %{b.name} has {sizes[0]}", expected=f"0 .. {sizes[0]} rows in all",
                got=most if least >= 0 else least,
            )  # fmt: skip
    return None


def _comm_error(op: Comm, sizes: tuple[tuple[int, ...], ...], team: int) -> BuildError | None:
    if not (op.ins and op.outs):
        return None
    want, got = list(sizes[0]), list(sizes[1])
    grows = COMMS[op.kind].grows
    if grows in ("times", "over", "split") and not want:
        want = [1]
    divided = {"over": op.dim, "split": op.split}.get(grows)
    if divided is not None:
        if want[divided] % team:
            return BuildError(
                f"{op.kind} divides dimension {divided} evenly", expected=f"a multiple of {team}", got=want[divided],
                cure="pad the dimension, or send the parts with alltoallv",
            )  # fmt: skip
        want[divided] //= team
    if grows in ("times", "split"):
        want[op.dim if grows == "times" else op.cat] *= team
    if grows == "rows":
        want[0] = got[0]
    if want != got and not (got == [] and want == [1]):
        return BuildError(f"{op.kind} of %{op.ins[0].name} does not fit into %{op.outs[0].name}", expected=want, got=got)
    return None
