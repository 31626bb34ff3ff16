"""Communications over gloo, for processes on CPUs: everything is an exchange of bytes, every reduction is ours.

Gloo's own collectives read strided tensors as if they were packed, know few dtypes, lose NaNs and round bf16 at each hop. So tensors
are made dense here, travel as bytes through one primitive (all-to-all with sizes), and are reduced in rank order by ``ordered``.

A communication is a generator of steps: it posts a backend work, yields it, and is resumed when that work is done. What it does after
the last step (copying into strided outputs) happens when the caller waits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from hostir.runtime.comms.moves import at_least_1d, part, share_memory
from hostir.runtime.comms.protocol import CommCall, wrapped_dim
from hostir.runtime.comms.reduce import ordered

# A posted work, and whether it is the last one of its communication.
Steps: TypeAlias = Generator[tuple[Any, bool], None, None]

ONE_STEP_BYTES: Final = 64 * 1024  # an allreduce up to this size takes one exchange of everything instead of two of parts
COPIED_BYTES: Final = 64 * 1024 * 1024  # an allgather up to this size goes through all-to-all (faster, but copies its input)


class GlooWire:
    """How one team talks over gloo. ``loopback``: all ranks are on this machine."""

    def __init__(self, *, loopback: bool) -> None:
        self.name = "gloo"
        self.loopback = loopback

    def open(self, store: dist.Store, position: int, num_members: int) -> Any:
        """The process group of a team; blocks until all members have come."""
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Timeouts are kept by the waiting rank, which can say more than gloo; gloo's own would also break the group.
        options._timeout = timedelta(hours=24)
        make = dist.ProcessGroupGloo.create_device
        options._devices = [make(hostname="127.0.0.1") if self.loopback else dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(store, position, num_members, options)

    def compare(self, group: Any, numbers: Sequence[int], num_members: int) -> tuple[Any, torch.Tensor]:
        """Post an exchange of each member's ``numbers``; the work, and the table (members, numbers) that it fills."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu").repeat(num_members)
        table = torch.empty(num_members, len(numbers), dtype=torch.int64, device="cpu")
        return _post(group, _bytes(table), _bytes(mine), None, None), table

    def steps(self, group: Any, call: CommCall, here: int) -> Steps:
        """The steps of ``call`` for the member at position ``here``."""
        match call.kind:
            case "barrier":
                token = torch.zeros(len(call.team), dtype=torch.uint8, device="cpu")
                yield _post(group, torch.empty_like(token), token, None, None), True
            case "allgather":
                yield from _allgather(group, call)
            case "gather" | "reduce":
                yield from _to_root(group, call, here)
            case "scatter":
                yield from _scatter(group, call, here)
            case "broadcast":
                yield from _broadcast(group, call, here)
            case "allreduce":
                yield from _allreduce(group, call, here)
            case "reduce_scatter":
                yield from _reduce_scatter(group, call)
            case "alltoall":
                yield from _alltoall(group, call)
            case "alltoallv":
                yield from _alltoallv(group, call)
            case "permute":
                yield from _permute(group, call, here)
            case "send" | "recv":
                yield from _message(group, call)
            case _:
                raise AssertionError(call.kind)


# ------------------------------------------------------------------------------------------------------------------- layout


