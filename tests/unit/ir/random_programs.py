"""Random host programs as plain data, and two readings of them: through the builder, and by hand on tensors, statement by statement.

A recipe is a tuple of statements over square buffers; index expressions are tuples over loop indices and one host scalar, so that
the same recipe means the same in both readings. Indices are taken modulo the size and are always in range.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from hypothesis import strategies as st

import hostir as hir
from hostir.types import as_predicate

SIDE: Final = 4  # every root buffer is SIDE x SIDE
ARITHMETIC: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": hir.min,
    "max": hir.max,
}
COMPARE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
}


@hir.unit
def scaled_sum(x, y, k):
    return x * 2 + y - k


@hir.unit
def swapped(x, y):
    return y, x


@hir.unit
def bump(x):
    x.add_(3)


# ------------------------------------------------------------------------------------------------------------------ the recipes


@functools.cache
def numbers(depth: int) -> st.SearchStrategy[Any]:
    """Host expressions inside ``depth`` loops."""
    leaves = [st.integers(-5, 9), st.just(("k",))] + [st.just(("i", d)) for d in range(depth)]

    def bigger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        divided = st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(1, 5))
        return st.one_of(divided, st.tuples(st.sampled_from(["+", "-", "*", "min", "max"]), inner, inner))

    return st.recursive(st.one_of(leaves), bigger, max_leaves=4)


@functools.cache
def indices(depth: int, size: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.integers(0, size - 1), numbers(depth).map(lambda e: ("%", e, size)))


@functools.cache
def views(depth: int, shape: tuple[int, ...], *, readable: bool = False) -> st.SearchStrategy[tuple[Any, ...]]:
    """Paths from a root to a view of ``shape``; ``readable`` ones may be expanded."""
    one, two = indices(depth, SIDE), indices(depth, SIDE // 2)
    whole = st.sampled_from([(), (("T",),), (("permute", 1, 0),), (("reshape", 2, 2, SIDE), ("reshape", SIDE, SIDE))])
    if shape == (SIDE, SIDE):
        rows = one.map(lambda i: (("select", 0, i), ("expand", SIDE, SIDE)))
        return st.one_of(whole, rows) if readable else whole
    if shape == (SIDE,):
        return st.one_of(
            one.map(lambda i: (("select", 0, i),)),
            one.map(lambda i: (("T",), ("select", 0, i))),
            one.map(lambda i: (("select", 1, i),)),
            two.map(lambda i: (("reshape", SIDE * SIDE), ("narrow", 0, ("*", i, 2), SIDE))),
        )
    if shape == (2, SIDE):
        return st.one_of(
            two.map(lambda i: (("narrow", 0, i, 2),)),
            two.map(lambda i: (("chunk", i, 2, 0),)),
            two.map(lambda i: (("reshape", 2, 2, SIDE), ("select", 0, i))),
            two.map(lambda i: (("T",), ("narrow", 0, i, 2))),
        )
    assert shape == ()
    return st.tuples(one, one).map(lambda at: (("select", 0, at[0]), ("select", 0, at[1])))


SHAPES: Final = ((SIDE, SIDE), (SIDE,), (2, SIDE), ())


@functools.cache
def places(depth: int, roots: tuple[str, ...], shape: tuple[int, ...], *, readable: bool = False) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(roots), views(depth, shape, readable=readable))


@st.composite
def statements(draw: Any, depth: int, roots: tuple[str, ...], budget: int) -> Any:
    shape = draw(st.sampled_from(SHAPES))
    read = places(depth, roots, shape, readable=True)
    write = places(depth, roots, shape)
    kinds = ["op", "op", "copy", "unit", "swap", "bump", "fresh", "number", "sum", "set"]
    kinds += ["matmul"] if shape == (SIDE, SIDE) else []
    kinds += ["loop", "if"] if budget > 0 else []
    match kind := draw(st.sampled_from(kinds)):
        case "op":
            return ("op", draw(st.sampled_from(["add", "sub", "mul"])), draw(read), draw(read), draw(write))
        case "copy" | "set":
            return (kind, draw(read), draw(write))
        case "unit":
            return ("unit", draw(read), draw(read), draw(numbers(depth)), draw(write))
        case "number":
            return ("number", draw(read), draw(st.integers(-3, 3)), draw(write))
        case "swap":
            a, b = draw(write), draw(write)
            return ("swap", a, b) if a[0] != b[0] else ("copy", a, b)
        case "bump":
            return ("bump", draw(write))
        case "fresh":
            return ("fresh", draw(read), draw(read), draw(write))
        case "matmul":
            return ("matmul", draw(read), draw(read), draw(write))
        case "sum":
            return ("sum", draw(places(depth, roots, (SIDE, SIDE), readable=True)), draw(places(depth, roots, (SIDE,))))
        case "loop":
            bounds = draw(st.tuples(st.integers(0, 2), numbers(depth).map(lambda e: ("%", e, 4)), st.integers(1, 3)))
            return ("loop", bounds, draw(blocks(depth + 1, roots, budget - 1)))
        case "if":
            test = (draw(st.sampled_from(sorted(COMPARE))), draw(numbers(depth)), draw(numbers(depth)))
            tests = draw(st.sampled_from([test, ("not", test), ("and", test, ("t",)), ("or", ("t",), test)]))
            return ("if", tests, draw(blocks(depth, roots, budget - 1)), draw(st.one_of(st.just(()), blocks(depth, roots, budget - 1))))
    raise AssertionError(kind)


@functools.cache
def blocks(depth: int, roots: tuple[str, ...], budget: int) -> st.SearchStrategy[Any]:
    return st.lists(statements(depth, roots, budget), min_size=1, max_size=3).map(tuple)


ROOTS: Final = ("x", "y", "z")
DTYPES: Final = (torch.int64, torch.float32, torch.bfloat16)


def recipes() -> st.SearchStrategy[Any]:
    """A dtype and a block over the roots x (an inout input), y and z (made by the program)."""
    return st.tuples(st.sampled_from(DTYPES), st.lists(statements(0, ROOTS, 2), min_size=1, max_size=6).map(tuple))


# ----------------------------------------------------------------------------------------------------------------- two readings


def number(e: Any, env: Mapping[Any, Any]) -> Any:
    if isinstance(e, int):
        return e
    if e[0] in ("k", "i", "t"):
        return env[e]
    return ARITHMETIC[e[0]](number(e[1], env), number(e[2], env))


def build(recipe: Any) -> Any:
    """The recipe as a program: inputs x (updated in place), the scalars k and t; outputs x, y, z."""
    dtype, body = recipe
    with hir.Program("random") as p:
        roots = {"x": p.input("x", (SIDE, SIDE), dtype, inout=True)}
        env: dict[Any, Any] = {("k",): p.scalar("k"), ("t",): p.scalar("t", bool)}
        roots["y"] = p.zeros((SIDE, SIDE), dtype, name="y")
        roots["z"] = p.full((SIDE, SIDE), 2, dtype, name="z")
        _build_block(p, body, roots, env)
        p.output(*roots.values())
    return p


def _view(root: Any, path: tuple[Any, ...], env: Mapping[Any, Any]) -> Any:
    for name, *args in path:
        numbers_ = [number(a, env) for a in args]
        root = root.T if name == "T" else getattr(root, name)(*numbers_)
    return root


def _build_condition(c: Any, env: Mapping[Any, Any]) -> Any:
    match c[0]:
        case "t":
            return as_predicate(env[c])
        case "not":
            return ~_build_condition(c[1], env)
        case "and":
            return _build_condition(c[1], env) & _build_condition(c[2], env)
        case "or":
            return _build_condition(c[1], env) | _build_condition(c[2], env)
    return as_predicate(COMPARE[c[0]](number(c[1], env), number(c[2], env)))  # two constants compare to a Python bool


def _build_block(p: Any, body: Any, roots: Mapping[str, Any], env: dict[Any, Any]) -> None:
    def at(place: Any) -> Any:
        return _view(roots[place[0]], place[1], env)

    for s in body:
        match s:
            case ("op", name, a, b, out):
                getattr(p, name)(at(a), at(b), out=at(out))
            case ("copy", a, out):
                p.copy(at(a), out=at(out))
            case ("set", a, out):
                at(out)[...] = at(a)
            case ("unit", a, b, k, out):
                p.call(scaled_sum, at(a), at(b), number(k, env), out=at(out))
            case ("number", a, c, out):
                p.mul(at(a), c, out=at(out))
            case ("swap", a, b):
                p.call(swapped, at(a), at(b), out=(at(a), at(b)))
            case ("bump", a):
                bump(at(a))
            case ("fresh", a, b, out):
                p.copy(p.add(p.sub(at(a), at(b)), at(b)), out=at(out))
            case ("matmul", a, b, out):
                p.matmul(at(a), at(b), out=at(out))
            case ("sum", a, out):
                p.sum(at(a), 0, out=at(out))
            case ("loop", bounds, inner):
                depth = sum(key[0] == "i" for key in env)
                with p.loop(*(number(b, env) for b in bounds)) as i:
                    _build_block(p, inner, roots, {**env, ("i", depth): i})
            case ("if", c, then, orelse):
                with p.if_(_build_condition(c, env)) as branch:
                    _build_block(p, then, roots, env)
                if orelse:
                    with branch.else_():
                        _build_block(p, orelse, roots, env)
            case _:
                raise AssertionError(s)


def twin(recipe: Any, x: torch.Tensor, k: int, t: bool) -> list[torch.Tensor]:
    """The recipe by hand: x is updated in place; returns x, y, z."""
    dtype, body = recipe
    roots = {"x": x, "y": torch.zeros(SIDE, SIDE, dtype=dtype), "z": torch.full((SIDE, SIDE), 2, dtype=dtype)}
    _run_block(body, roots, {("k",): k, ("t",): t})
    return list(roots.values())


def _tensor_view(root: torch.Tensor, path: tuple[Any, ...], env: Mapping[Any, Any]) -> torch.Tensor:
    for name, *args in path:
        n = [number(a, env) for a in args]
        match name:
            case "T":
                root = root.permute(*range(root.dim() - 1, -1, -1))
            case "reshape":
                root = root.view(*n)
            case "chunk":
                root = root.chunk(n[1], n[2])[n[0]]
            case _:
                root = getattr(root, name)(*n)
    return root


def _holds(c: Any, env: Mapping[Any, Any]) -> bool:
    match c[0]:
        case "t":
            return bool(env[c])
        case "not":
            return not _holds(c[1], env)
        case "and":
            return _holds(c[1], env) and _holds(c[2], env)
        case "or":
            return _holds(c[1], env) or _holds(c[2], env)
    return bool(COMPARE[c[0]](number(c[1], env), number(c[2], env)))


def _run_block(body: Any, roots: Mapping[str, torch.Tensor], env: dict[Any, Any]) -> None:
    """Every statement reads all that it reads before it writes."""

    def at(place: Any) -> torch.Tensor:
        return _tensor_view(roots[place[0]], place[1], env)

    for s in body:
        match s:
            case ("op", name, a, b, out):
                at(out).copy_(getattr(torch, name)(at(a), at(b)))
            case ("copy" | "set", a, out):
                at(out).copy_(at(a).clone())
            case ("unit", a, b, k, out):
                at(out).copy_(at(a) * 2 + at(b) - number(k, env))
            case ("number", a, c, out):
                at(out).copy_(at(a) * c)
            case ("swap", a, b):
                new_a, new_b = at(b).clone(), at(a).clone()
                at(a).copy_(new_a)
                at(b).copy_(new_b)
            case ("bump", a):
                at(a).add_(3)
            case ("fresh", a, b, out):
                at(out).copy_(at(a) - at(b) + at(b))
            case ("matmul", a, b, out):
                at(out).copy_(at(a) @ at(b))
            case ("sum", a, out):
                at(out).copy_(at(a).sum(0, dtype=at(a).dtype))
            case ("loop", bounds, inner):
                depth = sum(key[0] == "i" for key in env)
                for i in range(*(number(b, env) for b in bounds)):
                    _run_block(inner, roots, {**env, ("i", depth): i})
            case ("if", c, then, orelse):
                _run_block(then if _holds(c, env) else orelse, roots, env)
            case _:
                raise AssertionError(s)
