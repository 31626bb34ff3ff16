"""Communications over NCCL, a GPU for each rank; what can be known on one GPU is known there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hostir as hir
from hostir.launch import World, spawn
from hostir.runtime.comms.nccl import NcclWire, native
from hostir.runtime.comms.protocol import CommCall
from tests.support.one_sided import CLAIMS

# What needs peers' memory, and the one claim about bits that NCCL does not make.
OTHERS = ("peers_are_written_and_read", "signals_and_waits_in_turn", "chunks_arrive_one_by_one_on_another_stream", "sums_have_the_bits_of_rank_order")


def test_a_team_of_one_moves_and_reduces_through_nccl() -> None:
    device = torch.device("cuda", 0)
    wire = NcclWire(device, 30.0)
    group = wire.open(dist.HashStore(), 0, 1)
    x = torch.arange(6.0, device=device).view(2, 3)
    cases = [
        (CommCall("allreduce", (0,), (x,), (torch.empty_like(x),)), x),
        (CommCall("allreduce", (0,), (x,), (torch.empty_like(x),), op="max"), x),
        (CommCall("allgather", (0,), (x.T,), (torch.empty(3, 2, device=device),), dim=1), x.T),
        (CommCall("reduce_scatter", (0,), (x,), (torch.empty(2, 3, device=device),)), x),
        (CommCall("broadcast", (0,), (x,), (torch.empty_like(x),), source=0), x),
        (CommCall("alltoall", (0,), (x,), (torch.empty_like(x),), split=1), x),
        (CommCall("gather", (0,), (x,), (torch.empty_like(x),), to=0), x),
        (CommCall("scatter", (0,), (x,), (torch.empty_like(x),), source=0), x),
        (CommCall("permute", (0,), (x,), (torch.empty_like(x),), to=0, source=0), x),
        (CommCall("alltoallv", (0,), (x,), (torch.empty_like(x),), send_counts=(2,), recv_counts=(2,)), x),
    ]
    for call, want in cases:
        for work, _ in wire.steps(group, call, 0):
            work.wait()
            assert work.is_completed()
        assert torch.equal(call.outs[0], want), call.kind
    work, table = wire.compare(group, [1, 2, 3], 1)
    work.wait()
    assert table.tolist() == [[1, 2, 3]]
    group.shutdown()


def test_two_ranks_on_one_gpu_are_refused_with_the_cure() -> None:
    with pytest.raises(hir.RankError, match="NCCL refuses two ranks on one GPU"):
        spawn(lambda world: None, torch.cuda.device_count() + 1, "nccl")


@pytest.mark.parametrize(("dtype", "op", "want"), [(torch.float32, "sum", True), (torch.bfloat16, "max", False), (torch.bool, "sum", False)])
def test_what_nccl_means_otherwise_is_ours(dtype: torch.dtype, op: str, want: bool) -> None:
    assert native(dtype, op) is want


@pytest.mark.gpus(2)
@pytest.mark.parametrize("claim", [name for name in CLAIMS if name not in OTHERS])
def test_claims_over_nccl(claim: str) -> None:
    def body(world: World) -> None:
        assert world.backend == "nccl"
        CLAIMS[claim](world)

    spawn(body, 2)


@pytest.mark.gpus(2)
def test_the_host_goes_on_while_nccl_works() -> None:
    def body(world: World) -> bool:
        x = torch.ones(1 << 20, device=world.device)
        call = CommCall("allreduce", (0, 1), (x,), (x,), op="avg", agreed=True)
        world.comms.issue(call).wait()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        world.comms.issue(call).wait()
        event = torch.cuda.Event()
        event.record()
        waiting = not event.query()
        assert float(x.sum()) == float(1 << 20)
        return waiting

    assert spawn(body, 2) == [True, True]
