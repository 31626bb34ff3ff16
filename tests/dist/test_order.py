"""Who meets whom: messages in order, groups at once, self messages, threads kept apart, barriers that hold."""

from __future__ import annotations

import os
import threading
import time

import numpy
import pytest
import torch

from hostir.errors import HostIrError, InputError
from hostir.launch import World, spawn
from hostir.runtime.comms.protocol import CommCall, Work
from tests.dist.comm_cases import values

TRANSPORTS = ("threads", "gloo", "symm")


@pytest.mark.world([1, 2, 3, 4], transport=TRANSPORTS, device="cpu")
def test_all_send_then_receive_round_a_ring(world: World) -> None:
    team = tuple(range(world.size))
    x = values(world.rank, (70_000,), torch.float32)  # larger than any buffer in between
    out = torch.empty_like(x)
    send = CommCall("send", team, (x,), to=(world.rank + 1) % world.size)
    recv = CommCall("recv", team, (), (out,), source=(world.rank - 1) % world.size)
    for first, second in ((send, recv), (recv, send)):
        out.zero_()
        works = [world.comms.issue(first), world.comms.issue(second)]
        for work in works:
            work.wait()
        assert torch.equal(out, values((world.rank - 1) % world.size, (70_000,), torch.float32))


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_three_hundred_messages_in_one_uneven_group(world: World) -> None:
    team = (0, 1, 2)
    calls, checks = [], []
    for number in range(150):
        for source, to in ((0, 1), (1, 2)) if number % 3 else ((2, 0), (0, 2)):
            x = values(source, (number % 5,), torch.int64) + 10_000 * number
            if world.rank == source:
                calls.append(CommCall("send", team, (x,), to=to))
            if world.rank == to:
                out = torch.zeros(number % 5, dtype=torch.int64)
                calls.append(CommCall("recv", team, (), (out,), source=source))
                checks.append((out, x))
    world.comms.issue_group(calls).wait()
    assert checks
    assert all(torch.equal(out, want) for out, want in checks)


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_messages_between_two_ranks_keep_their_order(world: World) -> None:
    outs = [torch.zeros(2) for _ in range(20)]
    works: list[Work] = []
    for number, out in enumerate(outs):
        if world.rank == 0:
            works.append(world.comms.issue(CommCall("send", (0, 1), (torch.full((2,), float(number)),), to=1)))
        else:
            works.append(world.comms.issue(CommCall("recv", (1, 0), (), (out,), source=1)))
    for work in reversed(works):
        work.wait()
    assert [float(out[0]) for out in outs] == ([0.0] * 20 if world.rank == 0 else [float(i) for i in range(20)])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_first_communication_may_be_between_some_ranks_only(transport: str) -> None:
    def body(world: World) -> float:
        x, out = torch.full((1,), float(world.rank)), torch.zeros(1)
        if world.rank == 0:
            world.comms.issue(CommCall("send", (0, 1, 2), (x,), to=1)).wait()
        if world.rank == 1:
            world.comms.issue(CommCall("recv", (0, 1, 2), (), (out,), source=0)).wait()
        if world.rank == 0:
            world.comms.issue(CommCall("barrier", (0,))).wait()
        world.comms.issue(CommCall("barrier", (0, 1, 2))).wait()
        world.comms.issue(CommCall("permute", (0, 1, 2), (x,), (out,), to=(world.rank + 1) % 3, source=(world.rank + 2) % 3)).wait()
        return float(out)

    assert spawn(body, 3, transport, timeout=20.0, device="cpu") == [2.0, 0.0, 1.0]


