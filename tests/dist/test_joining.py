"""``init`` in processes that a launcher started: where they meet, who is missing, who came twice, and a second world after a failure."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from tests.dist.jobs import call_in_processes, free_port, torch_variables

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}


def join_and_reduce(timeout: float = 20.0, stay: float = 0.0) -> tuple[Any, ...]:
    import time

    import hostir as hir
    from hostir.runtime.comms.protocol import CommCall

    with hir.launch.init(timeout=timeout, device="cpu") as world:
        x = torch.full((1,), float(world.rank + 1))
        world.comms.issue(CommCall("allreduce", tuple(range(world.size)), (x,), (x,))).wait()
        time.sleep(stay)
        return world.rank, world.size, world.local_rank, world.local_size, float(x)


def test_ranks_meet_where_the_variables_say() -> None:
    want = [("result", (r, 2, r, 2, 3.0)) for r in range(2)]
    assert call_in_processes(join_and_reduce, torch_variables(2, free_port())) == want
    assert call_in_processes(join_and_reduce, [SLURM | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]) == want
    assert call_in_processes(join_and_reduce, [{}]) == [("result", (0, 1, 0, 1, 1.0))]


def test_a_rank_that_was_not_started_is_named() -> None:
    results = call_in_processes(join_and_reduce, torch_variables(3, free_port())[:2], 1.0)
    assert [kind for kind, _ in results] == ["error", "error"]
    assert all("CommTimeout" in text and "rank 2 never arrived" in text.splitlines()[0] for _, text in results), results


@pytest.mark.parametrize("twice", [0, 1])
def test_two_processes_that_claim_one_rank_are_told_and_so_are_the_others(twice: int) -> None:
    first, second = torch_variables(2, free_port())
    environments = [first, first] if twice == 0 else [first, second, second]
    results = call_in_processes(join_and_reduce, environments, 5.0, float(twice))
    errors = [text for kind, text in results if kind == "error"]
    if twice == 0:
        assert len(errors) == 2
        assert any(e.startswith("PeerError: two processes claim to be rank 0: process ") for e in errors), errors
    refused = [e for e in errors if e.startswith(f"InputError: two processes claim to be rank {twice}")]
    assert len(refused) == 1, results
    assert "MASTER_PORT of its own" in refused[0]
    if twice == 1:  # the job that is complete goes on
        assert sum(kind == "result" for kind, _ in results) == 2


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        ((kind, text),) = call_in_processes(join_and_reduce, torch_variables(2, port)[:1], 1.0)
    assert kind == "error"
    assert text.startswith("CommTimeout: rank 0 could not meet the other 1 ranks")
    assert f"127.0.0.1:{port}" in text


def fail_then_join_again(first: str) -> list[Any]:
    """A world breaks in each way; a second one in the same processes works, with torch.distributed beside it."""
    import time

    import hostir as hir
    from hostir.errors import HostIrError
    from hostir.runtime.comms.protocol import CommCall

    seen: list[object] = []
    world = hir.launch.init(timeout=1.0, device="cpu")
    try:
        with world:
            if first == "raises" and world.rank == 1:
                raise ValueError("only here")
            if first == "late" and world.rank == 1:
                time.sleep(2.5)
            if first == "torch under way" and world.rank == 1:
                raise ValueError("only here")
            if first == "torch under way":
                torch.distributed.all_reduce(torch.ones(1), async_op=True)
            world.comms.issue(CommCall("barrier", (0, 1))).wait()
    except (HostIrError, ValueError) as error:
        seen.append(type(error).__name__)
    seen.append(join_and_reduce()[-1])
    with hir.launch.init(timeout=20.0, device="cpu") as again:
        x = torch.ones(1)
        torch.distributed.all_reduce(x)
        seen += [float(x), again.rank]
    return seen


@pytest.mark.parametrize("first", ["raises", "late", "torch under way"])
def test_after_a_failure_the_same_processes_can_join_again(first: str) -> None:
    results = call_in_processes(fail_then_join_again, torch_variables(2, free_port()), first)
    names = ["CommTimeout"] * 2 if first == "late" else ["PeerError", "ValueError"]
    assert results == [("result", [names[r], 3.0, 2.0, r]) for r in range(2)]


def leave_in_some_way(rank_that_closes: int) -> str:
    import hostir as hir
    from hostir.errors import PeerError
    from hostir.runtime.comms.protocol import CommCall

    world = hir.launch.init(timeout=20.0, device="cpu")
    world.comms.issue(CommCall("barrier", (0, 1))).wait()
    if world.rank != rank_that_closes:
        return "left open"
    world.close()
    world.close()
    try:
        world.comms.issue(CommCall("barrier", (0, 1)))
    except PeerError as error:
        return error.message
    return "nothing"


def test_one_rank_may_close_and_the_others_not() -> None:
    results = call_in_processes(leave_in_some_way, torch_variables(2, free_port()), 0)
    assert results == [("result", "this world is closed"), ("result", "left open")]
