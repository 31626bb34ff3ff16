"""Random programs for several ranks: communications and calls on random streams, in loops and branches, and the same by hand.

The hand-made twin keeps every rank's tensors and executes one statement for all ranks before the next: program order, no streams. What
compiling adds (syncs, copies of loop buffers, frees) may not change a bit of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from hypothesis import strategies as st

import hostir as hir

ROWS: Final = 6  # divides by 1, 2 and 3 ranks
SHAPE: Final = (ROWS, 2)
ROOTS: Final = ("x", "y", "z")
STREAMS: Final = ("main", "main", "comm", "s", "other")


@functools.cache
def numbers(depth: int) -> st.SearchStrategy[Any]:
    leaves: list[Any] = [st.integers(0, 5), st.just("rank")] + [st.just(("i", d)) for d in range(depth)]
    return st.tuples(st.one_of(leaves), st.one_of(leaves))


@st.composite
def statements(draw: Any, depth: int, names: tuple[str, ...], budget: int) -> Any:
    name = st.sampled_from(names)
    kinds = ["add", "scale", "copy", "row", "ring", "allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "reduce", "group"]
    kinds += ["loop", "loop", "loop", "if"] if budget else []
    kind = draw(st.sampled_from(kinds))
    stream = draw(st.sampled_from(STREAMS))
    match kind:
        case "add" | "allreduce" | "ring" | "alltoall" | "copy" | "reduce" | "group":
            return (kind, draw(name), draw(name), draw(name), draw(st.integers(0, 5)), stream)
        case "scale":
            return (kind, draw(name), draw(numbers(depth)), stream)
        case "row":
            return (kind, draw(name), draw(name), draw(numbers(depth)), draw(numbers(depth)), stream)
        case "broadcast" | "allgather" | "reduce_scatter":
            return (kind, draw(name), draw(name), draw(st.integers(0, 5)), stream)
        case "loop":
            inner = f"t{depth}"
            return (kind, draw(st.integers(0, 4)), inner, draw(blocks(depth + 1, (*names, inner), budget - 1)))
    # ranks may take different branches, so only calls stand there
    local = st.lists(statements(depth, names, 0).filter(lambda s: s[0] in ("add", "scale", "copy", "row")), min_size=1, max_size=2).map(tuple)
    return ("if", draw(numbers(depth)), draw(local), draw(st.one_of(st.just(()), local)))


@functools.cache
def blocks(depth: int, names: tuple[str, ...], budget: int) -> st.SearchStrategy[Any]:
    return st.lists(statements(depth, names, budget), min_size=2, max_size=5).map(tuple)


def recipes() -> st.SearchStrategy[Any]:
    return st.lists(statements(0, ROOTS, 2), min_size=3, max_size=7).map(tuple)


def _sum(pair: Any, env: Mapping[Any, Any]) -> Any:
    a, b = (env[e] if not isinstance(e, int) else e for e in pair)
    return a + b * 2


def build(recipe: Any, d: int) -> Any:
    """Inputs x and y (updated in place), a buffer z; outputs all three."""
    with hir.Program("random_ranks", mesh=hir.Mesh((d,), ("tp",))) as p:
        env: dict[Any, Any] = {"rank": p.rank()}
        buffers = {name: p.input(name, SHAPE, torch.float64, inout=True) for name in ("x", "y")}
        buffers["z"] = p.zeros(SHAPE, torch.float64, name="z")
        _build(p, recipe, buffers, env, d)
        p.output(*(buffers[name] for name in ROOTS))
    return p


def _build(p: Any, body: Any, of: Mapping[str, Any], env: Mapping[Any, Any], d: int) -> None:
    r, part = p.rank(), ROWS // d
    for s in body:
        match s:
            case ("add", a, b, out, _, on):
                p.add(of[a], of[b], out=of[out], on=on)
            case ("scale", a, k, on):
                p.call(lambda x, k: x * 3 - k, of[a], _sum(k, env), out=of[a], on=on)
            case ("copy", a, _, out, _, on):
                p.copy(of[a], out=of[out], on=on)
            case ("row", a, out, i, j, on):
                p.add(of[a][_sum(i, env) % ROWS], of[out][_sum(j, env) % ROWS], out=of[out][_sum(j, env) % ROWS], on=on)
            case ("ring", a, _, out, by, on):
                p.permute(of[a], out=of[out], to=(r + by) % d, source=(r - by) % d, on=on)
            case ("allreduce", a, _, out, op, on):
                p.allreduce(of[a], out=of[out], op=("sum", "max", "min")[op % 3], on=on)
            case ("reduce", a, _, out, root, on):
                p.reduce(of[a], out=of[out], to=root % d, on=on)
            case ("broadcast", a, out, root, on):
                p.broadcast(of[a], out=of[out], source=root % d, on=on)
            case ("allgather", a, out, at, on):
                p.allgather(of[a].chunk(at % d, d), out=of[out], on=on)
            case ("reduce_scatter", a, out, at, on):
                p.reduce_scatter(of[a], out=of[out].chunk(at % d, d), on=on)
            case ("alltoall", a, _, out, _, on):
                p.alltoall(of[a], out=of[out], on=on)
            case ("group", a, b, out, by, on):
                if out in (a, b):
                    continue
                with p.group(on=on):
                    p.send(of[a][0:part], to=(r + by) % d)
                    p.recv(of[out][0:part], source=(r - by) % d)
                    p.send(of[b][part:ROWS], to=(r - by) % d)
                    p.recv(of[out][part:ROWS], source=(r + by) % d)
            case ("loop", trips, name, inner):
                depth = sum(isinstance(key, tuple) for key in env)
                with p.loop(trips) as i:
                    body_buffer = p.full(SHAPE, 1, torch.float64, name=name)
                    _build(p, inner, {**of, name: body_buffer}, {**env, ("i", depth): i}, d)
            case ("if", k, then, orelse):
                with p.if_(_sum(k, env) % 2 == 0) as branch:
                    _build(p, then, of, env, d)
                if orelse:
                    with branch.else_():
                        _build(p, orelse, of, env, d)
            case _:
                raise AssertionError(s)


Ranks = Sequence[dict[str, torch.Tensor]]


def start(rank: int) -> dict[str, torch.Tensor]:
    x = (torch.arange(ROWS * 2).reshape(SHAPE) + 1000 * (rank + 1)).double()
    return {"x": x % 17 - 8, "y": x % 5, "z": torch.zeros(SHAPE, dtype=torch.float64)}


def twin(recipe: Any, d: int) -> Ranks:
    """All ranks' x, y and z after the recipe."""
    ranks = [start(r) for r in range(d)]
    _run(recipe, ranks, [{"rank": r} for r in range(d)], d)
    return ranks


