"""Several ranks on ONE GPU that address each other's memory, under an MPS daemon of their own."""

from __future__ import annotations

import functools
import time

import pytest
import torch

import hostir as hir
from hostir.errors import CommTimeout, UnsupportedError
from hostir.launch import World, mps, spawn
from hostir.runtime.comms.protocol import CommCall
from tests.support.one_sided import CLAIMS, agreed, everything, hold_all, issue
from tests.unit.ir.right_programs import PUSH, program

SPIN = 40_000_000  # cycles that a kernel sleeps: about 20 ms


def has_mps() -> bool:
    try:
        mps.find_control()
    except UnsupportedError:
        return False
    return True


needs_mps = pytest.mark.skipif(not has_mps(), reason=f"{mps.CONTROL} is not on this machine")


@functools.cache
def held(num_ranks: int, variable: str = "", value: str = "") -> list[dict[str, tuple[float, str]]]:
    """All claims, in one world: starting one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if variable:
            patch.setenv(variable, value)
        return spawn(hold_all, num_ranks, one_gpu=True, timeout=30.0)


@needs_mps
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("claim", [*CLAIMS])
def test_claims(claim: str, num_ranks: int) -> None:
    for rank, found in enumerate(held(num_ranks)):
        seconds, problem = found[claim]
        assert not problem, f"rank {rank}, after {seconds:.1f} s:\n{problem}"


@needs_mps
@pytest.mark.timeout(240)
@pytest.mark.parametrize("claim", ["a_slow_rank_never_sees_the_next_round", "signals_and_waits_in_turn", "many_messages_in_a_group"])
def test_claims_where_kernels_write_and_await_flags(claim: str) -> None:
    for rank, found in enumerate(held(2, "HOSTIR_SYMM_FLAGS", "kernels")):
        assert not found[claim][1], f"rank {rank}:\n{found[claim][1]}"


@needs_mps
@pytest.mark.timeout(240)
@pytest.mark.parametrize("claim", ["large_tensors", "ag_gemm_programs_are_exact"])
def test_claims_where_a_copy_engine_moves_large_tensors(claim: str) -> None:
    for rank, found in enumerate(held(2, "HOSTIR_SYMM_COPIES", "engine")):
        assert not found[claim][1], f"rank {rank}:\n{found[claim][1]}"


def on_stream_claims(world: World) -> None:
    """Order of streams without the host: a slow producer, a consumer on another stream, and a host that goes on at once."""
    team, rank = everything(world), world.rank
    other = 1 - rank
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    out, moved = torch.empty_like(x), torch.empty_like(x)
    call = CommCall("allreduce", team, (x,), (out,), agreed=True)
    shift = agreed("permute", team, ins=(x,), outs=(moved,), to=other, source=other)
    world.comms.issue(call).wait()
    world.comms.issue(shift).wait()
    for repeat in range(20):
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN)
        x.fill_(float(repeat + rank))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work = world.comms.issue(call)
        shifted = world.comms.issue(shift)
        event = torch.cuda.Event()
        event.record(side)
        assert not event.query(), "the host waited for the GPU"
        work.wait()
        shifted.wait()
        assert float(out.sum()) == (2 * repeat + 1.0) * (1 << 20)
        assert float(moved.sum()) == (repeat + other) * float(1 << 20)


def memory_stays(world: World) -> tuple[int, int]:
    x = torch.ones(1 << 16, device="cuda")
    out = torch.empty(world.size << 16, device="cuda")
    calls = [agreed("allgather", everything(world), ins=(x,), outs=(out,)), agreed("allreduce", everything(world), ins=(x,), outs=(x,), op="max")]

    def rounds(num: int) -> int:
        for _ in range(num):
            for call in calls:
                world.comms.issue(call).wait()
        torch.cuda.synchronize()
        used: int = world.comms.heap.used_bytes  # type: ignore[attr-defined]
        return torch.cuda.memory_reserved() + used

    return rounds(10), rounds(2000)


@needs_mps
@pytest.mark.timeout(240)
def test_streams_keep_the_order_and_memory_does_not_grow() -> None:
    def body(world: World) -> tuple[int, int]:
        on_stream_claims(world)
        return memory_stays(world)

    for before, after in spawn(body, 2, one_gpu=True, timeout=30.0):
        assert before == after


@needs_mps
@pytest.mark.timeout(240)
def test_a_rank_that_fails_while_the_gpu_of_another_waits_is_named() -> None:
    def body(world: World) -> float:
        x = torch.ones(4, device="cuda")
        issue(world, "allreduce", ins=(x,), outs=(x,))
        torch.cuda.synchronize()
        if world.rank == 1:
            time.sleep(0.5)
            raise ValueError("on purpose")
        issue(world, "allreduce", ins=(x,), outs=(x,))
        return float(x.sum())  # the host waits for the GPU, which waits for rank 1

    with pytest.raises(hir.RankError) as caught:
        spawn(body, 2, one_gpu=True, timeout=30.0)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


@needs_mps
@pytest.mark.timeout(240)
def test_a_flag_that_nobody_signals_ends_with_the_timeout_and_the_statement() -> None:
    def body(world: World) -> float:
        run = hir.compile(program(PUSH), world.mesh(("tp",)))
        x = torch.ones(4, device="cuda")
        run(x)
        torch.cuda.synchronize()
        if world.rank == 1:
            time.sleep(9.0)  # longer than the other one waits
            return 0.0
        return float(run(x).sum())

    with pytest.raises(hir.RankError) as caught:
        spawn(body, 2, one_gpu=True, timeout=5.0)
    assert isinstance(caught.value.__cause__, CommTimeout)
    assert "@push" in str(caught.value)


def test_several_ranks_on_one_gpu_without_mps_are_refused_with_the_cure() -> None:
    with pytest.raises(hir.RankError, match="one_gpu=True"):
        spawn(lambda world: None, torch.cuda.device_count() + 1, "symm")


@pytest.mark.gpus(2)
def test_claims_over_nvlink() -> None:
    for rank, found in enumerate(spawn(hold_all, 2, "symm", timeout=30.0)):
        problems = {name: problem for name, (_, problem) in found.items() if problem}
        assert not problems, f"rank {rank}: {problems}"
