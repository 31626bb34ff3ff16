"""What ranks that address each other's memory are asked to do, on CPUs and on GPUs alike: one function for each claim, run on every rank."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch

import hostir as hir
from hostir.errors import RankMismatchError
from hostir.launch import World
from hostir.overlap.programs import collective_ag_gemm, ring_ag_gemm
from hostir.runtime.comms.protocol import CommCall
from hostir.runtime.comms.reduce import ordered
from tests.dist import comm_cases as cc
from tests.unit.ir.right_programs import PULL, PUSH, program

MODES: Final = ("checked", "compiled")

# Two ranks in turn: 0 writes into 1's buffer and signals, 1 doubles what came and writes it back.
PING: Final = """
program @ping(%x: f32[4]) mesh(tp) {
  %b = alloc f32[4] symmetric
  %f = alloc i32[] symmetric
  %o = alloc f32[4]
  if rank(tp) == 0 {
    %p = view %b.peer(1)
    %p <- copy(%x)
    signal(%f to 1 value epoch)
    wait(%f value epoch)
    %o <- copy(%b)
  } else {
    if rank(tp) == 1 {
      wait(%f value epoch)
      %c = alloc f32[4]
      %c <- @double(%b)
      %q = view %b.peer(0)
      %q <- copy(%c)
      signal(%f to 0 value epoch)
      %o <- copy(%c)
    } else {
      %o <- copy(%x)
    }
  }
  return %o
}
"""

# A ring by hand: every rank pulls its neighbour's buffer chunk by chunk on its own stream, each chunk ordered by a flag of its own.
CHUNKED_PUSH: Final = """
program @chunked_push(%x: f32[4, 8]) mesh(tp) scheduled {
  %b = alloc f32[4, 8] symmetric
  %f = alloc i32[] symmetric
  %o = alloc f32[4, 8]
  %p = view %b.peer((rank(tp) + 1) % size(tp))
  for %i in 0 .. 4 {
    %from = view %x[%i]
    %into = view %p[%i]
    %into <- copy(%from) on c
    signal(%f to (rank(tp) + 1) % size(tp) value epoch * 4 + %i) on c
  }
  for %j in 0 .. 4 {
    wait(%f value epoch * 4 + %j)
    %a = view %b[%j]
    %z = view %o[%j]
    %z <- @double(%a)
  }
  return %o
}
"""


def everything(world: World) -> tuple[int, ...]:
    return tuple(range(world.size))


def on(world: World) -> Any:
    return torch.device(world.device)


def agreed(kind: str, team: tuple[int, ...], **facts: Any) -> CommCall:
    return CommCall(kind, team, agreed=True, **facts)


def issue(world: World, kind: str, *, team: tuple[int, ...] | None = None, **facts: Any) -> None:
    world.comms.issue(agreed(kind, everything(world) if team is None else team, **facts)).wait()


# ------------------------------------------------------------------------------------------------------------- communications


def every_collective(world: World) -> None:
    with on(world):
        cc.check_all(world, (torch.float32, torch.bfloat16, torch.int16, torch.bool), cc.LAYOUTS, ((3, 2), (), (0, 5)), agreed=True)


def every_dtype_compared(world: World) -> None:
    with on(world):
        cc.check_all(world, (torch.float64, torch.complex64, torch.uint8, torch.float8_e4m3fn), ("dense",), ((2, 3),))


def teams_in_their_own_order(world: World) -> None:
    with on(world):
        for team in ((1, 0), (3, 1, 0), (2, 0), (3, 2, 1, 0), (0, 2), (1, 3)):
            if max(team) < world.size and world.rank in team:
                for case in cc.cases(world, team, torch.float32, "strided", (2, 3)):
                    cc.run_case(world, case)
                cc.messages(world, team, torch.int32, "dense", (2,))


def large_tensors(world: World) -> None:
    """Past one slot, past the first workspace, past one step of an allreduce."""
    rank, size = world.rank, world.size
    length = 9_000_001 if world.device.type == "cuda" else 1_200_001
    with on(world):
        x = cc.values(rank, (length,), torch.int32)
        parts = [cc.values(r, (length,), torch.int32) for r in range(size)]
        out = torch.empty_like(x)
        issue(world, "allreduce", ins=(x,), outs=(out,))
        assert torch.equal(out, torch.stack(parts).sum(0).to(torch.int32))
        issue(world, "permute", ins=(x,), outs=(x,), to=(rank + 1) % size, source=(rank - 1) % size)
        assert torch.equal(x, parts[rank - 1])
        gathered = torch.empty(size * length, dtype=torch.int32)
        issue(world, "allgather", ins=(x,), outs=(gathered,))
        assert torch.equal(gathered, torch.cat([parts[r - 1] for r in range(size)]))
        strided = torch.zeros(length, 2, dtype=torch.int32)[:, 0]
        strided.copy_(parts[rank])
        back = torch.zeros(length, 2, dtype=torch.int32)[:, 1]
        issue(world, "permute", ins=(strided,), outs=(back,), to=(rank - 1) % size, source=(rank + 1) % size)
        assert torch.equal(back, parts[(rank + 1) % size])


def sums_have_the_bits_of_rank_order(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for length in (1001, 700_001):
            parts = [torch.randn(length, generator=torch.Generator().manual_seed(r)).to(dtype) * 10.0 ** (2 * r) for r in range(world.size)]
            x = parts[world.rank].to(world.device)
            out = torch.empty_like(x)
            issue(world, "allreduce", ins=(x,), outs=(out,))
            assert torch.equal(out.cpu(), ordered(parts, "sum")), (dtype, length)


def many_messages_in_a_group(world: World) -> None:
    rank, size = world.rank, world.size
    with on(world):
        calls, checks = [], []
        for number in range(40):
            x, out = cc.values(100 * rank + number, (3,), torch.float32), torch.empty(3)
            calls.append(agreed("send", everything(world), ins=(x,), to=(rank + 1) % size))
            calls.append(agreed("recv", everything(world), outs=(out,), source=(rank - 1) % size))
            checks.append((out, cc.values(100 * ((rank - 1) % size) + number, (3,), torch.float32)))
        world.comms.issue_group(calls).wait()
        assert all(torch.equal(out, want) for out, want in checks)


def a_slow_rank_never_sees_the_next_round(world: World) -> None:
    """A fast rank goes on at once; the slow one still reads the round before."""
    with on(world):
        for repeat in range(50):
            if world.rank == repeat % world.size:
                delay(world)
            x = torch.full((4096,), float(1000 * (world.rank + 1) + repeat))
            out, moved = torch.empty(world.size, 4096), torch.empty(4096)
            issue(world, "allgather", ins=(x,), outs=(out.view(-1),))
            issue(world, "permute", ins=(x,), outs=(moved,), to=(world.rank + 1) % world.size, source=(world.rank - 1) % world.size)
            assert out[:, 0].tolist() == [1000.0 * (r + 1) + repeat for r in range(world.size)]
            assert float(moved.sum()) == 4096 * (1000.0 * ((world.rank - 1) % world.size + 1) + repeat)


def delay(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda._sleep(5_000_000)
    else:
        time.sleep(0.002)


def a_disagreement_is_an_error_and_the_world_goes_on(world: World) -> None:
    with on(world):
        x = torch.zeros(3 if world.rank else 4)
        with pytest.raises(RankMismatchError) as caught:
            world.comms.issue(CommCall("allreduce", everything(world), (x,), (x,))).wait()
        assert "rank 0: allreduce(f32[4] sum)" in str(caught.value)
        issue(world, "allreduce", ins=(torch.ones(2),), outs=(out := torch.empty(2),))
        assert out.tolist() == [world.size] * 2


# ------------------------------------------------------------------------------------------------------------------- programs


def whole(world: World, num: int, first: int) -> torch.Tensor:
    """Integers that stay exact in a product of this depth."""
    return ((torch.arange(num, device="cpu") * 7 + first) % 11 - 5).to(device=world.device, dtype=torch.float32)


def ag_gemm_programs_are_exact(world: World) -> None:
    """Ring and collective allgather + GEMM, run after run, with another rank late in each."""
    repeats = 50 if world.device.type == "cuda" else 20
    size, rank = world.size, world.rank
    mesh = world.mesh(("tp",))
    m, k, n = 64 * size, 128, 32
    w = whole(world, k * n, 3).view(k, n)
    for mode in MODES:
        ring = hir.compile(ring_ag_gemm(mesh, m, k, n), mesh, mode=mode)
        chunks = hir.compile(collective_ag_gemm(mesh, m, k, n, 4), mesh, mode=mode)
        for repeat in range(repeats):
            xs = [whole(world, m // size * k, repeat + 5 * r).view(m // size, k) for r in range(size)]
            if rank == repeat % size:
                delay(world)
            y = ring(xs[rank], w)
            z = chunks(xs[rank].view(4, m // size // 4, k), w)
            assert torch.equal(y, torch.stack([x @ w for x in xs])), (mode, repeat)
            rows = [x.view(4, m // size // 4, k) for x in xs]
            assert torch.equal(z, torch.cat(rows, 1) @ w), (mode, repeat)


def peers_are_written_and_read(world: World) -> None:
    mesh, size, rank = world.mesh(("tp",)), world.size, world.rank
    for mode in MODES:
        for text, source in ((PUSH, (rank - 1) % size), (PULL, (rank + 1) % size)):
            run = hir.compile(program(text), mesh, mode=mode)
            for repeat in range(20):
                if rank == repeat % size:
                    delay(world)
                y = run(torch.arange(4.0, device=world.device) + 1000 * (rank + 1) + repeat)
                assert y.tolist() == [1000.0 * (source + 1) + repeat + i for i in range(4)], (mode, repeat)


def signals_and_waits_in_turn(world: World) -> None:
    """32 rounds between two ranks, without a flag ever being set back."""
    mesh = world.mesh(("tp",))
    for mode in MODES:
        run = hir.compile(program(PING), mesh, mode=mode)
        for repeat in range(32):
            x = torch.arange(4.0, device=world.device) + repeat
            assert torch.equal(run(x), 2 * x if world.rank < 2 else x), (mode, repeat)


def chunks_arrive_one_by_one_on_another_stream(world: World) -> None:
    mesh = world.mesh(("tp",))
    for mode in MODES:
        run = hir.compile(program(CHUNKED_PUSH), mesh, mode=mode)
        for repeat in range(32):
            if world.rank == repeat % world.size:
                delay(world)
            x = torch.arange(32.0, device=world.device).view(4, 8) + 100 * repeat
            y = run(x + 1000 * world.rank)
            assert torch.equal(y, 2 * (x + 1000 * ((world.rank - 1) % world.size))), (mode, repeat)


CLAIMS: Final[Mapping[str, Callable[[World], None]]] = {
    f.__name__: f
    for f in (
        every_collective,
        every_dtype_compared,
        teams_in_their_own_order,
        large_tensors,
        sums_have_the_bits_of_rank_order,
        many_messages_in_a_group,
        a_slow_rank_never_sees_the_next_round,
        a_disagreement_is_an_error_and_the_world_goes_on,
        ag_gemm_programs_are_exact,
        peers_are_written_and_read,
        signals_and_waits_in_turn,
        chunks_arrive_one_by_one_on_another_stream,
    )
}


def hold_all(world: World) -> dict[str, tuple[float, str]]:
    """Every claim in one world; by name, the seconds it took and what went wrong (empty: nothing)."""
    torch.set_num_threads(1)
    found = {}
    for name, claim in CLAIMS.items():
        start = time.monotonic()
        try:
            claim(world)
            problem = ""
        except Exception:  # noqa: BLE001  told by the test of this claim
            problem = traceback.format_exc()
        found[name] = (time.monotonic() - start, problem)
    return found