def _dense(x: torch.Tensor, *, apart_from: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """``x`` as a contiguous CPU tensor that shares no memory with ``apart_from``; ``x`` itself where it is one."""
    x = x.detach()
    if x.is_cuda:
        staged = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
        staged.copy_(x)
        return staged
    x = x.contiguous()
    return x.clone() if any(share_memory(x, other) for other in apart_from) else x


def _landing(out: torch.Tensor) -> torch.Tensor:
    """Where bytes for ``out`` arrive: itself where it is a contiguous CPU tensor, else a temporary of its shape."""
    if out.is_cuda or not out.is_contiguous():
        return torch.empty(out.shape, dtype=out.dtype, pin_memory=out.is_cuda, device="cpu")
    return out.detach()


def _land(out: torch.Tensor, landing: torch.Tensor) -> None:
    if landing.data_ptr() != out.data_ptr() or landing.device != out.device:
        out.copy_(landing)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as its bytes. Dims of size 1 may have any stride and still count as contiguous, so strides are set anew."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _post(group: Any, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int] | None, in_sizes: list[int] | None) -> Any:
    """Start the exchange: bytes ``x`` cut by ``in_sizes`` to the members, ``out`` filled by ``out_sizes`` (None: equal parts)."""
    return group.alltoall_base(out, x, out_sizes or [], in_sizes or [], dist.AllToAllOptions())


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _stacked(x: torch.Tensor, dim: int, num: int) -> torch.Tensor:
    """The ``num`` equal parts of ``x`` along ``dim`` as one dense tensor (num, …)."""
    return torch.stack([part(x, dim, i, num) for i in range(num)])


def _spread(out: torch.Tensor, dim: int, parts: torch.Tensor) -> None:
    """Write (num, …) ``parts`` side by side along ``dim`` of ``out``."""
    for i in range(parts.shape[0]):
        target = part(out, dim, i, parts.shape[0])
        target.copy_(parts[i].view(target.shape))


# --------------------------------------------------------------------------------------------------------------- collectives


def _allgather(group: Any, call: CommCall) -> Steps:
    x, out, num = call.ins[0], call.outs[0], len(call.team)
    dim = wrapped_dim(call, call.dim, x)
    dense = _dense(x, apart_from=(out,))
    direct = dim == 0 and out.is_contiguous() and not out.is_cuda
    landing = out.detach() if direct else torch.empty((num, *x.shape), dtype=x.dtype, device="cpu")
    if out.numel() * out.element_size() <= COPIED_BYTES:
        yield _post(group, _bytes(landing), _bytes(dense).repeat(num), None, None), True
    else:
        yield group._allgather_base(_bytes(landing), _bytes(dense)), True
    if not direct:
        _spread(out, dim, landing)


def _to_root(group: Any, call: CommCall, here: int) -> Steps:
    x, num = call.ins[0], len(call.team)
    dense = _dense(x, apart_from=call.outs)
    size = dense.numel() * dense.element_size()
    to = [size if i == call.to else 0 for i in range(num)]
    if here != call.to:
        yield _post(group, _nothing(), _bytes(dense), [0] * num, to), True
        return
    landing = torch.empty((num, *x.shape), dtype=x.dtype, device="cpu")
    yield _post(group, _bytes(landing), _bytes(dense), [size] * num, to), True
    if call.kind == "gather":
        _spread(call.outs[0], wrapped_dim(call, call.dim, x), landing)
    else:
        call.outs[0].copy_(ordered(list(landing), call.op))


def _scatter(group: Any, call: CommCall, here: int) -> Steps:
    out, num = call.outs[0], len(call.team)
    landing = _landing(out)
    size = landing.numel() * landing.element_size()
    source = [size if i == call.source else 0 for i in range(num)]
    if here == call.source:
        x = _dense(_stacked(call.ins[0], wrapped_dim(call, call.dim, out), num))
        yield _post(group, _bytes(landing), _bytes(x), source, [size] * num), True
    else:
        yield _post(group, _bytes(landing), _nothing(), source, [0] * num), True
    _land(out, landing)


def _broadcast(group: Any, call: CommCall, here: int) -> Steps:
    out = call.outs[0]
    assert call.source is not None
    options = dist.BroadcastOptions()
    options.rootRank = call.source
    options.rootTensor = 0
    if here == call.source:
        dense = _dense(call.ins[0])
        yield group.broadcast([_bytes(dense)], options), True
        if call.ins[0] is not out:
            out.copy_(dense)
    else:
        landing = _landing(out)
        yield group.broadcast([_bytes(landing)], options), True
        _land(out, landing)


def _allreduce(group: Any, call: CommCall, here: int) -> Steps:
    x, out, num = call.ins[0], call.outs[0], len(call.team)
    dense = _dense(x)
    if dense.numel() * dense.element_size() <= ONE_STEP_BYTES:
        landing = torch.empty((num, *x.shape), dtype=x.dtype, device="cpu")
        yield _post(group, _bytes(landing), _bytes(dense).repeat(num), None, None), True
        out.copy_(ordered(list(landing), call.op))
        return
    length = -(-dense.numel() // num)
    lengths = [max(min(length, dense.numel() - i * length), 0) for i in range(num)]
    sizes = [n * dense.element_size() for n in lengths]
    mine = torch.empty((num, lengths[here]), dtype=x.dtype, device="cpu")
    yield _post(group, _bytes(mine), _bytes(dense), [sizes[here]] * num, sizes), False
    total = ordered(list(mine), call.op)
    landing = _landing(out)
    yield _post(group, _bytes(landing), _bytes(total).repeat(num), sizes, [sizes[here]] * num), True
    _land(out, landing)


def _reduce_scatter(group: Any, call: CommCall) -> Steps:
    x, out, num = call.ins[0], call.outs[0], len(call.team)
    stacked = _dense(_stacked(x, wrapped_dim(call, call.dim, out), num))
    landing = torch.empty_like(stacked)
    yield _post(group, _bytes(landing), _bytes(stacked), None, None), True
    at_least_1d(out).copy_(ordered(list(landing), call.op))


def _alltoall(group: Any, call: CommCall) -> Steps:
    x, out, num = call.ins[0], call.outs[0], len(call.team)
    stacked = _dense(_stacked(x, wrapped_dim(call, call.split, x), num))
    landing = torch.empty_like(stacked)
    yield _post(group, _bytes(landing), _bytes(stacked), None, None), True
    _spread(out, wrapped_dim(call, call.cat, x), landing)


def _alltoallv(group: Any, call: CommCall) -> Steps:
    assert call.send_counts is not None
    assert call.recv_counts is not None
    x, out = call.ins[0].narrow(0, 0, sum(call.send_counts)), call.outs[0].narrow(0, 0, sum(call.recv_counts))
    dense, landing = _dense(x, apart_from=call.outs), _landing(out)
    row = x.element_size() * x.shape[1:].numel()
    yield _post(group, _bytes(landing), _bytes(dense), [c * row for c in call.recv_counts], [c * row for c in call.send_counts]), True
    _land(out, landing)


def _permute(group: Any, call: CommCall, here: int) -> Steps:
    num = len(call.team)
    dense = _dense(call.ins[0], apart_from=call.outs) if call.to is not None else None
    landing = _landing(call.outs[0]) if call.source is not None else None
    in_sizes, out_sizes = [0] * num, [0] * num
    if dense is not None and call.to is not None and call.to != here:
        in_sizes[call.to] = dense.numel() * dense.element_size()
    if landing is not None and call.source is not None and call.source != here:
        out_sizes[call.source] = landing.numel() * landing.element_size()
    sent = _bytes(dense) if dense is not None and any(in_sizes) else _nothing()
    received = _bytes(landing) if landing is not None and any(out_sizes) else _nothing()
    yield _post(group, received, sent, out_sizes, in_sizes), True
    if call.source == here:
        assert dense is not None
        call.outs[0].copy_(dense)
    elif landing is not None:
        _land(call.outs[0], landing)


def _message(group: Any, call: CommCall) -> Steps:
    """In a group of two, the sender first."""
    if call.kind == "send":
        dense = _dense(call.ins[0])
        yield _post(group, _nothing(), _bytes(dense), [0, 0], [0, dense.numel() * dense.element_size()]), True
    else:
        landing = _landing(call.outs[0])
        yield _post(group, _bytes(landing), _nothing(), [landing.numel() * landing.element_size(), 0], [0, 0]), True
        _land(call.outs[0], landing)