@pytest.mark.world(4, transport=TRANSPORTS, device="cpu")
def test_teams_without_common_members_do_not_wait_for_one_another(world: World) -> None:
    team = (0, 3) if world.rank in (0, 3) else (2, 1)
    out = torch.zeros(2, dtype=torch.int64)
    world.comms.issue(CommCall("allgather", team, (torch.tensor([world.rank]),), (out,))).wait()
    assert out.tolist() == list(team)


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_a_permutation_may_have_fixed_points_and_idle_ranks(world: World) -> None:
    team = (0, 1, 2)
    x, out = values(world.rank, (2,), torch.float32), torch.full((2,), -1.0)
    to = {0: 0, 1: 2, 2: 1}[world.rank]
    world.comms.issue(CommCall("permute", team, (x,), (out,), to=to, source=to)).wait()
    assert out.tolist() == [[1000.0, 1001.0], [3000.0, 3001.0], [2000.0, 2001.0]][world.rank]
    shifted = torch.full((2,), -1.0)  # a shift without wrap-around: 0 -> 1 -> 2
    ins = (x,) if world.rank < 2 else ()
    outs = (shifted,) if world.rank > 0 else ()
    to_next = world.rank + 1 if ins else None
    world.comms.issue(CommCall("permute", team, ins, outs, to=to_next, source=world.rank - 1 if outs else None)).wait()
    assert shifted.tolist() == [[-1.0, -1.0], [1000.0, 1001.0], [2000.0, 2001.0]][world.rank]


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_a_message_to_oneself_is_a_copy_of_what_it_was(world: World) -> None:
    x, out = values(world.rank, (3,), torch.float32), torch.zeros(3)
    work = world.comms.issue(CommCall("recv", (0, 1), (), (out,), source=world.rank))
    assert not work.done()
    world.comms.issue(CommCall("send", (0, 1), (x,), to=world.rank)).wait()
    work.wait()
    assert out.tolist() == [[1000.0, 1001.0, 1002.0], [2000.0, 2001.0, 2002.0]][world.rank]


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_rows_may_go_to_some_ranks_only(world: World) -> None:
    sent, received = (((2, 0), (2, 1)), ((1, 0), (0, 0)))[world.rank]
    x = values(world.rank, (sum(sent),), torch.float32)
    out = torch.zeros(sum(received))
    world.comms.issue(CommCall("alltoallv", (0, 1), (x,), (out,), send_counts=sent, recv_counts=received)).wait()
    assert out.tolist() == ([1000.0, 1001.0, 2000.0] if world.rank == 0 else [])
    total = torch.ones(1)
    world.comms.issue(CommCall("allreduce", (0, 1), (total,), (total,))).wait()
    assert float(total) == 2.0


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_slices_that_look_contiguous_for_one_row_only(world: World) -> None:
    for batch in (1, 2):
        whole = [values(r, (batch, 16, 8), torch.float32) for r in range(2)]
        x, out = whole[world.rank][:, 4:], torch.empty(batch, 24, 8)
        world.comms.issue(CommCall("allgather", (0, 1), (x,), (out,), dim=1)).wait()
        assert torch.equal(out, torch.cat([w[:, 4:] for w in whole], 1))


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_a_transposed_numpy_array_is_sent_as_it_looks(world: World) -> None:
    x = torch.from_numpy(numpy.arange(10).reshape(2, 5).T)
    out = torch.zeros(5, 2, dtype=torch.int64)
    if world.rank == 0:
        world.comms.issue(CommCall("send", (0, 1), (x,), to=1)).wait()
    else:
        world.comms.issue(CommCall("recv", (0, 1), (), (out,), source=0)).wait()
        assert out.tolist() == numpy.arange(10).reshape(2, 5).T.tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_nobody_leaves_a_barrier_before_all_have_come(num_ranks: int, transport: str) -> None:
    def body(world: World) -> list[tuple[float, float]]:
        team = tuple(range(world.size))
        times = []
        for trip in range(4):
            time.sleep(0.02 * ((world.rank + trip) % world.size))
            came = time.monotonic()
            world.comms.issue(CommCall("barrier", team)).wait()
            times.append((came, time.monotonic()))
        return times

    for trip in zip(*spawn(body, num_ranks, transport, timeout=20.0, device="cpu"), strict=True):
        assert max(came for came, _ in trip) <= min(left for _, left in trip)


@pytest.mark.world(2, transport=TRANSPORTS, device="cpu")
def test_threads_on_channels_of_their_own_never_mix(world: World) -> None:
    seen: dict[str, set[float]] = {}

    def run(name: str, value: float, pause: float) -> None:
        results = set()
        for _ in range(50):
            x = torch.full((4,), value)
            world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,), channel=name)).wait()
            results.add(float(x[0]))
            time.sleep(pause)
        seen[name] = results

    pauses = (0.0, 0.002) if world.rank == 0 else (0.001, 0.0)
    threads = [threading.Thread(target=run, args=(n, v, p)) for n, v, p in zip("ab", (1.0, 10.0), pauses, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": {2.0}, "b": {20.0}}


@pytest.mark.world(2, transport=("threads", "gloo"), device="cpu")
def test_two_threads_on_one_channel_at_the_same_time_are_refused(world: World) -> None:
    x = torch.ones(1)
    if world.rank == 1:
        assert world.comms.exchange("refused", "", (0, 1))
        world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,))).wait()
        return
    work = world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,)))
    caught: list[HostIrError] = []

    def other() -> None:
        y = torch.ones(1)
        try:
            world.comms.issue(CommCall("allreduce", (0, 1), (y,), (y,)))
        except InputError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    world.comms.exchange("refused", "", (0, 1))
    work.wait()
    assert "two threads communicate over team [0, 1] at the same time" in str(caught[0])
    assert "channel" in str(caught[0])


@pytest.mark.world(3, transport=TRANSPORTS, device="cpu")
def test_works_may_be_waited_for_in_any_order(world: World) -> None:
    team = (0, 1, 2)
    tensors = [torch.full((3,), float(i)) for i in range(8)]
    works = [world.comms.issue(CommCall("allreduce", team, (x,), (x,))) for x in tensors]
    order = list(range(8)) if world.rank == 0 else list(reversed(range(8)))
    for i in order:
        works[i].wait()
    assert all(work.done() for work in works)
    assert [float(x[0]) for x in tensors] == [3.0 * i for i in range(8)]


@pytest.mark.world(2, device="cpu")
def test_the_same_teams_use_no_more_files_or_threads(world: World) -> None:
    counts = []
    for _ in range(3):
        for _ in range(20):
            x = torch.ones(2)
            for team in ((0, 1), (1, 0)):
                world.comms.issue(CommCall("allreduce", team, (x,), (x,))).wait()
            world.comms.issue(CommCall("barrier", (0, 1))).wait()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert counts[0] == counts[1] == counts[2]
