"""The op table, and the one way to add an operation to a Fusion.

``TABLE`` maps a name to its row. ``apply`` binds operands and attributes by the row's signature, brings them to their canonical form
(dims counted from the front, defaults left out), works out the result types and appends the operation. The parser, the tracer and
``hir.ops`` all go through it, so equal operations look equal wherever they came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from hostir.errors import BuildError, HostIrError, Location, caller_location
from hostir.graph import rows_compute, rows_pointwise, rows_shape
from hostir.graph.fusion import Arg, Fusion, TensorView
from hostir.graph.row import REQUIRED, Overload, Param, Row
from hostir.graph.show import show_call
from hostir.types import DTYPES, DType, Expr, Predicate, TensorType, binary, dims_equal, dtype_of, key, simplify

_ALL: Final = (*rows_pointwise.ROWS, *rows_shape.ROWS, *rows_compute.ROWS)
TABLE: Final[Mapping[str, Row]] = MappingProxyType({r.name: r for r in _ALL})
assert len(TABLE) == len(_ALL), "two rows have one name"


def _by_overload() -> dict[str, tuple[tuple[Row, Overload], ...]]:
    found: dict[str, tuple[tuple[Row, Overload], ...]] = {}
    for r in _ALL:
        for overload in r.overloads:
            found[overload.name] = (*found.get(overload.name, ()), (r, overload))
    return found


OVERLOADS: Final[Mapping[str, tuple[tuple[Row, Overload], ...]]] = MappingProxyType(_by_overload())
"""``"sum.dim_IntList"`` -> the rows that may be that overload of ATen, to be tried in order."""


def is_opaque(name: str) -> bool:
    """An operation outside the table: ``aten.name.overload`` (or another namespace)."""
    return name.count(".") >= 2


def lookup(name: str) -> Row:
    """The row named ``name``; BuildError with near names."""
    if (found := TABLE.get(name)) is None:
        from difflib import get_close_matches

        near = ", ".join(get_close_matches(name, TABLE, 3)) or "an operation of the table"
        raise BuildError(f"there is no operation named {name!r}", expected=near, got=name, cure="opaque ones are written aten.name.overload")
    return found


# ------------------------------------------------------------------------------------------------------------------ binding


def bind(row: Row, args: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Values by parameter, in the row's order; positional ones first, then by name. Defaults are filled in."""
    if len(args) > len(row.params):
        raise BuildError(f"{row.name} takes at most {len(row.params)} arguments", expected=row.signature, got=len(args))
    given = dict(zip((p.name for p in row.params), args, strict=False))
    for k, v in attrs.items():
        if k in given:
            raise BuildError(f"{row.name} is given {k} twice", expected=row.signature)
        if all(p.name != k for p in row.params):
            raise BuildError(f"{row.name} has no argument named {k}", expected=row.signature, got=k)
        given[k] = v
    bound = {}
    for p in row.params:
        value = given.get(p.name, p.default)
        if value is REQUIRED:
            raise BuildError(f"{row.name} needs {p.name}", expected=row.signature, got=", ".join(given) or "nothing")
        bound[p.name] = _checked(row, p, value)
    return bound


def _refuse(row: Row, p: Param, value: object, expected: str) -> BuildError:
    return BuildError(f"{p.name} of {row.name} is {expected}", expected=expected, got=f"{value!r}")


