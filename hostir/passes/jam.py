"""Unroll and jam: a loop that accumulates one term a trip becomes one that accumulates ``u`` terms a trip, in one unit.

The accumulator is then read and written once for ``u`` terms: 2H + 2H/u passes over memory in place of 4H (for one dtype). The terms
are added in the same order, so inside the unit nothing changes but where the running sum is kept.
"""

from __future__ import annotations

from dataclasses import replace

from hostir.errors import PlanError
from hostir.graph.compose import repeat
from hostir.graph.fusion import Fusion, TensorView
from hostir.ir.nodes import Argument, Buffer, Call, For, Program, Stmt, Unit, View, ViewOp, rewrite
from hostir.passes.substitute import in_expr, index_of
from hostir.types import Operand, Var, binary, leaves


def jam(p: Program, u: int) -> Program:
    """``p`` with every loop whose body is views and one accumulating call folded ``u`` terms at a time; the rest of the trips follow
    one by one. Loops of another form stay as they are."""
    if u < 1:
        raise PlanError("jam folds at least one term", program=p.name, got=u)
    if u == 1:
        return p

    def change(s: Stmt) -> list[Stmt]:
        return _jammed(s, u) if isinstance(s, For) and _accumulates(s) is not None else [s]

    return p.with_(body=rewrite(p.body, change))


def _accumulates(loop: For) -> tuple[Call, int] | None:
    """The one call of the body and the position of its accumulator among the arguments."""
    *views, last = loop.body or (None,)
    if not isinstance(last, Call) or not all(isinstance(v, View) for v in views) or len(last.outs) != 1 or loop.step != 1:
        return None
    if any(leaf is loop.var for v in views if isinstance(v, View) for d in v.out.type.dims for leaf in leaves(d)):
        return None  # the terms of one unit have one size
    at = [i for i, a in enumerate(last.args) if a is last.outs[0]]
    made_here = {id(v.out) for v in views if isinstance(v, View)}
    return (last, at[0]) if len(at) == 1 and id(last.outs[0]) not in made_here else None


def _jammed(loop: For, u: int) -> list[Stmt]:
    found = _accumulates(loop)
    assert found is not None
    call, at = found
    start, stop = loop.start, loop.stop
    whole = binary("*", binary("//", binary("-", stop, start), u), u)  # trips that come in groups of u
    middle = binary("+", start, whole)
    var = Var(loop.var.name)
    body: list[Stmt] = []
    args: list[Argument] = []
    fusion = Fusion(call.unit.fusion.name)
    inner = call.unit.fusion
    acc = inner.params[at]
    assert isinstance(acc, TensorView)
    values: list[list[object]] = []
    for k in range(u):
        swap: dict[int, Buffer] = {}
        trip = binary("+", var, k) if k else var
        for v in loop.body[:-1]:
            assert isinstance(v, View)
            op: ViewOp = index_of(v.op, loop.var, trip)
            source = swap.get(id(v.source), v.source)
            swap[id(v.out)] = Buffer(v.out.name, v.out.type, source, op)
            body.append(View(swap[id(v.out)], source, op, v.loc))
        row: list[object] = []
        for i, (param, a) in enumerate(zip(inner.params, call.args, strict=True)):
            if i == at:
                row.append(None)
                continue
            value = swap.get(id(a), a) if isinstance(a, Buffer) else _host(a, loop.var, trip)
            args.append(value)
            row.append(fusion.input(param.known.dims, param.dtype, name=param.name) if isinstance(param, TensorView) else _scalar(fusion, param))
        values.append(row)
    running = fusion.input(acc.known.dims, acc.dtype, name=acc.name)
    total = running
    for row in values:
        (total,) = repeat(inner, fusion, [total if x is None else x for x in row])
    fusion.output(total)
    body.append(replace(call, unit=Unit(call.unit.name, fusion), args=(*args, call.args[at])))
    jammed = For(var, start, middle, u, tuple(body), loop.loc)
    rest = replace(loop, start=middle)
    exact = isinstance(middle, int) and isinstance(stop, int) and middle == stop
    return [jammed] if exact else [jammed, rest]


def _scalar(fusion: Fusion, param: Var) -> Var:
    return fusion.scalar(param.name, param.kind)


def _host(a: Operand | bool, var: Var, trip: Operand) -> Operand | bool:
    return a if isinstance(a, bool) else in_expr(a, var, trip)
