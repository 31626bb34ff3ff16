"""When a rank raises, dies, or never comes: every other rank stops with the reason, in bounded time, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from hostir.errors import CommTimeout, InputError, PeerError, RankError
from hostir.launch import World, spawn
from hostir.runtime.comms.protocol import CommCall

transports = pytest.mark.parametrize("transport", ["threads", "gloo"])


def on_ranks(fn: Any, num_ranks: int, transport: str, *args: Any, timeout: float = 20.0) -> list[Any]:
    return spawn(fn, num_ranks, transport, args, timeout=timeout, device="cpu")


def barrier(world: World, team: tuple[int, ...] | None = None) -> CommCall:
    return CommCall("barrier", team or tuple(range(world.size)), where=lambda: "the barrier of line 7")


@transports
@pytest.mark.parametrize("before", [0, 2])
def test_an_exception_on_one_rank_ends_all_and_is_the_headline(transport: str, before: int) -> None:
    def body(world: World) -> None:
        for _ in range(before):
            world.comms.issue(barrier(world)).wait()
        if world.rank == 1:
            raise ValueError("what went wrong")
        world.comms.issue(barrier(world)).wait()

    with pytest.raises(RankError) as caught:
        on_ranks(body, 3, transport)
    error = caught.value
    assert error.rank == 1
    assert error.message == "rank 1: ValueError: what went wrong"
    assert isinstance(error.__cause__, ValueError)
    assert 'raise ValueError("what went wrong")' in error.ranks[1]
    assert os.path.basename(__file__) in error.ranks[1]
    for other in (0, 2):
        assert error.ranks[other].startswith("PeerError: rank 1 failed: ValueError: what went wrong")
        assert "the barrier of line 7" in error.ranks[other]


@pytest.mark.parametrize("moment", ["first", "later", "new team"])
@pytest.mark.parametrize(("how", "headline"), [("exit", "rank 1 exited with code 9"), ("kill", "rank 1 was killed by SIGKILL")])
def test_a_process_that_dies_is_named(how: str, headline: str, moment: str) -> None:
    def body(world: World) -> None:
        if moment != "first":
            world.comms.issue(barrier(world)).wait()
        if world.rank == 1:
            if how == "exit":
                os._exit(9)
            os.kill(os.getpid(), signal.SIGKILL)
        world.comms.issue(barrier(world, (0, 1) if moment == "new team" and world.rank == 0 else None)).wait()

    with pytest.raises(RankError) as caught:
        on_ranks(body, 3, "gloo")
    assert caught.value.message == headline
    assert caught.value.rank == 1
    assert sorted(caught.value.ranks) == [0, 1, 2]
    assert "PeerError" in caught.value.ranks[0]
    assert "rank 1" in caught.value.ranks[0]


def test_a_death_is_noticed_by_the_ranks_themselves() -> None:
    """The launcher of a real job tells nobody: ranks of one machine look at one another's processes."""
    from hostir.runtime.comms.board import Board

    store = torch.distributed.HashStore()
    board = Board(store, 0, 2)
    pid = os.posix_spawn("/bin/sleep", ["sleep", "30"], {})
    start = _start_of(pid)
    store.set("who/1", f'["{_machine(store)}", {pid}, "{start}"]')
    assert board.dead([0, 1]) == []
    os.kill(pid, signal.SIGKILL)
    assert Board.poll(lambda: board.dead([0, 1]) == [1], 10.0), "a zombie counts as dead"
    os.waitpid(pid, 0)
    assert board.dead([0, 1]) == [1]


def _start_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[19]


def _machine(store: Any) -> str:
    import json

    return str(json.loads(store.get("who/0"))[0])


@transports
def test_a_rank_that_never_comes_is_named_and_everybody_raises(transport: str) -> None:
    def body(world: World) -> str:
        world.comms.issue(barrier(world)).wait()
        if world.rank == 1:
            time.sleep(1.6)
        with pytest.raises(CommTimeout) as caught:
            world.comms.issue(barrier(world)).wait()
        with pytest.raises(CommTimeout, match=r"waited 0\.4 s"):
            world.comms.issue(barrier(world)).wait()
        return str(caught.value)

    texts = on_ranks(body, 3, transport, timeout=0.4)
    assert all("waited 0.4 s in barrier()" in text for text in texts), texts
    assert "never arrived: rank 1\n" in texts[0], texts[0]
    assert "rank 1 is not in a communication" in texts[0]
    assert "the barrier of line 7" in texts[0]