def _checked(row: Row, p: Param, v: Any) -> Any:
    """``v`` as the kind that ``p`` is, or BuildError."""
    if v is None and p.optional:
        return None
    match p.kind:
        case "tensor":
            if not isinstance(v, TensorView):
                raise _refuse(row, p, v, "a tensor")
            return v
        case "tensors":
            if not isinstance(v, (list, tuple)) or not all(isinstance(x, TensorView) for x in v):
                raise _refuse(row, p, v, "a list of tensors")
            return tuple(v)
        case "value" if isinstance(v, TensorView):
            return v
        case "value" | "number":
            if not isinstance(v, (int, float, Expr)):
                raise _refuse(row, p, v, "a tensor or a number" if p.kind == "value" else "a number")
            return v
        case "size" | "index" | "start" | "stop":
            return _whole(row, p, v)
        case "int" | "dim" | "new_dim":
            if not isinstance(v, int) or isinstance(v, bool):
                raise _refuse(row, p, v, "a plain int")
            return v
        case "dims" | "new_dims":
            items = (v,) if isinstance(v, int) else v
            if not isinstance(items, (list, tuple)) or not all(isinstance(x, int) and not isinstance(x, bool) for x in items):
                raise _refuse(row, p, v, "a list of ints")
            return tuple(items)
        case "sizes" | "new_sizes":
            items = (v,) if isinstance(v, (int, Expr)) else v
            if not isinstance(items, (list, tuple)):
                raise _refuse(row, p, v, "a list of sizes")
            return tuple(_whole(row, p, x) for x in items)
        case "bool":
            if not isinstance(v, bool):
                raise _refuse(row, p, v, "true or false")
            return v
        case "dtype":
            return dtype_of(v)
        case "str":
            if not isinstance(v, str):
                raise _refuse(row, p, v, "a string")
            return v
    raise AssertionError(p.kind)


def _whole(row: Row, p: Param, v: Any) -> Any:
    if isinstance(v, (bool, float)) or not (isinstance(v, Expr) or hasattr(v, "__index__")):
        raise _refuse(row, p, v, "an int or a host expression")
    return v if isinstance(v, Expr) else v.__index__()


# ------------------------------------------------------------------------------------------------------------- canonical form


