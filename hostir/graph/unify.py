"""A unit's sizes may be symbols; each call binds them anew from the types of its arguments.

``unify`` matches a unit's parameter types with a call's argument types, ``result_types`` gives what the call then returns. So one
unit serves every chunk of a loop, a short last one too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hostir.errors import BuildError
from hostir.graph.fusion import Fusion, TensorView
from hostir.types import Dim, Expr, Leaf, Operand, Sym, TensorType, Var, dims_equal, is_whole, show_expr, simplify, substitute

Binding = Mapping[str, Dim]
_FITS: Final[Mapping[str, tuple[str, ...]]] = {"int": ("int",), "float": ("int", "float"), "bool": ("bool",)}


def _kind(x: Operand | bool) -> str:
    if isinstance(x, bool) or (isinstance(x, Var) and x.kind == "bool"):
        return "bool"
    return "int" if is_whole(x) else "float"


def unify(fusion: Fusion, args: Sequence[TensorType | Operand | bool], unit: str) -> dict[str, Dim]:
    """Bind the unit's symbols. BuildError when an argument cannot be meant for its parameter."""
    if len(args) != len(fusion.params):
        raise BuildError(f"@{unit} takes {len(fusion.params)} arguments", expected=len(fusion.params), got=len(args))
    bound: dict[str, Dim] = {}
    later: list[tuple[TensorView, int, Dim, Dim]] = []
    for param, arg in zip(fusion.params, args, strict=True):
        if isinstance(param, Var):
            if isinstance(arg, TensorType) or _kind(arg) not in _FITS[param.kind]:
                raise BuildError(f"%{param.name} of @{unit} is a host {param.kind}", got=arg if isinstance(arg, TensorType) else show_expr(arg))
            continue
        if not isinstance(arg, TensorType):
            raise BuildError(f"%{param.name} of @{unit} is a tensor", expected=param.type, got=arg)
        want = param.known
        if want.dtype != arg.dtype or len(want.dims) != len(arg.dims):
            raise BuildError(f"%{param.name} of @{unit} has another type", expected=want, got=arg)
        for position, (w, a) in enumerate(zip(want.dims, arg.dims, strict=True)):
            if isinstance(w, Sym) and w.name not in bound:
                bound[w.name] = a
            else:
                later.append((param, position, w, a))
    for param, position, w, a in later:
        if dims_equal(_bind(w, bound), a) is False:
            raise BuildError(
                f"size {position} of %{param.name} of @{unit} does not fit the other arguments",
                expected=show_expr(_bind(w, bound)), got=show_expr(a),
            )  # fmt: skip
    return bound


def _bind(d: Dim, bound: Binding) -> Dim:
    if not isinstance(d, Expr):
        return d

    def swap(leaf: Leaf) -> Operand:
        return bound.get(leaf.name, leaf) if isinstance(leaf, Sym) else leaf

    out: Dim = simplify(substitute(d, swap))  # type: ignore[assignment]
    return out


def result_types(fusion: Fusion, bound: Binding, scalars: Mapping[Var, Operand]) -> list[TensorType | None]:
    """The types of the unit's results at one call; None where only torch knows."""

    def swap(leaf: Leaf) -> Operand:
        if isinstance(leaf, Sym):
            return bound.get(leaf.name, leaf)
        return scalars.get(leaf, leaf) if isinstance(leaf, Var) else leaf

    out: list[TensorType | None] = []
    for result in fusion.results:
        t = result.value.type
        out.append(None if t is None else TensorType(t.dtype, tuple(simplify(substitute(d, swap)) for d in t.dims)))  # type: ignore[misc]
    return out
