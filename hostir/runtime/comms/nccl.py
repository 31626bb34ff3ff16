"""Communications over NCCL, one GPU a rank: what NCCL can do with a tensor it does, the rest is an exchange of bytes and our own sum.

Everything is in the order of streams: a posted work counts as done once the current stream waits for it, and the host goes on. Tensors
are made dense first and travel as bytes; sends and receives of one communication are one NCCL group. Reductions whose meaning NCCL
does not share (NaN in min and max, bits, dtypes that it lacks) are an exchange and ``ordered``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from hostir.runtime.comms.gloo import Steps
from hostir.runtime.comms.moves import at_least_1d, part
from hostir.runtime.comms.protocol import CommCall, wrapped_dim
from hostir.runtime.comms.reduce import ordered

_WHOLE: Final = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_OPS: Final = {"sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "avg": dist.ReduceOp.AVG}


class Posted:
    """A work in NCCL's stream. It is over for us when the current stream waits for it; the tensors stay until then."""

    def __init__(self, work: Any, *held: torch.Tensor) -> None:
        self._work = work
        self._held = held
        self._ordered = False

    def is_completed(self) -> bool:
        return self._ordered or bool(self._work.is_completed())

    def wait(self, _timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the host goes on."""
        self._work.wait()
        self._ordered = True
        return True


class NcclWire:
    """How one team talks over NCCL on ``device``."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.name = "nccl"
        self._device = device
        self._timeout = timedelta(seconds=timeout)

    def open(self, store: dist.Store, position: int, num_members: int) -> Any:
        """The process group of a team; its communicator is made at the first communication, by the members only."""
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, position, num_members, options)

    def compare(self, group: Any, numbers: Sequence[int], num_members: int) -> tuple[Any, torch.Tensor]:
        """Post an exchange of each member's ``numbers``; the work, and the table (members, numbers) that it fills."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        table = torch.empty(num_members, len(numbers), dtype=torch.int64, device=self._device)
        return Posted(group._allgather_base(table, mine), mine, table), table

    def steps(self, group: Any, call: CommCall, here: int) -> Steps:
        """The steps of ``call`` for the member at position ``here``."""
        match call.kind:
            case "barrier":
                token = torch.zeros(1, dtype=torch.int32, device=self._device)
                yield Posted(group.allreduce([token], _allreduce_options(dist.ReduceOp.SUM)), token), True
            case "allgather":
                yield from _allgather(group, call)
            case "allreduce":
                yield from _allreduce(group, call, here)
            case "reduce_scatter":
                yield from _reduce_scatter(group, call, here)
            case "broadcast":
                yield from _broadcast(group, call, here)
            case "reduce" | "gather" | "scatter" | "alltoall" | "alltoallv" | "permute":
                yield from _exchanged(group, call, here)
            case "send" | "recv":
                yield from _message(group, call)
            case _:
                raise AssertionError(call.kind)


# ------------------------------------------------------------------------------------------------------------------- pieces


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as its bytes."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous()


def _landing(out: torch.Tensor) -> torch.Tensor:
    """Where ``out`` arrives: itself where it is contiguous."""
    return out.detach() if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _land(out: torch.Tensor, landing: torch.Tensor) -> None:
    if landing.data_ptr() != out.data_ptr() or not out.is_contiguous():
        out.copy_(landing)


def _stacked(x: torch.Tensor, dim: int, num: int) -> torch.Tensor:
    """The ``num`` equal parts of ``x`` along ``dim`` as one dense tensor (num, …)."""
    return torch.stack([part(x, dim, i, num) for i in range(num)])


def _spread(out: torch.Tensor, dim: int, parts: torch.Tensor) -> None:
    """Write (num, …) ``parts`` side by side along ``dim`` of ``out``."""
    for i in range(parts.shape[0]):
        target = part(out, dim, i, parts.shape[0])
        target.copy_(parts[i].view(target.shape))


def _allreduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def native(dtype: torch.dtype, op: str) -> bool:
    """Whether NCCL's reduction means what ours means, up to the order of additions."""
    if dtype in _FLOATS:
        return op in ("sum", "prod", "avg")
    return dtype in _WHOLE and op in ("sum", "prod", "min", "max")


def _post(group: Any, sends: Sequence[torch.Tensor | None], receives: Sequence[torch.Tensor | None]) -> Posted | None:
    """One NCCL group: ``sends[j]`` to member j, ``receives[i]`` from member i; None and empty ones are left out."""
    posts = [(group.send, t, j) for j, t in enumerate(sends) if t is not None and t.numel()]
    posts += [(group.recv, t, i) for i, t in enumerate(receives) if t is not None and t.numel()]
    if not posts:
        return None
    group._start_coalescing()
    for post, t, peer in posts:
        post([_bytes(t)], peer, 0)
    return Posted(group._end_coalescing(), *(t for _, t, _ in posts))


class _Nothing:
    """The work of a communication that moves nothing here."""

    def is_completed(self) -> bool:
        return True

    def wait(self, _timeout: timedelta | None = None) -> bool:
        return True


# --------------------------------------------------------------------------------------------------------------- collectives


def _allgather(group: Any, call: CommCall) -> Steps:
    x, out, num = call.ins[0], call.outs[0], len(call.team)
    dim = wrapped_dim(call, call.dim, x)
    if out.numel() == 0:
        yield _Nothing(), True
        return
    dense = _dense(x)
    direct = dim == 0 and out.is_contiguous()
    if direct and dense.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        dense = dense.clone()
    landing = out.detach() if direct else torch.empty((num, *x.shape), dtype=x.dtype, device=x.device)
    yield Posted(group._allgather_base(_bytes(landing), _bytes(dense)), dense, landing), True
    if not direct:
        _spread(out, dim, landing)


