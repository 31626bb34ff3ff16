"""Every communication against plain torch, in every dtype and layout; runs inside a rank.

Each rank knows what all ranks hold (element i on rank r is a function of r and i, never one constant per rank), so it computes its own
expected result with ``torch.cat`` and ``sum`` and no communication. Tensors lie in larger ones whose other bytes must not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hostir.runtime.comms.protocol import CommCall
from hostir.runtime.world import World

WIDE = (torch.float64, torch.float32, torch.int64, torch.int32, torch.complex64)
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.int8, torch.uint8, torch.bool)
LAYOUTS = ("dense", "inside", "strided", "transposed")
GUARD = 7


def values(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What rank ``rank`` holds."""
    i = torch.arange(math.prod(shape), dtype=torch.int64).reshape(tuple(shape))
    if dtype == torch.complex64:
        return torch.complex((1000.0 * (rank + 1) + i).float(), (i - 3.0 * rank).float())
    if dtype in WIDE:
        return (1000 * (rank + 1) + i).to(dtype)
    if dtype == torch.bool:
        return (i + rank) % 3 == 0
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return ((i + 2 * rank) % 4).float().to(dtype)
    return (16 * rank + i % 13).to(dtype)


def factors(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Small numbers whose products are exact."""
    i = torch.arange(math.prod(shape), dtype=torch.int64).reshape(tuple(shape))
    if dtype == torch.complex64:
        return torch.complex((i % 3 + 1).float(), (rank - 1.0) * torch.ones_like(i))
    return ((i + rank) % 3).to(dtype) if dtype == torch.bool else ((i + rank) % 2 + 1).float().to(dtype)


@dataclass
class Held:
    """A tensor in a larger one; ``check_guard`` fails when bytes beside it have changed."""

    view: torch.Tensor
    base: torch.Tensor
    is_guard: torch.Tensor

    def check_guard(self) -> None:
        around = self.base.reshape(-1).view(torch.uint8).view(self.base.numel(), self.base.element_size())[self.is_guard.reshape(-1)]
        assert bool((around == GUARD).all()), "bytes beside the tensor have changed"


def hold(content: torch.Tensor, layout: str) -> Held:
    """``content`` in memory of the given layout."""
    shape = tuple(content.shape)

    def place(base_shape: tuple[int, ...], look: Callable[[torch.Tensor], torch.Tensor]) -> Held:
        base = torch.full((math.prod(base_shape) * content.element_size(),), GUARD, dtype=torch.uint8).view(content.dtype).view(base_shape)
        is_guard = torch.ones(base_shape, dtype=torch.bool)
        look(is_guard).fill_(False)
        view = look(base)
        view.copy_(content)
        return Held(view, base, is_guard)

    match layout:
        case "dense":
            return place(shape, lambda b: b)
        case "inside":
            size = content.numel()
            return place((size + 6,), lambda b: b[3 : 3 + size].view(shape))
        case "strided":
            return place((*shape, 2), lambda b: b[..., 0])
        case "transposed":
            return place(tuple(reversed(shape)), lambda b: b.permute(tuple(reversed(range(len(shape))))))
    raise AssertionError(layout)


def empty_like(expected: torch.Tensor, layout: str) -> Held:
    return hold(torch.zeros_like(expected), layout)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, NaNs included."""
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(as_bytes(got), as_bytes(want))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction, computed in a wide dtype."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    x = torch.stack([p.to(wide) for p in parts])
    match op:
        case "sum":
            total = x.sum(0)
        case "avg":
            exact = x.sum(0)  # an integer; only the division rounds
            narrow = {torch.complex64: torch.complex64, torch.float64: torch.float64}.get(dtype, torch.float32)
            total = exact.to(narrow) / len(parts)
        case "prod":
            total = x.prod(0)
        case "max":
            total = x.amax(0)
        case "min":
            total = x.amin(0)
        case _:
            raise AssertionError(op)
    return total != 0 if dtype == torch.bool else total.to(dtype)


@dataclass(frozen=True)
class Case:
    """One call on this rank and what must be in its output afterwards (None: it has none)."""

    call: CommCall
    held: tuple[Held, ...]
    want: torch.Tensor | None
    title: str


def cases(world: World, team: tuple[int, ...], dtype: torch.dtype, layout: str, shape: tuple[int, ...]) -> Iterator[Case]:
    """Every collective of one dtype, layout and shape on ``team``, as seen from this rank; ``shape`` is a rank's own part."""
    here, num = team.index(world.rank), len(team)
    parts = [values(r, shape, dtype) for r in team]
    title = f"{dtype} {layout} {shape} team {team}"

    def case(kind: str, x: torch.Tensor | None, want: torch.Tensor | None, **facts: Any) -> Case:
        ins = () if x is None else (hold(x, layout),)
        outs = () if want is None else (empty_like(want, layout),)
        call = CommCall(kind, team, tuple(h.view for h in ins), tuple(h.view for h in outs), where=lambda: f"{kind} {facts} {title}", **facts)
        return Case(call, (*ins, *outs), want, f"{kind} {facts} {title}")

    mine = parts[here]
    dims = range(max(len(shape), 1))
    flat = [p.reshape(1) if p.dim() == 0 else p for p in parts]
    for dim in dims:
        joined = torch.cat(flat, dim)
        root = (dim + 1) % num
        yield case("allgather", mine, joined, dim=dim)
        yield case("gather", mine, joined if here == root else None, dim=dim, to=root)
        source = [torch.cat([values(10 * r + j, shape, dtype).reshape(flat[0].shape) for j in range(num)], dim) for r in range(num)]
        piece = values(10 * root + here, shape, dtype)
        yield case("scatter", source[root] if here == root else None, piece, dim=dim, source=root)
        for op in ("sum", "max") if not dtype.is_complex else ("sum",):
            want = reduced([values(10 * r + here, shape, dtype) for r in range(num)], op)
            yield case("reduce_scatter", source[here], want, dim=dim, op=op)
    for root in (0, num - 1):
        yield case("broadcast", mine if here == root else None, parts[root], source=root)
    for op in ops_of(dtype):
        given = [factors(r, shape, dtype) for r in team] if op == "prod" else parts
        yield case("allreduce", given[here], reduced(given, op), op=op)
        yield case("reduce", given[here], reduced(given, op) if here == num - 1 else None, op=op, to=num - 1)
    held = hold(mine, layout)
    in_place = CommCall("allreduce", team, (held.view,), (held.view,))
    yield Case(in_place, (held,), reduced(parts, "sum"), f"allreduce in place {title}")
    for shift in {1 % num, num - 1}:
        yield case("permute", mine, parts[(here - shift) % num], to=(here + shift) % num, source=(here - shift) % num)
    if shape:
        for split in range(len(shape)):
            for cat in range(len(shape)):
                whole = [torch.cat([values(10 * r + j, shape, dtype) for j in range(num)], split) for r in range(num)]
                want = torch.cat([values(10 * r + here, shape, dtype) for r in range(num)], cat)
                yield case("alltoall", whole[here], want, split=split, cat=cat)
        counts = [[(3 * i + 2 * j) % 4 for j in range(num)] for i in range(num)]
        rows = [values(i, (sum(counts[i]) + 1, *shape[1:]), dtype) for i in range(num)]
        pieces = [rows[i].split([*counts[i], 1])[here] for i in range(num)]
        sent, received = tuple(counts[here]), tuple(c[here] for c in counts)
        unused = torch.zeros((2, *shape[1:])).to(dtype)
        yield case("alltoallv", rows[here], torch.cat([*pieces, unused]), send_counts=sent, recv_counts=received)
    yield case("barrier", None, None)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return ("sum", "prod", "avg")
    if dtype.is_floating_point:
        return ("sum", "prod", "min", "max", "avg")
    return ("sum", "prod", "min", "max")


def run_case(world: World, case: Case) -> None:
    world.comms.issue(case.call).wait()
    if case.want is not None:
        got = case.call.outs[0]
        assert same(got, case.want), f"rank {world.rank}: {case.title}\ngot  {got}\nwant {case.want}"
    for held in case.held:
        held.check_guard()


def messages(world: World, team: tuple[int, ...], dtype: torch.dtype, layout: str, shape: tuple[int, ...]) -> int:
    """Every rank sends two tensors to every rank, itself included, as one group; returns the number of messages."""
    here = team.index(world.rank)
    calls, checks = [], []
    for number in range(2):
        for peer, _ in enumerate(team):
            x = hold(values(100 * number + 10 * here + peer, shape, dtype), layout)
            out = empty_like(x.view, layout)
            calls.append(CommCall("send", team, (x.view,), to=peer))
            calls.append(CommCall("recv", team, (), (out.view,), source=peer))
            checks.append((out, values(100 * number + 10 * peer + here, shape, dtype)))
    world.comms.issue_group(calls).wait()
    for out, want in checks:
        assert same(out.view, want), f"rank {world.rank}: message {dtype} {layout} {shape}: got {out.view}, want {want}"
        out.check_guard()
    return len(calls)


def check_all(world: World, dtypes: Sequence[torch.dtype], layouts: Sequence[str], shapes: Sequence[tuple[int, ...]], agreed: bool = False) -> int:
    """All cases on the whole world; returns how many checks ran."""
    team = tuple(range(world.size))
    num_checks = 0
    for dtype in dtypes:
        for layout in layouts:
            for shape in shapes:
                for case in cases(world, team, dtype, layout, shape):
                    run_case(world, replace(case, call=replace(case.call, agreed=agreed)))
                    num_checks += 1
                num_checks += messages(world, team, dtype, layout, shape)
    return num_checks
