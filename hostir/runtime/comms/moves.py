"""A whole collective at once, for ranks that share one address space: plain tensor copies and ordered reductions.

All inputs are read before any output is written: an input that shares memory with an output is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hostir.runtime.comms.protocol import CommCall, wrapped_dim
from hostir.runtime.comms.reduce import ordered


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the byte ranges that two tensors span overlap (they may still interleave without touching)."""
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    first_a, last_a = _span(a)
    first_b, last_b = _span(b)
    return first_a < last_b and first_b < last_a


def _span(x: torch.Tensor) -> tuple[int, int]:
    first = int(x.storage_offset()) * x.element_size()
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return first, first + (int(reach) + 1) * x.element_size()


def at_least_1d(x: torch.Tensor) -> torch.Tensor:
    """A 0-d tensor as a view of shape (1,)."""
    return x.view(1) if x.dim() == 0 else x


def _unaliased(ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() if any(share_memory(x, out) for out in outs) else x for x in ins]


def part(x: torch.Tensor, dim: int, index: int, num: int) -> torch.Tensor:
    """The ``index``-th of ``num`` equal parts along ``dim``; a view."""
    x = at_least_1d(x)
    length = x.shape[dim] // num
    return x.narrow(dim, index * length, length)


def run_collective(calls: Sequence[CommCall]) -> None:
    """Carry out one collective; ``calls`` are the members' calls in team order, checked and agreed."""
    with torch.inference_mode():
        _run(calls)


def _run(calls: Sequence[CommCall]) -> None:
    first, num = calls[0], len(calls)
    outs = [c.outs[0] for c in calls if c.outs]
    match first.kind:
        case "barrier":
            pass
        case "allreduce":
            total = ordered([c.ins[0] for c in calls], first.op)
            for out in outs:
                out.copy_(total)
        case "reduce":
            assert first.to is not None
            calls[first.to].outs[0].copy_(ordered([c.ins[0] for c in calls], first.op))
        case "reduce_scatter":
            dim = wrapped_dim(first, first.dim, first.ins[0])
            totals = [ordered([part(c.ins[0], dim, i, num) for c in calls], first.op) for i in range(num)]
            for call, total in zip(calls, totals, strict=True):
                at_least_1d(call.outs[0]).copy_(total)
        case "allgather" | "gather":
            dim = wrapped_dim(first, first.dim, first.ins[0])
            targets = outs if first.kind == "allgather" else [calls[first.to or 0].outs[0]]
            ins = _unaliased([c.ins[0] for c in calls], targets)
            for out in targets:
                for i, x in enumerate(ins):
                    part(out, dim, i, num).copy_(at_least_1d(x))
        case "broadcast":
            (x,) = _unaliased([calls[first.source or 0].ins[0]], [o for o in outs if o is not calls[first.source or 0].ins[0]])
            for out in outs:
                if out is not x:
                    out.copy_(x)
        case "scatter":
            (x,) = _unaliased([calls[first.source or 0].ins[0]], outs)
            dim = wrapped_dim(first, first.dim, outs[0])
            for i, out in enumerate(outs):
                at_least_1d(out).copy_(part(x, dim, i, num))
        case "alltoall":
            split = wrapped_dim(first, first.split, first.ins[0])
            cat = wrapped_dim(first, first.cat, first.ins[0])
            ins = _unaliased([c.ins[0] for c in calls], outs)
            for j, out in enumerate(outs):
                for i, x in enumerate(ins):
                    part(out, cat, i, num).copy_(part(x, split, j, num))
        case "alltoallv":
            _rows(calls, _unaliased([c.ins[0] for c in calls], outs))
        case "permute":
            senders = [c for c in calls if c.to is not None]
            ins = _unaliased([c.ins[0] for c in senders], outs)
            for call, x in zip(senders, ins, strict=True):
                assert call.to is not None
                calls[call.to].outs[0].copy_(x)
        case _:
            raise AssertionError(first.kind)


def _rows(calls: Sequence[CommCall], ins: Sequence[torch.Tensor]) -> None:
    taken = [0] * len(calls)
    for call in calls:
        at = 0
        for i, count in enumerate(call.recv_counts or ()):
            call.outs[0].narrow(0, at, count).copy_(ins[i].narrow(0, taken[i], count))
            at += count
            taken[i] += count


def run_message(send: CommCall, recv: CommCall) -> None:
    """Copy what ``send`` sends into what ``recv`` receives; same dtype and shape."""
    with torch.inference_mode():
        recv.outs[0].copy_(send.ins[0])
