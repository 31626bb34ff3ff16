"""Calls that do not fit: refused on the rank that is wrong, or on every rank when the ranks disagree, before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hostir.errors import InputError, RankMismatchError
from hostir.launch import World
from hostir.runtime.comms.protocol import CommCall

TRANSPORTS = ("threads", "gloo", "symm")


def call_of(rank: int, name: str) -> CommCall:
    """One side of a disagreement."""
    team = (0, 1)
    other = 1 - rank
    match name:
        case "dtype":
            x = torch.tensor([1, 2], dtype=torch.int32) if rank == 0 else torch.tensor([1.0, 2.0])
            return CommCall("allgather", team, (x,), (torch.zeros(4, dtype=x.dtype),))
        case "dtype in a reduction":
            x = torch.tensor([1, 2], dtype=torch.int32) if rank == 0 else torch.tensor([1.0, 2.0])
            return CommCall("allreduce", team, (x,), (torch.zeros(2, dtype=x.dtype),))
        case "shape":
            return CommCall("allreduce", team, (torch.ones(2 + rank),), (torch.zeros(2 + rank),))
        case "large shape":
            return CommCall("allreduce", team, (torch.ones(1000 * (rank + 1)),), (torch.zeros(1000 * (rank + 1)),))
        case "empty shapes":
            return CommCall("allgather", team, (torch.zeros(4 - 2 * rank, 0),), (torch.zeros(8 - 4 * rank, 0),))
        case "op":
            return CommCall("allreduce", team, (torch.ones(2),), (torch.zeros(2),), op="sum" if rank == 0 else "max")
        case "kind":
            kind = "allreduce" if rank == 0 else "broadcast"
            return CommCall(kind, team, (torch.ones(2),), (torch.zeros(2),), source=None if rank == 0 else 1)
        case "root":
            return CommCall("broadcast", team, (torch.ones(2),), (torch.zeros(2),), source=rank)
        case "dim":
            x = torch.ones(2, 2)
            return CommCall("allgather", team, (x,), (torch.zeros(4, 2) if rank == 0 else torch.zeros(2, 4),), dim=rank)
        case "long receive":
            return CommCall("send", team, (torch.ones(3),), to=1) if rank == 0 else CommCall("recv", team, (), (torch.zeros(5),), source=0)
        case "short receive":
            return CommCall("send", team, (torch.ones(5),), to=1) if rank == 0 else CommCall("recv", team, (), (torch.zeros(3),), source=0)
        case "receive dtype":
            x = torch.zeros(3, dtype=torch.int32)
            return CommCall("send", team, (torch.ones(3),), to=1) if rank == 0 else CommCall("recv", team, (), (x,), source=0)
        case "permute peers":
            return CommCall("permute", team, (torch.ones(3),), (torch.zeros(3),), to=1, source=1)
        case "permute shapes":
            return CommCall("permute", team, (torch.ones(3 + rank),), (torch.zeros(3 + rank),), to=other, source=other)
        case "row counts":
            sent = (1, 2) if rank == 0 else (1, 1)
            return CommCall("alltoallv", team, (torch.ones(3, 2),), (torch.zeros(3, 2),), send_counts=sent, recv_counts=(1, 1))
    raise AssertionError(name)


DISAGREEMENTS = {
    "dtype": ("i32", "f32"),
    "dtype in a reduction": ("i32", "f32"),
    "shape": ("f32[2]", "f32[3]"),
    "large shape": ("f32[1000]", "f32[2000]"),
    "empty shapes": ("f32[4, 0]", "f32[2, 0]"),
    "op": ("sum", "max"),
    "kind": ("allreduce", "broadcast"),
    "root": ("from 0", "from 1"),
    "dim": ("allgather(f32[2, 2])", "dim 1"),
    "long receive": ("f32[3]", "f32[5]"),
    "short receive": ("f32[5]", "f32[3]"),
    "receive dtype": ("f32[3]", "i32[3]"),
    "permute peers": ("to 1", "permute"),
    "permute shapes": ("f32[3]", "f32[4]"),
    "row counts": ("sends 2 rows", "expects 1"),
}


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_ranks_that_disagree_all_raise_show_both_sides_and_can_go_on(world: World) -> None:
    for name, sides in DISAGREEMENTS.items():
        call = call_of(world.rank, name)
        with pytest.raises(RankMismatchError) as caught:
            world.comms.issue(call).wait()
        assert all(side in str(caught.value) for side in (*sides, "rank 0", "rank 1")), (name, str(caught.value))
        for out in call.outs:
            assert not bool(out.any()), f"{name}: the output was written"
        x = torch.full((2,), float(world.rank + 1))
        world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,))).wait()
        assert x.tolist() == [3.0, 3.0], f"after {name}"


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_a_disagreement_names_each_rank_s_statement(world: World) -> None:
    x = torch.ones(2 + world.rank)
    with pytest.raises(RankMismatchError) as caught:
        world.comms.issue(CommCall("allreduce", (0, 1, 2), (x,), (x,), where=lambda: f"line {10 + world.rank}")).wait()
    assert caught.value.statement == f"line {10 + world.rank}"
    assert all(f"line {10 + r}" in str(caught.value) for r in range(3))
    assert all(f"f32[{2 + r}]" in str(caught.value) for r in range(3))


def wrong(make: Callable[[], CommCall], *words: str) -> tuple[Callable[[], CommCall], tuple[str, ...]]:
    return make, words


F = torch.ones
WRONG: dict[str, tuple[Callable[[], CommCall], tuple[str, ...]]] = {
    "allgather size": wrong(lambda: CommCall("allgather", (0, 1), (F(2),), (F(3),)), "[4]", "[3]"),
    "output dtype": wrong(lambda: CommCall("allreduce", (0, 1), (F(2),), (F(2).double(),)), "f32[2]", "f64[2]"),
    "output shape": wrong(lambda: CommCall("allreduce", (0, 1), (F(2, 3),), (F(3, 2),)), "[2, 3]", "[3, 2]"),
    "uneven parts": wrong(lambda: CommCall("reduce_scatter", (0, 1), (F(5),), (F(2),)), "[5]", "alltoallv"),
    "uneven split": wrong(lambda: CommCall("alltoall", (0, 1), (F(3, 2),), (F(3, 2),)), "multiple of 2", "alltoallv"),
    "no such dim": wrong(lambda: CommCall("allgather", (0, 1), (F(2),), (F(4),), dim=1), "no dim 1", "-1 .. 0"),
    "no root": wrong(lambda: CommCall("broadcast", (0, 1), (F(2),), (F(2),)), "'source'"),
    "root is a world rank": wrong(lambda: CommCall("reduce", (0, 1), (F(2),), (F(2),), to=2), "not world ranks"),
    "no output": wrong(lambda: CommCall("allgather", (0, 1), (F(2),)), "an output tensor"),
    "team twice": wrong(lambda: CommCall("barrier", (0, 0)), "different ranks"),
    "outside the world": wrong(lambda: CommCall("barrier", (0, 1, 2)), "0 .. 1"),
    "not a kind": wrong(lambda: CommCall("allgather_v", (0, 1)), "allgather_v", "allgather, "),
    "too many rows": wrong(lambda: CommCall("alltoallv", (0, 1), (F(3),), (F(3),), send_counts=(2, 2), recv_counts=(1, 1)), "at most 3", "4 = 2 + 2"),
    "counts missing": wrong(lambda: CommCall("alltoallv", (0, 1), (F(3),), (F(3),), send_counts=(1, 1)), "recv_counts"),
    "average of ints": wrong(
        lambda: CommCall("allreduce", (0, 1), (F(2).int(),), (F(2).int(),), op="avg"), "average of integers", "divide as you need"
    ),
    "average of bools": wrong(lambda: CommCall("allreduce", (0, 1), (F(2).bool(),), (F(2).bool(),), op="avg"), "logical or"),
    "order of complex": wrong(lambda: CommCall("allreduce", (0, 1), (F(2).to(torch.cfloat),), (F(2).to(torch.cfloat),), op="max"), "no order"),
    "bits of floats": wrong(lambda: CommCall("allreduce", (0, 1), (F(2),), (F(2),), op="bxor"), "works on bits"),
    "not an op": wrong(lambda: CommCall("allreduce", (0, 1), (F(2),), (F(2),), op="mean"), "mean", "avg"),
}


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_a_wrong_call_is_refused_before_anything_is_sent(world: World) -> None:
    for name, (make, words) in WRONG.items():
        with pytest.raises(InputError) as caught:
            world.comms.issue(make())
        assert all(word in str(caught.value) for word in words), (name, str(caught.value))
    x = F(2)
    world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,))).wait()
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_a_rank_outside_the_team_is_refused_by_name(world: World) -> None:
    x = torch.ones(2)
    call = CommCall("allreduce", (0, 1), (x,), (x,))
    if world.rank < 2:
        world.comms.issue(call).wait()
        return
    with pytest.raises(InputError) as caught:
        world.comms.issue(call)
    assert x.tolist() == [1.0, 1.0]
    assert "rank 2 is not in the team [0, 1]" in str(caught.value)
    assert "only members" in str(caught.value)


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_exchange_gives_all_texts_in_the_order_asked_for(world: World) -> None:
    members = (2, 0)
    assert [world.comms.exchange("all", f"{world.rank}/{i}", (0, 1, 2)) for i in range(5)] == [[f"{r}/{i}" for r in range(3)] for i in range(5)]
    if world.rank in members:
        assert world.comms.exchange("some", f"r{world.rank}", members) == ["r2", "r0"]