def _first_dims(bound: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The sizes of the first tensor operand, where they are known."""
    for v in bound.values():
        tv = v[0] if isinstance(v, tuple) and v else v
        if isinstance(tv, TensorView):
            return None if tv.type is None else tv.type.dims
    return None


def canonical(row: Row, bound: dict[str, Any]) -> dict[str, Any]:
    """Dims and constant indices counted from the front, where the first operand's type is known."""
    dims_of_first = _first_dims(bound)
    if dims_of_first is None:
        return bound
    out = dict(bound)
    rank = len(dims_of_first)
    for p in row.params:
        v = out[p.name]
        if v is None:
            continue
        extra = {"new_dim": 1, "new_dims": len(v) if isinstance(v, tuple) else 0}.get(p.kind, 0)
        span = max(rank + extra, 1)
        if p.kind in ("dim", "new_dim"):
            out[p.name] = v % span if -span <= v < span else v
        elif p.kind in ("dims", "new_dims"):
            out[p.name] = tuple(d % span if -span <= d < span else d for d in v) or (None if p.optional else ())
        elif p.kind in ("index", "start", "stop") and rank and isinstance(out["dim"], int) and 0 <= out["dim"] < rank:
            out[p.name] = _from_front(p.kind, v, dims_of_first[out["dim"]])
    return out


def _from_front(kind: str, v: Any, size: Any) -> Any:
    """A position in a dim of ``size``: constants below zero count from the end, slices end where the dim ends."""
    if isinstance(v, int) and v < 0:
        wrapped = simplify(binary("+", size, v))
        if kind == "index":
            return v if isinstance(wrapped, int) and wrapped < 0 else wrapped
        v = max(wrapped, 0) if isinstance(wrapped, int) else wrapped
    if kind == "index":
        return v
    if kind == "stop" and (dims_equal(v, size) or (isinstance(v, int) and (v >= 2**63 - 1 or (isinstance(size, int) and v >= size)))):
        return None
    return min(v, size) if isinstance(v, int) and isinstance(size, int) else v


def split(row: Row, bound: Mapping[str, Any]) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Operands (a tail of defaults left out) and attributes that differ from their default."""
    operands = [bound[p.name] for p in row.operands]
    while operands and operands[-1] is None:
        operands.pop()
    dims = _first_dims(bound)
    rank = None if dims is None else len(dims)
    attrs = tuple((p.name, bound[p.name]) for p in row.attributes if not _is_default(p, bound[p.name], rank))
    return tuple(operands), attrs


def _is_default(p: Param, v: Any, rank: int | None) -> bool:
    if isinstance(v, (TensorView, tuple, Expr, Predicate)) or p.default is REQUIRED:
        return False
    default = p.default
    if p.kind == "dim" and rank is not None and default is not None:
        default %= max(rank, 1)
    return type(v) is type(default) and bool(v == default)


# --------------------------------------------------------------------------------------------------------------------- types


def _typed(v: Any) -> Any:
    if isinstance(v, TensorView):
        return v.type
    return tuple(_typed(x) for x in v) if isinstance(v, tuple) else v


def _unknown(v: Any) -> bool:
    if isinstance(v, TensorView):
        return v.type is None
    return isinstance(v, tuple) and any(_unknown(x) for x in v)


def infer(row: Row, bound: Mapping[str, Any]) -> tuple[TensorType | None, ...]:
    """The result types for bound values (tensors are ``TensorView``s); None where an operand's type is unknown."""
    if any(_unknown(v) for v in bound.values()):
        return (None,) * row.num_outs
    found = row.rule(**{k: _typed(v) for k, v in bound.items()})
    return found if isinstance(found, tuple) else (found,)


def bound_of(op_name: str, args: Sequence[Arg], attrs: Sequence[tuple[str, Arg]]) -> dict[str, Any]:
    """Values by parameter, defaults filled in, of an operation that is already in a fusion."""
    row = TABLE[op_name]
    values = dict(zip((p.name for p in row.operands), args, strict=False)) | dict(attrs)
    return {p.name: values.get(p.name, p.default if p.default is not REQUIRED else None) for p in row.params}


def apply(
    fusion: Fusion,
    op_name: str,
    args: Sequence[Any] = (),
    attrs: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    *,
    hints: Sequence[str] = (),
    loc: Location | None = None,
    types: Sequence[TensorType | None] | None = None,
    num_outs: int | None = None,
) -> tuple[TensorView, ...]:
    """Append ``op_name(*args, **attrs)`` to ``fusion`` and return its results.

    Opaque operations (``aten.name.overload``) take any arguments; their result types are ``types``, else unknown (``num_outs`` says
    how many; by default one for each hint, at least one). For a row, ``types`` stands in where an operand's type is unknown.
    """
    attrs = dict(attrs)
    loc = loc or caller_location()
    if is_opaque(op_name):
        result = tuple(types) if types is not None else (None,) * (num_outs or len(hints) or 1)
        plain = [(k, _plain(v)) for k, v in attrs.items()]
        return fusion.add(op_name, [_plain(a) for a in args], plain, result, hints=hints, loc=loc)
    try:
        row = lookup(op_name)
        bound = canonical(row, bind(row, args, attrs))
        found = infer(row, bound)
    except HostIrError as e:
        raise e.with_context(statement=show_call(op_name, tuple(args), tuple(attrs.items())), loc=loc) from None
    if types is not None:
        found = tuple(t if f is None else f for f, t in zip(found, types, strict=True))
    for p in row.params:
        if p.kind == "new_sizes" and found[0] is not None and any(isinstance(d, int) and d == -1 for d in bound[p.name]):
            bound[p.name] = found[0].dims
    operands, rest = split(row, bound)
    return fusion.add(op_name, operands, rest, found, hints=hints, loc=loc)


def _plain(v: Any) -> Arg:
    if isinstance(v, (list, tuple)):
        return tuple(_plain(x) for x in v)
    if v is None or isinstance(v, (TensorView, Expr, int, float, str, DType)):
        return v
    raise BuildError(f"{v!r} cannot be an argument of an operation", expected="tensors, numbers, strings, dtypes and lists of them")


def op_key(op_name: str, args: Sequence[Any], attrs: Sequence[tuple[str, Any]]) -> object:
    """A hashable value, equal for the same operation on the same values."""

    def go(v: Any) -> object:
        if isinstance(v, TensorView):
            return id(v)
        if isinstance(v, tuple):
            return tuple(go(x) for x in v)
        return key(v) if isinstance(v, (Expr, Predicate)) else (type(v).__name__, v)

    return (op_name, *(go(a) for a in args), *((k, go(v)) for k, v in attrs))


__all__ = ["DTYPES", "OVERLOADS", "TABLE", "apply", "bind", "bound_of", "canonical", "infer", "is_opaque", "lookup", "op_key", "split"]
