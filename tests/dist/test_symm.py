"""Ranks on CPUs that address each other's memory: the transport symm over shared memory of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hostir as hir
from hostir.errors import CommTimeout, DeviceMemoryError, RankError, RankMismatchError
from hostir.launch import World, spawn
from hostir.runtime.comms.protocol import CommCall
from tests.support.one_sided import CLAIMS
from tests.unit.ir.right_programs import PUSH, program

VALUES = ("every_collective", "every_dtype_compared", "teams_in_their_own_order")  # test_collectives has them, for every transport


def on_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 20.0) -> list[Any]:
    return spawn(fn, num_ranks, "symm", args, timeout=timeout, device="cpu")


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize("claim", [name for name in CLAIMS if name not in VALUES])
def test_claims(claim: str, num_ranks: int) -> None:
    on_ranks(CLAIMS[claim], num_ranks)


def test_explain_says_how_tensors_travel() -> None:
    def body(world: World) -> str:
        return hir.compile(program(PUSH), world.mesh(("tp",))).explain()

    assert "over symm, each rank addressing the memory of all" in on_ranks(body, 2)[0]


def test_a_workspace_grows_and_what_was_sent_stays_right() -> None:
    def body(world: World) -> int:
        for length in (10, 100_000, 1_000_000, 10, 300_000):
            x = torch.full((length,), float(world.rank + 1))
            out = torch.empty(2, length)
            world.comms.issue(CommCall("allgather", (0, 1), (x,), (out.view(-1),), agreed=True)).wait()
            assert torch.equal(out, torch.tensor([[1.0], [2.0]]).expand(2, length))
        used: int = world.comms.heap.used_bytes  # type: ignore[attr-defined]
        return used

    assert len(set(on_ranks(body, 2))) == 1


def test_memory_of_a_dropped_program_is_used_again() -> None:
    def body(world: World) -> list[int]:
        used = []
        for repeat in range(4):
            run = hir.compile(program(PUSH), world.mesh(("tp",)))
            x = torch.arange(4.0) + repeat
            for _ in range(3):
                assert torch.equal(run(x), x)
            used.append(world.comms.heap.used_bytes)  # type: ignore[attr-defined]
            del run
        return used

    for used in on_ranks(body, 2):
        assert used[1] == used[3]


def test_a_small_team_that_finds_no_memory_says_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTIR_SYMM_BYTES", str(1 << 20))

    def body(world: World) -> None:
        x = torch.zeros(1_000_000)
        if world.rank < 2:
            world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,), agreed=True)).wait()

    with pytest.raises(RankError) as caught:
        on_ranks(body, 3)
    assert isinstance(caught.value.__cause__, DeviceMemoryError)
    assert "HOSTIR_SYMM_BYTES" in str(caught.value.__cause__.cure)


def test_the_whole_world_gets_more_memory_when_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTIR_SYMM_BYTES", str(1 << 20))

    def body(world: World) -> float:
        x = torch.ones(1_000_000)
        world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,), agreed=True)).wait()
        return float(x.sum())

    assert on_ranks(body, 2) == [2_000_000.0] * 2


def test_symmetric_buffers_that_depend_on_the_rank_are_refused() -> None:
    text = """
      program @p(%x: f32[4]) mesh(tp) {
        if rank(tp) == 0 {
          %b = alloc f32[4] symmetric
          %b <- copy(%x)
        }
        %c = alloc f32[4] symmetric
        %c <- copy(%x)
        barrier()
        %p = view %c.peer((rank(tp) + 1) % size(tp))
        %o = alloc f32[4]
        %o <- copy(%p)
        barrier()
        return %o
      }"""

    def body(world: World) -> None:
        hir.compile(program(text), world.mesh(("tp",)))(torch.zeros(4))

    with pytest.raises(RankError) as caught:
        on_ranks(body, 2)
    assert isinstance(caught.value.__cause__, RankMismatchError)
    assert "%b f32[4]" in str(caught.value.__cause__)


def test_a_rank_that_dies_while_others_wait_for_its_memory_is_named() -> None:
    def body(world: World) -> None:
        import os
        import signal

        x = torch.zeros(4)
        world.comms.issue(CommCall("barrier", (0, 1, 2), agreed=True)).wait()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.comms.issue(CommCall("allreduce", (0, 1, 2), (x,), (x,), agreed=True)).wait()

    with pytest.raises(RankError) as caught:
        on_ranks(body, 3)
    assert caught.value.rank == 1
    assert "SIGKILL" in str(caught.value)


def test_the_timeout_of_a_wait_names_the_communication() -> None:
    def body(world: World) -> str:
        x = torch.zeros(4)
        world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,), agreed=True)).wait()
        if world.rank == 1:
            time.sleep(1.5)  # longer than the other one waits
            return ""
        with pytest.raises(CommTimeout) as caught:
            world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,), where=lambda: "the sum of line 3", agreed=True)).wait()
        return str(caught.value)

    assert "rank 0 waited 0.6 s in the sum of line 3" in on_ranks(body, 2, timeout=0.6)[0]


def test_programs_that_address_peers_run_on_one_rank_without_the_transport() -> None:
    def body(world: World) -> list[list[float]]:
        run = hir.compile(program(PUSH), world.mesh(("tp",)))
        return [run(torch.arange(4.0) + repeat).tolist() for repeat in range(3)]

    assert spawn(body, 1, "threads", device="cpu") == [[[r + 0.0, r + 1.0, r + 2.0, r + 3.0] for r in range(3)]]


def test_other_transports_refuse_programs_that_address_peers() -> None:
    def body(world: World) -> None:
        hir.compile(program(PUSH), world.mesh(("tp",)))(torch.zeros(4))

    with pytest.raises(RankError, match="transport symm only"):
        spawn(body, 2, "threads", device="cpu")
