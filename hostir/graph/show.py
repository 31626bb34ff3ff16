"""A Fusion as the text of a unit. Equal graphs have equal texts: names are made unique in order of appearance, and nothing about
devices or memory formats is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hostir.graph.fusion import Arg, Fusion, Op, TensorView
from hostir.types import DType, Expr, Predicate, Var, number_text, show_expr


def identifier(hint: str) -> str:
    """``hint`` as a name of the grammar."""
    name = re.sub(r"\W", "_", hint, flags=re.ASCII)
    return name if name and not name[0].isdigit() else f"_{name}"


class Names:
    """Distinct names for values, in order of appearance: ``t``, ``t_1``, ``t_2``."""

    def __init__(self, hint: Callable[[TensorView | Var], str] | None = None) -> None:
        self._hint = hint or (lambda v: v.name)
        self._of: dict[int, str] = {}
        self._used: set[str] = set()
        self._keep: list[object] = []

    def __call__(self, value: TensorView | Var) -> str:
        found = self._of.get(id(value))
        if found is None:
            base = found = identifier(self._hint(value))
            number = 0
            while found in self._used:
                number += 1
                found = f"{base}_{number}"
            self._used.add(found)
            self._of[id(value)] = found
            self._keep.append(value)
        return found


def show_arg(x: Any, names: Callable[[TensorView | Var], str] | None = None) -> str:
    """One operand or attribute: ``%x``, ``[0, m]``, ``bf16``, ``true``, ``none``, ``"mean"``."""
    if isinstance(x, TensorView):
        return f"%{names(x) if names else x.name}"
    if isinstance(x, (Expr, Predicate)):
        return show_expr(x, names)
    if isinstance(x, (tuple, list)):
        return f"[{', '.join(show_arg(y, names) for y in x)}]"
    if x is None:
        return "none"
    if isinstance(x, str):
        return json.dumps(x)
    if isinstance(x, DType):
        return x.name
    return number_text(x)


def show_call(name: str, args: tuple[Arg, ...], attrs: tuple[tuple[str, Arg], ...], names: Callable[[TensorView | Var], str] | None = None) -> str:
    """The right side of an operation: ``sum(%x, dims = [0])``."""
    parts = [show_arg(a, names) for a in args] + [f"{k} = {show_arg(v, names)}" for k, v in attrs]
    return f"{name}({', '.join(parts)})"


def show_op(op: Op, names: Callable[[TensorView | Var], str] | None = None) -> str:
    """One line of a unit: ``%t = mm(%a, %b)``."""
    outs = ", ".join(show_arg(o, names) for o in op.outs)
    return f"{outs} = {show_call(op.name, op.args, op.attrs, names)}"


def show_fusion(f: Fusion, name: str | None = None, rename: Callable[[TensorView | Var], str] | None = None) -> str:
    """The canonical text of ``f`` as ``unit @name(…) {…}``.

    All results are returned, hidden ones too, in order. ``rename`` gives each value's name before it is made unique (a constant
    function compares bodies alone); ``name`` replaces the unit's own.
    """
    names = Names(rename)
    params = []
    for p in f.params:
        label = names(p)
        params.append(f"%{label}: {p.kind if isinstance(p, Var) else p.known.show(names)}")
    lines = [f"unit @{name or identifier(f.name)}({', '.join(params)}) {{"]
    for op in f.ops:
        # Operands are named before results, as a reader meets them.
        right = show_call(op.name, op.args, op.attrs, names)
        lines.append(f"  {', '.join(show_arg(o, names) for o in op.outs)} = {right}")
    results = ", ".join(show_arg(r.value, names) for r in f.results)
    lines.append(f"  return {results}" if results else "  return")
    return "\n".join([*lines, "}"])
