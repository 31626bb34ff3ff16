"""Communication of GPU tensors where all ranks share one GPU: threads on their own streams, and gloo through pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hostir.launch import World, spawn
from hostir.runtime.comms.protocol import CommCall
from tests.dist import comm_cases as cc

pytestmark = pytest.mark.gpu
transports = pytest.mark.parametrize("transport", ["threads", "gloo"])


def on_gpu(fn: Any, num_ranks: int, transport: str) -> list[Any]:
    return spawn(fn, num_ranks, transport, timeout=60.0)


@transports
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_communication_of_gpu_tensors_in_every_layout(num_ranks: int, transport: str) -> None:
    def body(world: World) -> int:
        assert world.device.type == "cuda"
        with torch.device(world.device):
            return cc.check_all(world, (torch.float32, torch.bfloat16, torch.int16, torch.bool), cc.LAYOUTS, ((3, 2), (), (0, 5)))

    assert min(on_gpu(body, num_ranks, transport)) > 300


@transports
def test_results_wait_for_the_work_that_makes_the_inputs(transport: str) -> None:
    """Inputs come out of a long queue of products, and results go into more work, without any synchronisation by the caller."""

    def body(world: World) -> tuple[float, float]:
        team = (0, 1)
        a = torch.eye(2048, device=world.device) * (world.rank + 1)
        x = a
        for _ in range(20):
            x = x @ torch.eye(2048, device=world.device)
        total, received = torch.empty_like(x), torch.empty_like(x)
        world.comms.issue(CommCall("allreduce", team, (x,), (total,))).wait()
        work = world.comms.issue(CommCall("permute", team, (x,), (received,), to=1 - world.rank, source=1 - world.rank))
        y = total @ total
        work.wait()
        return float((y + received).trace()), float(total.sum())

    assert on_gpu(body, 2, transport) == [(2048 * (9.0 + 2.0), 2048 * 3.0), (2048 * (9.0 + 1.0), 2048 * 3.0)]


def test_rank_threads_have_streams_of_their_own_and_share_the_device() -> None:
    def body(world: World) -> tuple[int, int]:
        return torch.cuda.current_stream().cuda_stream, torch.cuda.current_device()

    streams, devices = zip(*on_gpu(body, 3, "threads"), strict=True)
    assert len({*streams, torch.cuda.default_stream().cuda_stream}) == 4
    assert len(set(devices)) == 1


def test_backward_of_rank_threads_may_communicate() -> None:
    def body(world: World) -> float:
        class Total(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                grad = grad.contiguous()
                world.comms.issue(CommCall("allreduce", (0, 1), (grad,), (grad,))).wait()
                return grad

        x = torch.ones(4, device=world.device, requires_grad=True)
        (Total.apply(x) * (world.rank + 1)).sum().backward()
        assert x.grad is not None
        return float(x.grad.sum())

    assert on_gpu(body, 2, "threads") == [12.0, 12.0]