def _write(ranks: Ranks, out: str, values: Sequence[torch.Tensor | None]) -> None:
    for of, value in zip(ranks, values, strict=True):
        if value is not None:
            of[out].copy_(value)


def _local(s: Any, of: dict[str, torch.Tensor], env: Mapping[Any, Any]) -> None:
    match s:
        case ("add", a, b, out, _, _):
            of[out].copy_(of[a] + of[b])
        case ("scale", a, k, _):
            of[a].copy_(of[a] * 3 - _sum(k, env))
        case ("copy", a, _, out, _, _):
            of[out].copy_(of[a].clone())
        case ("row", a, out, i, j, _):
            at = _sum(j, env) % ROWS
            of[out][at] = of[a][_sum(i, env) % ROWS] + of[out][at]
        case ("if", k, then, orelse):
            for inner in then if _sum(k, env) % 2 == 0 else orelse:
                _local(inner, of, env)
        case _:
            raise AssertionError(s)


def _run(body: Any, ranks: Ranks, envs: Sequence[Mapping[Any, Any]], d: int) -> None:
    part = ROWS // d
    everyone = range(d)

    def all_of(name: str) -> list[torch.Tensor]:
        return [of[name].clone() for of in ranks]

    for s in body:
        match s:
            case ("ring", a, _, out, by, _):
                xs = all_of(a)
                _write(ranks, out, [xs[(r - by) % d] for r in everyone])
            case ("allreduce", a, _, out, op, _):
                stack = torch.stack(all_of(a))
                value = (stack.sum(0), stack.amax(0), stack.amin(0))[op % 3]
                _write(ranks, out, [value] * d)
            case ("reduce", a, _, out, root, _):
                value = torch.stack(all_of(a)).sum(0)
                _write(ranks, out, [value if r == root % d else None for r in everyone])
            case ("broadcast", a, out, root, _):
                _write(ranks, out, [all_of(a)[root % d]] * d)
            case ("allgather", a, out, at, _):
                _write(ranks, out, [torch.cat([x.chunk(d)[at % d] for x in all_of(a)])] * d)
            case ("reduce_scatter", a, out, at, _):
                value = torch.stack(all_of(a)).sum(0)
                for r in everyone:
                    ranks[r][out].chunk(d)[at % d].copy_(value.chunk(d)[r])
            case ("alltoall", a, _, out, _, _):
                xs = all_of(a)
                _write(ranks, out, [torch.cat([x.chunk(d)[r] for x in xs]) for r in everyone])
            case ("group", a, b, out, by, _):
                if out not in (a, b):
                    xs, ys = all_of(a), all_of(b)
                    _write(ranks, out, [torch.cat([xs[(r - by) % d][:part], ys[(r + by) % d][part:]]) for r in everyone])
            case ("loop", trips, name, inner):
                depth = sum(isinstance(key, tuple) for key in envs[0])
                for i in range(trips):
                    inside = [{**of, name: torch.ones(SHAPE, dtype=torch.float64)} for of in ranks]
                    _run(inner, inside, [{**env, ("i", depth): i} for env in envs], d)
            case _:
                for of, env in zip(ranks, envs, strict=True):
                    _local(s, of, env)
