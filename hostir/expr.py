"""Host numbers: integer expressions over loop indices, symbolic sizes and ranks, unknown while a program is built.

They are ``Expr`` trees over Python numbers. Arithmetic builds trees (constants fold), comparisons build ``Predicate`` trees, and
neither has a truth value, so that ``if r == 0`` can never silently decide something at build time. ``same(a, b)`` is structural
equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from hostir.errors import BuildError, caller_location

Number: TypeAlias = int | float | bool
BINARY: Final = ("+", "-", "*", "//", "%", "min", "max")
COMPARE: Final = ("==", "!=", "<", "<=", ">", ">=")


def _no_truth(what: str) -> bool:
    raise BuildError(
        f"{what} has no truth value while a program is being built",
        cure="use p.if_(condition) for a branch that ranks or trips take, & | ~ to combine conditions, hir.same(a, b) for equality",
        loc=caller_location(),
    )


class Expr:
    """A host number. Subclasses are leaves (``Var Sym Rank Size Epoch``) and ``Bin``."""

    __slots__ = ()

    def __add__(self, other: Operand) -> Operand:
        return binary("+", self, other)

    def __radd__(self, other: Operand) -> Operand:
        return binary("+", other, self)

    def __sub__(self, other: Operand) -> Operand:
        return binary("-", self, other)

    def __rsub__(self, other: Operand) -> Operand:
        return binary("-", other, self)

    def __mul__(self, other: Operand) -> Operand:
        return binary("*", self, other)

    def __rmul__(self, other: Operand) -> Operand:
        return binary("*", other, self)

    def __floordiv__(self, other: Operand) -> Operand:
        return binary("//", self, other)

    def __rfloordiv__(self, other: Operand) -> Operand:
        return binary("//", other, self)

    def __mod__(self, other: Operand) -> Operand:
        return binary("%", self, other)

    def __rmod__(self, other: Operand) -> Operand:
        return binary("%", other, self)

    def __neg__(self) -> Operand:
        return binary("-", 0, self)

    def __and__(self, other: object) -> Predicate:
        return Both(as_predicate(self), as_predicate(other))

    def __or__(self, other: object) -> Predicate:
        return Either(as_predicate(self), as_predicate(other))

    def __invert__(self) -> Predicate:
        return Negated(as_predicate(self))

    def __eq__(self, other: object) -> Predicate:  # type: ignore[override]
        return compare("==", self, other)

    def __ne__(self, other: object) -> Predicate:  # type: ignore[override]
        return compare("!=", self, other)

    def __lt__(self, other: Operand) -> Predicate:
        return compare("<", self, other)

    def __le__(self, other: Operand) -> Predicate:
        return compare("<=", self, other)

    def __gt__(self, other: Operand) -> Predicate:
        return compare(">", self, other)

    def __ge__(self, other: Operand) -> Predicate:
        return compare(">=", self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return _no_truth(f"the host number {self}")

    def __index__(self) -> int:
        raise BuildError(
            f"the host number {self} has no value while a program is being built",
            cure="loop with p.loop(n), index buffers with it; Python's range() and lists need a plain int",
            loc=caller_location(),
        )

    def __str__(self) -> str:
        return show_expr(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {show_expr(self)}>"


Operand: TypeAlias = int | float | Expr
Dim: TypeAlias = int | Expr


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Var(Expr):
    """A loop index or a scalar input. Identity is identity; ``name`` is a hint for printing."""

    name: str
    role: Literal["index", "scalar"] = "index"
    kind: Literal["int", "float", "bool"] = "int"


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Sym(Expr):
    """A symbolic size, the same wherever its name stands in one program or unit."""

    name: str


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Rank(Expr):
    """This rank's coordinate along a mesh axis."""

    axis: str


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Size(Expr):
    """The number of ranks along a mesh axis."""

    axis: str


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Epoch(Expr):
    """The number of this run, from 1: flags compare with it, so that nothing needs to be zeroed."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Bin(Expr):
    """``left op right`` with Python's rules for ``// %``."""

    op: str
    left: Operand
    right: Operand


