"""Values: every communication, dtype, layout, world and transport against plain torch."""

from __future__ import annotations

import pytest
import torch

from hostir.launch import World, spawn
from hostir.runtime.comms.protocol import CommCall
from tests.dist import comm_cases as cc

TRANSPORTS = ("threads", "gloo", "symm")


@pytest.mark.world([1, 2, 3, 4], transport=TRANSPORTS, device="cpu")
def test_every_dtype_moves_and_reduces_exactly(world: World) -> None:
    assert cc.check_all(world, (*cc.WIDE, *cc.NARROW), ("dense",), ((2, 3),)) > 13 * 25


@pytest.mark.world([1, 2, 3, 4], transport=TRANSPORTS, device="cpu")
def test_every_layout_works_and_bytes_beside_the_tensors_stay(world: World) -> None:
    assert cc.check_all(world, (torch.float32, torch.int16), cc.LAYOUTS, ((3, 2), (2, 1, 4))) > 16 * 25


@pytest.mark.world([1, 2, 3, 4], transport=TRANSPORTS, device="cpu")
def test_empty_and_0d_tensors_keep_their_shapes(world: World) -> None:
    assert cc.check_all(world, (torch.float32, torch.bool), ("dense", "strided"), ((), (0, 5), (3, 0), (1,))) > 16 * 15


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_calls_that_were_compared_before_give_the_same_results(world: World) -> None:
    assert cc.check_all(world, (torch.float32, torch.bfloat16), ("dense", "strided"), ((2, 3),), True) > 50


@pytest.mark.world(4, transport=TRANSPORTS, device="cpu")
def test_teams_are_in_their_own_order_and_only_members_meet(world: World) -> None:
    num_checks = 0
    for team in ((3, 1, 0), (2, 0), (1,), (3, 2, 1, 0), (0, 2), (1, 3)):
        if world.rank in team:
            for case in cc.cases(world, team, torch.float32, "strided", (2, 3)):
                cc.run_case(world, case)
                num_checks += 1
            cc.messages(world, team, torch.int32, "dense", (2,))
    assert num_checks > 50


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_large_tensors_take_the_two_step_paths(world: World) -> None:
    team = tuple(range(world.size))
    x = cc.values(world.rank, (50_001,), torch.float32)
    parts = [cc.values(r, (50_001,), torch.float32) for r in team]
    works, outs = [], []
    for _ in range(3):
        outs.append(torch.empty_like(x))
        works.append(world.comms.issue(CommCall("allreduce", team, (x,), (outs[-1],), agreed=True)))
    everything = torch.empty(3 * 50_001)
    works.append(world.comms.issue(CommCall("allgather", team, (x,), (everything,), agreed=True)))
    for work in reversed(works):
        work.wait()
    assert all(torch.equal(out, torch.stack(parts).sum(0)) for out in outs)
    assert torch.equal(everything, torch.cat(parts))


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_an_allgather_past_the_copy_limit_is_right(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from hostir.runtime.comms import gloo

    monkeypatch.setattr(gloo, "COPIED_BYTES", 16)
    x = cc.values(world.rank, (5, 3), torch.float32)
    out = torch.empty(15, 3)
    world.comms.issue(CommCall("allgather", (0, 1, 2), (x,), (out,))).wait()
    assert torch.equal(out, torch.cat([cc.values(r, (5, 3), torch.float32) for r in range(3)]))


@pytest.mark.world([2, 4], transport=TRANSPORTS, device="cpu")
def test_a_nan_on_any_rank_reaches_min_and_max_everywhere(world: World) -> None:
    team = tuple(range(world.size))
    for holder in team:
        for op in ("min", "max"):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                x = torch.tensor([1.0, 2.0, 3.0, 4.0]).to(dtype) + world.rank
                if world.rank == holder:
                    x[:] = float("nan")
                out, piece = torch.empty_like(x), torch.empty(4 // world.size, dtype=dtype)
                world.comms.issue(CommCall("allreduce", team, (x,), (out,), op=op)).wait()
                world.comms.issue(CommCall("reduce_scatter", team, (x,), (piece,), op=op)).wait()
                assert bool(out.isnan().all()), (holder, op, dtype, out)
                assert bool(piece.isnan().all()), (holder, op, dtype, piece)


@pytest.mark.world(4, transport=TRANSPORTS, device="cpu")
def test_low_precision_sums_are_rounded_once(world: World) -> None:
    team = (0, 1, 2, 3)
    x = torch.full((4,), 256.0 if world.rank == 0 else 0.9, dtype=torch.bfloat16)
    out, piece = torch.empty_like(x), torch.empty(1, dtype=torch.bfloat16)
    world.comms.issue(CommCall("allreduce", team, (x,), (out,))).wait()
    world.comms.issue(CommCall("reduce_scatter", team, (x,), (piece,))).wait()
    exact = 256.0 + 3 * float(torch.tensor(0.9, dtype=torch.bfloat16))
    assert [*out.tolist(), *piece.tolist()] == [float(torch.tensor(exact).bfloat16())] * 5


def test_transports_give_the_same_bits_in_any_order_of_magnitude() -> None:
    def body(world: World) -> torch.Tensor:
        team = (0, 1, 2)
        x = torch.randn(30_000, generator=torch.Generator().manual_seed(world.rank)) * 10.0 ** (3 * world.rank)
        out = torch.empty_like(x)
        world.comms.issue(CommCall("allreduce", team, (x,), (out,))).wait()
        small = x[:30].clone()
        world.comms.issue(CommCall("allreduce", team, (small,), (small,))).wait()
        assert torch.equal(small, out[:30]), "the result depends on the size of the tensor"
        return out

    results = [r for t in TRANSPORTS for r in spawn(body, 3, t, timeout=20.0, device="cpu")]
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_an_input_that_overlaps_the_output_is_read_first(world: World) -> None:
    team = (0, 1)
    for start in (0, 2 * world.rank, 1):
        out = torch.full((4,), -1.0)
        x = out[start : start + 2]
        x.copy_(cc.values(world.rank, (2,), torch.float32))
        world.comms.issue(CommCall("allgather", team, (x,), (out,))).wait()
        assert out.tolist() == [1000.0, 1001.0, 2000.0, 2001.0], start
    x = cc.values(world.rank, (2, 2), torch.float32)
    world.comms.issue(CommCall("alltoall", team, (x,), (x,))).wait()
    assert x.tolist() == [[1000.0 + 2 * world.rank, 1001.0 + 2 * world.rank], [2000.0 + 2 * world.rank, 2001.0 + 2 * world.rank]]
    world.comms.issue(CommCall("permute", team, (x[0],), (x[0],), to=1 - world.rank, source=1 - world.rank)).wait()
    assert x[0].tolist() == [1000.0 + 2 * (1 - world.rank), 1001.0 + 2 * (1 - world.rank)]


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_tensors_that_require_grad_and_inference_tensors_are_taken(world: World) -> None:
    x = torch.ones(3, requires_grad=True)
    out = torch.empty(3)
    world.comms.issue(CommCall("allreduce", (0, 1), (x,), (out,))).wait()
    assert out.tolist() == [2.0, 2.0, 2.0]
    assert not out.requires_grad
    with torch.inference_mode():
        y = torch.ones(2)
    world.comms.issue(CommCall("allreduce", (0, 1), (y,), (y,))).wait()
    assert y.tolist() == [2.0, 2.0]