def test_threads_see_a_deadlock_at_once_and_say_who_waits_for_whom() -> None:
    def body(world: World) -> None:
        x = torch.ones(2)
        to = (world.rank + 1) % 3
        world.comms.issue(CommCall("send", (0, 1, 2), (x,), to=to, where=lambda: f"send of rank {world.rank}")).wait()

    with pytest.raises(RankError) as caught:
        on_ranks(body, 3, "threads", timeout=3600.0)
    assert isinstance(caught.value.__cause__, CommTimeout)
    text = str(caught.value)
    assert "deadlock: " in text
    for r in range(3):
        assert f"rank {r} waits for rank {(r + 1) % 3}" in text
        assert f"rank {r} waits in send(f32[2] to {(r + 1) % 3})  [send of rank {r}]" in text


def test_threads_see_that_a_finished_rank_will_never_come() -> None:
    def body(world: World) -> None:
        if world.rank == 0:
            world.comms.issue(barrier(world)).wait()

    with pytest.raises(RankError, match="deadlock: rank 0 waits for rank 1"):
        on_ranks(body, 2, "threads", timeout=3600.0)


def test_threads_that_cannot_be_sure_wait_for_the_timeout() -> None:
    """A thread of the user's may still send: that is no deadlock."""

    def body(world: World) -> float:
        x = torch.full((1,), float(world.rank))
        if world.rank == 0:

            def later() -> None:
                time.sleep(0.3)
                world.comms.issue(CommCall("send", (0, 1), (x,), to=1, channel="helper")).wait()

            helper = threading.Thread(target=later)
            helper.start()
            world.comms.issue(CommCall("barrier", (0, 1))).wait()
            helper.join()
            return 0.0
        world.comms.issue(CommCall("recv", (0, 1), (), (x,), source=0, channel="helper")).wait()
        world.comms.issue(CommCall("barrier", (0, 1))).wait()
        return float(x)

    assert on_ranks(body, 2, "threads") == [0.0, 0.0]


@transports
def test_an_exchange_that_a_rank_never_joins_times_out(transport: str) -> None:
    def body(world: World) -> str:
        if world.rank == 0:
            time.sleep(1.5)
            return ""
        with pytest.raises(CommTimeout) as caught:
            world.comms.exchange("digest", "x", (0, 1))
        return str(caught.value)

    assert "comparing 'digest' among ranks [0, 1]" in on_ranks(body, 2, transport, timeout=0.4)[1]


@transports
def test_after_a_failure_a_new_world_works(transport: str) -> None:
    def body(world: World) -> float:
        x = torch.full((1,), float(world.rank + 1))
        world.comms.issue(CommCall("allreduce", (0, 1), (x,), (x,))).wait()
        return float(x)

    def bad(world: World) -> None:
        if world.rank:
            raise ValueError
        world.comms.issue(barrier(world)).wait()

    for _ in range(2):
        with pytest.raises(RankError):
            on_ranks(bad, 2, transport)
        assert on_ranks(body, 2, transport) == [3.0, 3.0]


@transports
def test_a_closed_world_says_so(transport: str) -> None:
    def body(world: World) -> str:
        world.close()
        world.close()
        with pytest.raises(PeerError) as caught:
            world.comms.issue(barrier(world))
        return str(caught.value)

    assert all("this world is closed" in text for text in on_ranks(body, 2, transport))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_forked_child_is_refused(num_ranks: int) -> None:
    def body(world: World) -> int:
        world.comms.issue(barrier(world)).wait()
        child = os.fork()
        if child == 0:
            try:
                world.comms.issue(barrier(world)).wait()
            except InputError as error:
                os._exit(42 if "forked child" in str(error) else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
        world.comms.issue(barrier(world)).wait()
        return os.waitstatus_to_exitcode(status)

    assert on_ranks(body, num_ranks, "gloo") == [42] * num_ranks


def test_no_process_is_left_and_none_hangs_when_a_rank_ignores_the_failure() -> None:
    def body(world: World) -> int:
        if world.rank == 0:
            raise ValueError("stop")
        while True:
            time.sleep(0.1)

    from hostir.launch import crew

    before = set(multiprocessing.active_children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "GRACE", 0.5)
        with pytest.raises(RankError) as caught:
            on_ranks(body, 2, "gloo")
    assert caught.value.message == "rank 0: ValueError: stop"
    assert "did not end after the failure" in caught.value.ranks[1]
    assert set(multiprocessing.active_children()) <= before