def _broadcast(group: Any, call: CommCall, here: int) -> Steps:
    out = call.outs[0]
    if out.numel() == 0:
        yield _Nothing(), True
        return
    options = dist.BroadcastOptions()
    options.rootRank = call.source or 0
    options.rootTensor = 0
    moved = _dense(call.ins[0]) if here == call.source else _landing(out)
    yield Posted(group.broadcast([_bytes(moved)], options), moved), True
    if here != call.source or call.ins[0] is not out:
        _land(out, moved)


def _allreduce(group: Any, call: CommCall, here: int) -> Steps:
    x, out, num = call.ins[0], call.outs[0], len(call.team)
    if x.numel() == 0:
        yield _Nothing(), True
    elif native(x.dtype, call.op):
        landing = _landing(out)
        if x is not out or not out.is_contiguous():
            landing.copy_(x)
        yield Posted(group.allreduce([landing], _allreduce_options(_OPS[call.op])), landing), True
        _land(out, landing)
    else:
        dense = _dense(x).view(-1)
        length = -(-dense.numel() // num)
        parts = [dense[i * length : (i + 1) * length] for i in range(num)]
        mine = torch.empty((num, parts[here].numel()), dtype=x.dtype, device=x.device)
        yield _post(group, parts, list(mine)) or _Nothing(), False
        mine[here].copy_(parts[here])
        total = ordered(list(mine), call.op)
        landing = torch.empty_like(dense)
        arrived = [landing[i * length : (i + 1) * length] for i in range(num)]
        yield _post(group, [total] * num, arrived) or _Nothing(), True
        out.copy_(landing.view(out.shape))


def _reduce_scatter(group: Any, call: CommCall, here: int) -> Steps:
    x, out, num = call.ins[0], call.outs[0], len(call.team)
    if x.numel() == 0:
        yield _Nothing(), True
        return
    stacked = _stacked(x, wrapped_dim(call, call.dim, out), num)
    if native(x.dtype, call.op):
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[call.op]
        total = torch.empty_like(stacked[0])
        yield Posted(group._reduce_scatter_base(total, stacked, options), total, stacked), True
    else:
        arrived = torch.empty_like(stacked)
        yield _post(group, _others(stacked, here), _others(arrived, here)) or _Nothing(), True
        arrived[here].copy_(stacked[here])
        total = ordered(list(arrived), call.op)
    at_least_1d(out).copy_(total.view(at_least_1d(out).shape))


def _others(parts: torch.Tensor, here: int) -> list[torch.Tensor | None]:
    return [None if i == here else p for i, p in enumerate(parts)]


def _exchanged(group: Any, call: CommCall, here: int) -> Steps:
    """Everything that is parts from members to members: who sends what where, then what becomes of it."""
    num = len(call.team)
    sends: list[torch.Tensor | None] = [None] * num
    receives: list[torch.Tensor | None] = [None] * num
    x = call.ins[0] if call.ins else None
    out = call.outs[0] if call.outs else None
    arrived: torch.Tensor | None = None
    match call.kind:
        case "reduce" | "gather":
            assert x is not None
            assert call.to is not None
            sends[call.to] = _dense(x)
            if here == call.to:
                arrived = torch.empty((num, *x.shape), dtype=x.dtype, device=x.device)
                receives = list(arrived)
        case "scatter":
            assert out is not None
            assert call.source is not None
            receives[call.source] = arrived = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            if here == call.source:
                assert x is not None
                sends = [p.view(out.shape) for p in _stacked(x, wrapped_dim(call, call.dim, out), num)]
        case "alltoall":
            assert x is not None
            stacked = _stacked(x, wrapped_dim(call, call.split, x), num)
            arrived = torch.empty_like(stacked)
            sends, receives = list(stacked), list(arrived)
        case "alltoallv":
            assert x is not None
            assert out is not None
            assert call.send_counts is not None
            assert call.recv_counts is not None
            rows = sum(call.recv_counts)
            arrived = torch.empty((rows, *out.shape[1:]), dtype=out.dtype, device=out.device)
            sends = list(_dense(x.narrow(0, 0, sum(call.send_counts))).split(list(call.send_counts)))
            receives = list(arrived.split(list(call.recv_counts)))
        case _:
            if x is not None and call.to is not None:
                sends[call.to] = _dense(x)
            if out is not None and call.source is not None:
                receives[call.source] = arrived = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    own, into = sends[here], receives[here]
    sends[here] = receives[here] = None
    yield _post(group, sends, receives) or _Nothing(), True
    if own is not None and into is not None:
        into.copy_(own)
    if arrived is None or out is None:
        return
    match call.kind:
        case "reduce":
            out.copy_(ordered(list(arrived), call.op))
        case "gather":
            assert x is not None
            _spread(out, wrapped_dim(call, call.dim, x), arrived)
        case "alltoall":
            assert x is not None
            _spread(out, wrapped_dim(call, call.cat, x), arrived)
        case "alltoallv":
            out.narrow(0, 0, arrived.shape[0]).copy_(arrived)
        case _:
            out.copy_(arrived)


def _message(group: Any, call: CommCall) -> Steps:
    """In a group of two, the sender first."""
    if call.kind == "send":
        yield _post(group, [None, _dense(call.ins[0])], []) or _Nothing(), True
    else:
        landing = _landing(call.outs[0])
        yield _post(group, [], [landing, None]) or _Nothing(), True
        _land(call.outs[0], landing)