class Predicate:
    """A condition on host numbers: ``Cmp``, ``Both``, ``Either``, ``Negated`` or ``Truth``."""

    __slots__ = ()

    def __and__(self, other: Predicate) -> Predicate:
        return Both(self, as_predicate(other))

    def __rand__(self, other: Predicate) -> Predicate:
        return Both(as_predicate(other), self)

    def __or__(self, other: Predicate) -> Predicate:
        return Either(self, as_predicate(other))

    def __ror__(self, other: Predicate) -> Predicate:
        return Either(as_predicate(other), self)

    def __invert__(self) -> Predicate:
        return Negated(self)

    def __bool__(self) -> bool:
        return _no_truth(f"the condition {self}")

    def __str__(self) -> str:
        return show_expr(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {show_expr(self)}>"


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Cmp(Predicate):
    op: str
    left: Operand
    right: Operand


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Both(Predicate):
    left: Predicate
    right: Predicate


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Either(Predicate):
    left: Predicate
    right: Predicate


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Negated(Predicate):
    inner: Predicate


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Truth(Predicate):
    """A bool scalar input, or a constant."""

    value: bool | Var


Leaf: TypeAlias = Var | Sym | Rank | Size | Epoch
Tree: TypeAlias = Operand | Predicate

_FOLD: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def operand(x: object) -> Operand:
    """``x`` as a host number: numbers and expressions as they are, whatever has ``__index__`` as an int."""
    if isinstance(x, Var) and x.kind == "bool":
        raise BuildError(
            f"%{x.name} is a condition, not a number", cure="use it in p.if_, with & | ~; or declare an int scalar", loc=caller_location()
        )
    if isinstance(x, Expr) or (type(x) in (int, float)):
        return x  # type: ignore[return-value]
    if isinstance(x, float):
        return float(x)
    if hasattr(x, "__index__"):
        return int(x.__index__())
    raise BuildError(
        f"{x!r} cannot be part of a host expression", expected="a number, a loop index, a size or a rank", got=type(x).__name__, loc=caller_location()
    )


def binary(op: str, left: object, right: object) -> Operand:
    """``left op right``; two numbers fold, nothing else is rewritten (so text round-trips)."""
    a, b = operand(left), operand(right)
    if isinstance(a, Expr) or isinstance(b, Expr):
        return Bin(op, a, b)
    if op in ("//", "%") and b == 0:
        raise BuildError(f"{a} {op} 0: division by zero in a host expression", loc=caller_location())
    result: Operand = _FOLD[op](a, b)
    return result


def compare(op: str, left: object, right: object) -> Predicate:
    a, b = operand(left), operand(right)
    if isinstance(a, Expr) or isinstance(b, Expr):
        return Cmp(op, a, b)
    return Truth(bool(_FOLD[op](a, b)))


def minimum(a: Operand, b: Operand) -> Operand:
    """The smaller of two host numbers; ``hir.min`` of the public API."""
    return binary("min", a, b)


def maximum(a: Operand, b: Operand) -> Operand:
    """The larger of two host numbers; ``hir.max`` of the public API."""
    return binary("max", a, b)


def as_predicate(x: object) -> Predicate:
    """Conditions, Python bools and bool scalars."""
    if isinstance(x, Predicate):
        return x
    if isinstance(x, bool) or (isinstance(x, Var) and x.kind == "bool"):
        return Truth(x)
    text = f"{show_expr(x)} is not a condition" if isinstance(x, Expr) else f"{x!r} is not a condition"
    raise BuildError(text, expected="a comparison of host numbers", cure="compare it: for example `x != 0`", loc=caller_location())


# ------------------------------------------------------------------------------------------------------------- walking a tree


def children(e: Tree) -> tuple[Tree, ...]:
    match e:
        case Bin(_, a, b) | Cmp(_, a, b) | Both(a, b) | Either(a, b):
            return (a, b)
        case Negated(a):
            return (a,)
        case Truth(v) if isinstance(v, Var):
            return (v,)
        case _:
            return ()


def leaves(e: Tree) -> Iterator[Leaf]:
    """Every variable, symbol, rank, size and epoch in ``e``, in order, with repeats."""
    if isinstance(e, (Var, Sym, Rank, Size, Epoch)):
        yield e
    for c in children(e):
        yield from leaves(c)


def is_whole(e: Tree) -> bool:
    """Whether ``e`` is an integer whatever its leaves are: nothing in it is a float."""
    if isinstance(e, float) or (isinstance(e, Var) and e.kind == "float"):
        return False
    return all(is_whole(c) for c in children(e))


def leaf_key(e: Leaf) -> tuple[object, ...]:
    match e:
        case Var():
            return ("var", id(e))
        case Sym(name):
            return ("sym", name)
        case Rank(axis):
            return ("rank", axis)
        case Size(axis):
            return ("size", axis)
        case Epoch():
            return ("epoch",)


def key(e: Tree) -> object:
    """A hashable value, equal for structurally equal trees."""
    if isinstance(e, (int, float)):
        return e
    if isinstance(e, (Var, Sym, Rank, Size, Epoch)):
        return leaf_key(e)
    op = e.op if isinstance(e, (Bin, Cmp)) else type(e).__name__
    if isinstance(e, Truth) and not isinstance(e.value, Var):
        return (op, e.value)
    return (op, *(key(c) for c in children(e)))


def same(a: Tree, b: Tree) -> bool:
    """Structural equality: same tree, same loop indices, same symbols."""
    return key(a) == key(b)


def substitute(e: Tree, swap: Callable[[Leaf], Operand]) -> Any:
    """``e`` with every leaf replaced by ``swap(leaf)``; constants that meet are folded."""
    match e:
        case Var() | Sym() | Rank() | Size() | Epoch():
            return swap(e)
        case Bin(op, a, b):
            return binary(op, substitute(a, swap), substitute(b, swap))
        case Cmp(op, a, b):
            return compare(op, substitute(a, swap), substitute(b, swap))
        case Both(a, b):
            return Both(substitute(a, swap), substitute(b, swap))
        case Either(a, b):
            return Either(substitute(a, swap), substitute(b, swap))
        case Negated(a):
            return Negated(substitute(a, swap))
        case Truth(v) if isinstance(v, Var):
            new = swap(v)
            return Truth(new) if isinstance(new, (bool, Var)) else Truth(bool(new))
        case _:
            return e


def source(e: Tree, leaf: Callable[[Leaf], str]) -> str:
    """``e`` as a Python expression, each leaf written by ``leaf``: the input of ``eval`` once, before the hot path."""
    match e:
        case Var() | Sym() | Rank() | Size() | Epoch():
            return leaf(e)
        case Bin(op, a, b) if op in ("min", "max"):
            return f"{op}({source(a, leaf)}, {source(b, leaf)})"
        case Bin(op, a, b) | Cmp(op, a, b):
            return f"({source(a, leaf)} {op} {source(b, leaf)})"
        case Both(a, b):
            return f"({source(a, leaf)} and {source(b, leaf)})"
        case Either(a, b):
            return f"({source(a, leaf)} or {source(b, leaf)})"
        case Negated(a):
            return f"(not {source(a, leaf)})"
        case Truth(v):
            return source(v, leaf) if isinstance(v, Var) else str(v)
        case float():
            return f"float({str(e)!r})"
        case _:
            return repr(e)


Env: TypeAlias = Callable[[Leaf], Any]


def evaluate(e: Tree, env: Env) -> Any:
    """The value of ``e``; ``env(leaf)`` gives each leaf's. ``and``/``or`` do not look at what cannot matter."""
    match e:
        case Var() | Sym() | Rank() | Size() | Epoch():
            return env(e)
        case Bin(op, a, b) | Cmp(op, a, b):
            return _FOLD[op](evaluate(a, env), evaluate(b, env))
        case Both(a, b):
            return evaluate(a, env) and evaluate(b, env)
        case Either(a, b):
            return evaluate(a, env) or evaluate(b, env)
        case Negated(a):
            return not evaluate(a, env)
        case Truth(v):
            return env(v) if isinstance(v, Var) else v
        case _:
            return e


# ---------------------------------------------------------------------------------------------------------------- printing

_LEVEL: Final = {"|": 1, "&": 2, "~": 3, "cmp": 4, "+": 5, "-": 5, "*": 6, "//": 6, "%": 6}


def number_text(x: Number) -> str:
    """Numbers as the grammar has them: ``1e-05 inf -inf nan true``."""
    if isinstance(x, bool):
        return "true" if x else "false"
    return repr(x)


def show_expr(e: Tree, name: Callable[[Var], str] | None = None) -> str:
    """The text of ``e``; ``name`` gives a variable's printed name (default: its hint)."""
    name = name or (lambda v: v.name)

    def go(e: Tree, level: int) -> str:
        match e:
            case Var():
                return f"%{name(e)}"
            case Sym():
                return e.name
            case Rank(axis):
                return f"rank({axis})"
            case Size(axis):
                return f"size({axis})"
            case Epoch():
                return "epoch"
            case Bin(op, a, b) if op in ("min", "max"):
                return f"{op}({go(a, 0)}, {go(b, 0)})"
            case Bin(op, a, b):
                return wrap(f"{go(a, _LEVEL[op])} {op} {go(b, _LEVEL[op] + 1)}", _LEVEL[op], level)
            case Cmp(op, a, b):
                return wrap(f"{go(a, 5)} {op} {go(b, 5)}", 4, level)
            case Both(a, b):
                return wrap(f"{go(a, 2)} & {go(b, 3)}", 2, level)
            case Either(a, b):
                return wrap(f"{go(a, 1)} | {go(b, 2)}", 1, level)
            case Negated(a):
                return wrap(f"~{go(a, 3)}", 3, level)
            case Truth(v):
                return go(v, level) if isinstance(v, Var) else number_text(v)
            case int() | float():
                return number_text(e)
            case _:
                raise AssertionError(e)

    def wrap(text: str, own: int, level: int) -> str:
        return f"({text})" if own < level else text

    return go(e, 0)
