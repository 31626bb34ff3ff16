"""Arithmetic on sizes: sums of products in normal form, which tell whether two sizes agree, differ, or only a run can say."""

from __future__ import annotations

from typing import TypeAlias

from hostir.expr import Bin, Dim, Expr, Operand, binary, key

_Poly: TypeAlias = dict[tuple[object, ...], tuple[tuple[Expr, ...], int]]


def _poly(e: Operand) -> _Poly:
    """``e`` as a polynomial with integer coefficients; ``// % min max`` that do not simplify are atoms."""
    if not isinstance(e, Expr):
        return {(): ((), int(e))} if e else {}
    if isinstance(e, Bin) and e.op in ("+", "-"):
        out = dict(_poly(e.left))
        for k, (atoms, c) in _poly(e.right).items():
            total = out.get(k, (atoms, 0))[1] + (c if e.op == "+" else -c)
            out[k] = (atoms, total)
        return {k: v for k, v in out.items() if v[1]}
    if isinstance(e, Bin) and e.op == "*":
        out = {}
        for ka, (aa, ca) in _poly(e.left).items():
            for kb, (ab, cb) in _poly(e.right).items():
                pairs = sorted(zip((*ka, *kb), (*aa, *ab), strict=True), key=lambda pair: str(pair[0]))
                k = tuple(p[0] for p in pairs)
                out[k] = (tuple(p[1] for p in pairs), out.get(k, ((), 0))[1] + ca * cb)
        return {k: v for k, v in out.items() if v[1]}
    if isinstance(e, Bin) and e.op in ("//", "%") and isinstance(e.right, int) and e.right > 0:
        inner = _poly(e.left)
        if all(c % e.right == 0 for _, c in inner.values()):
            return {k: (a, c // e.right) for k, (a, c) in inner.items()} if e.op == "//" else {}
    if isinstance(e, Bin):
        e = Bin(e.op, simplify(e.left), simplify(e.right))
    return {(key(e),): ((e,), 1)}


def simplify(e: Operand) -> Operand:
    """An equal expression, as a sum of products in order of appearance; an int where ``e`` is constant."""
    if not isinstance(e, Expr):
        return e
    total: Operand = 0
    for position, (atoms, c) in enumerate(_poly(e).values()):
        term: Operand = 1 if not atoms else atoms[0]
        for a in atoms[1:]:
            term = binary("*", term, a)
        if not atoms:
            term = abs(c)
        elif abs(c) != 1:
            term = binary("*", term, abs(c))
        if position == 0:
            total = term if c > 0 else binary("-", 0, term)
        else:
            total = binary("+" if c > 0 else "-", total, term)
    return total


def dims_equal(a: Dim, b: Dim) -> bool | None:
    """True or False where the two sizes are known to agree or to differ, None where only a run can tell."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    difference = simplify(binary("-", a, b))
    return (difference == 0) if isinstance(difference, int) else None


def product(dims: tuple[Dim, ...]) -> Dim:
    out: Operand = 1
    for d in dims:
        out = binary("*", out, d)
    return simplify(out)  # type: ignore[return-value]
