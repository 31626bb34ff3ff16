"""What a program asks of a transport: one communication, fully resolved, seen from one rank.

Everything that needs the mesh, a loop index or a symbol is already a number here, so a transport only moves bytes and reduces.
``check_call`` refuses a wrong call before anything is sent: most backends answer a wrong size with a crash or with wrong numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from hostir.errors import InputError

REDUCE_OPS: Final = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
COLLECTIVES: Final = (
    "allgather",
    "allreduce",
    "reduce_scatter",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "alltoall",
    "alltoallv",
    "permute",
    "barrier",
)
KINDS: Final = (*COLLECTIVES, "send", "recv")
REDUCTIONS: Final = ("allreduce", "reduce_scatter", "reduce")


def _nowhere() -> str:
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class CommCall:
    """One communication on one rank.

    ``team`` lists world ranks in team order; ``to`` and ``source`` are positions in it. ``ins`` and ``outs`` hold at most one tensor
    each: ``reduce`` and ``gather`` write ``outs`` on the root (``to``) only, ``broadcast`` and ``scatter`` read ``ins`` on the root
    (``source``) only, ``allreduce`` may have the same tensor on both sides. A ``permute`` that sends nothing has ``to=None``, one that
    receives nothing ``source=None``. Tensors are data: gradients do not flow through a call. Counts are rows along dim 0.

    ``channel`` separates streams of messages: calls of different channels never meet, so two threads that run two programs over the
    same team stay apart. ``agreed`` says that the ranks have already compared this call (as part of a program's text, say); a transport
    may then skip its own comparison. It must be the same on all members. ``memo`` is where a transport keeps what it has worked out
    about this object.
    """

    kind: str
    team: tuple[int, ...]
    ins: tuple[torch.Tensor, ...] = ()
    outs: tuple[torch.Tensor, ...] = ()
    op: str = "sum"
    dim: int = 0
    split: int = 0
    cat: int = 0
    to: int | None = None
    source: int | None = None
    send_counts: tuple[int, ...] | None = None
    recv_counts: tuple[int, ...] | None = None
    where: Callable[[], str] = _nowhere
    step: int = 0
    channel: str = ""
    agreed: bool = False
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


class Work(Protocol):
    """A communication under way."""

    def wait(self) -> None:
        """Return when ``outs`` hold the result and ``ins`` may be overwritten.

        On a GPU this orders the current stream and may return earlier. Raises PeerError, CommTimeout or RankMismatchError.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""


class Comms(Protocol):
    """One rank's end of a transport. ``run_locks``: who runs a program now, by team; see ``Alone``."""

    name: str
    rank: int
    size: int
    timeout: float
    run_locks: dict[tuple[int, ...], threading.RLock]

    def issue(self, call: CommCall) -> Work:
        """Start one communication. InputError when the call is wrong on this rank: nothing was sent."""

    def issue_group(self, calls: Sequence[CommCall]) -> Work:
        """Start several that progress together: all parts are posted before any is waited for."""

    def exchange(self, tag: str, text: str, ranks: Sequence[int], patience: float | None = None) -> list[str]:
        """Every one of ``ranks`` gives a text and gets all of them, in the order of ``ranks``. For small host-side facts.

        Waits ``patience`` seconds (default: the timeout of communications).
        """

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank stops; they raise PeerError (or the same class, where the fault is shared)."""

    def close(self) -> None:
        """Leave in order. A second call does nothing; a later ``issue`` is an error."""


# --------------------------------------------------------------------------------------------------------------------- checks


def show_type(tensor: torch.Tensor) -> str:
    """``f32[2, 3]``."""
    from hostir.errors import BuildError
    from hostir.types import dtype_of

    try:
        name = dtype_of(tensor.dtype).name
    except BuildError:  # a dtype that programs do not know still moves
        name = str(tensor.dtype).removeprefix("torch.")
    return f"{name}{list(tensor.shape)}"


def show_call(call: CommCall) -> str:
    """The call as one short text, ``allreduce(f32[2, 3] sum)``; what error messages show."""
    parts = [show_type(t) for t in call.ins[:1]] or [f"-> {show_type(t)}" for t in call.outs[:1]]
    if call.kind in REDUCTIONS:
        parts.append(call.op)
    if call.kind in ("allgather", "reduce_scatter", "gather", "scatter") and call.dim:
        parts.append(f"dim {call.dim}")
    if call.kind == "alltoall":
        parts.append(f"split {call.split} cat {call.cat}")
    if call.to is not None:
        parts.append(f"to {call.to}")
    if call.source is not None:
        parts.append(f"from {call.source}")
    if call.kind == "alltoallv":
        parts.append(f"send {list(call.send_counts or ())} recv {list(call.recv_counts or ())}")
    return f"{call.kind}({' '.join(parts)})"


def _refuse(call: CommCall, why: str, *, expected: object = None, got: object = None, cure: str | None = None) -> InputError:
    return InputError(f"{call.kind}: {why}", statement=call.where() or show_call(call), expected=expected, got=got, cure=cure)


def wrapped_dim(call: CommCall, dim: int, tensor: torch.Tensor) -> int:
    """``dim`` as a non-negative number; a 0-d tensor counts as one of shape (1,)."""
    num_dims = max(tensor.dim(), 1)
    if not -num_dims <= dim < num_dims:
        raise _refuse(call, f"there is no dim {dim}", expected=f"-{num_dims} .. {num_dims - 1}", got=dim)
    return dim % num_dims


def scaled(shape: Sequence[int], dim: int, by: int) -> tuple[int, ...]:
    """``shape`` with dim ``dim`` multiplied; () counts as (1,)."""
    out = list(shape) or [1]
    out[dim] *= by
    return tuple(out)


def _only(call: CommCall, side: str) -> torch.Tensor:
    tensors = call.ins if side == "ins" else call.outs
    if len(tensors) != 1:
        what = "an input" if side == "ins" else "an output"
        raise _refuse(call, f"needs {what} tensor on this rank", expected=1, got=len(tensors))
    return tensors[0]


def _match(call: CommCall, small: torch.Tensor, large: torch.Tensor, dim: int, by: int, *, names: tuple[str, str]) -> None:
    """``large`` is ``small`` with ``dim`` multiplied by ``by``. A 0-d ``small`` goes with a ``large`` of shape (by,)."""
    if small.dtype != large.dtype:
        raise _refuse(call, "input and output have different dtypes", expected=show_type(small), got=show_type(large))
    expected = tuple(small.shape) if by == 1 and small.dim() == large.dim() else scaled(small.shape, dim, by)
    if tuple(large.shape) != expected:
        dividing = small.dim() == large.dim() and large.dim() > dim and large.shape[dim] % by
        raise _refuse(
            call,
            f"the {names[1]} does not hold {by} equal parts of the {names[0]} along dim {dim}",
            expected=f"{names[1]} {list(expected)} for {names[0]} {list(small.shape)}",
            got=f"{names[1]} {list(large.shape)}",
            cure=f"pad dim {dim} to a multiple of {by}, or use alltoallv" if dividing else None,
        )


def _position(call: CommCall, name: str, value: int | None) -> int:
    if value is None:
        raise _refuse(call, f"needs {name!r}: a position in the team")
    if not 0 <= value < len(call.team):
        raise _refuse(
            call,
            f"{name} {value} is not a position in the team {list(call.team)}",
            expected=f"0 .. {len(call.team) - 1}",
            got=value,
            cure="roots and peers are positions in the team (mesh coordinates), not world ranks",
        )
    return value


def check_op(call: CommCall, dtype: torch.dtype) -> None:
    """InputError unless ``call.op`` has a meaning on ``dtype``."""
    op = call.op
    if op not in REDUCE_OPS:
        raise _refuse(call, f"there is no reduction {op!r}", expected=", ".join(REDUCE_OPS), got=op)
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        cure = 'use op="sum" and divide as you need' if dtype != torch.bool else 'use op="sum" (logical or) or "prod" (logical and)'
        raise _refuse(call, "an average of integers has no exact result", expected="a float or complex dtype", got=str(dtype), cure=cure)
    if op in ("min", "max") and dtype.is_complex:
        raise _refuse(call, "complex numbers have no order", expected="a real dtype", got=str(dtype), cure="reduce torch.view_as_real(x)")
    if op in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        raise _refuse(call, f"{op} works on bits", expected="an integer dtype or bool", got=str(dtype))


def _check_counts(call: CommCall, name: str, counts: tuple[int, ...] | None, tensor: torch.Tensor) -> None:
    if counts is None or len(counts) != len(call.team) or any(c < 0 for c in counts):
        raise _refuse(call, f"needs {name}: one number of rows for each member", expected=len(call.team), got=counts)
    if tensor.dim() == 0:
        raise _refuse(call, "rows are counted along dim 0, so tensors need a dim", got="a 0-d tensor")
    if sum(counts) > tensor.shape[0]:
        got = f"{sum(counts)} = {' + '.join(map(str, counts))}"
        raise _refuse(call, f"{name} ask for more rows than the tensor has", expected=f"at most {tensor.shape[0]}", got=got)


def check_call(call: CommCall, rank: int, size: int) -> None:
    """Refuse a call that is wrong as seen from ``rank`` of ``size``, with InputError, before anything is sent.

    Shapes and dtypes are compared between the call's own tensors here; comparing them between ranks is ``agree``'s part.
    """
    if call.kind not in KINDS:
        raise _refuse(call, "is not a communication", expected=", ".join(KINDS), got=call.kind)
    team, num = call.team, len(call.team)
    if num == 0 or len(set(team)) != num or not all(0 <= r < size for r in team):
        raise _refuse(call, "a team lists different ranks of the world", expected=f"ranks in 0 .. {size - 1}", got=list(team))
    if rank not in team:
        raise _refuse(
            call,
            f"rank {rank} is not in the team {list(team)}",
            expected=f"one of {list(team)}",
            got=rank,
            cure="only members of the mesh take part; the others must not run this program",
        )
    here = team.index(rank)
    for t in (*call.ins, *call.outs):
        if t.layout != torch.strided or t.is_meta:
            raise _refuse(call, "needs a dense tensor with data", got=f"{t.layout} on {t.device}")
    match call.kind:
        case "barrier":
            return
        case "send":
            _only(call, "ins")
            _position(call, "to", call.to)
        case "recv":
            _only(call, "outs")
            _position(call, "source", call.source)
        case "permute":
            if call.to is not None:
                _only(call, "ins")
                _position(call, "to", call.to)
            if call.source is not None:
                _only(call, "outs")
                _position(call, "source", call.source)
            if call.to is not None and call.source is not None and call.ins[0].dtype != call.outs[0].dtype:
                raise _refuse(call, "input and output have different dtypes", expected=show_type(call.ins[0]), got=show_type(call.outs[0]))
        case "allgather":
            x, out = _only(call, "ins"), _only(call, "outs")
            _match(call, x, out, wrapped_dim(call, call.dim, x), num, names=("input", "output"))
        case "gather":
            x = _only(call, "ins")
            if _position(call, "to", call.to) == here:
                _match(call, x, _only(call, "outs"), wrapped_dim(call, call.dim, x), num, names=("input", "output"))
        case "scatter":
            out = _only(call, "outs")
            if _position(call, "source", call.source) == here:
                _match(call, out, _only(call, "ins"), wrapped_dim(call, call.dim, out), num, names=("output", "input"))
        case "allreduce":
            x, out = _only(call, "ins"), _only(call, "outs")
            check_op(call, x.dtype)
            _match(call, x, out, 0, 1, names=("input", "output"))
        case "reduce":
            x = _only(call, "ins")
            check_op(call, x.dtype)
            if _position(call, "to", call.to) == here:
                _match(call, x, _only(call, "outs"), 0, 1, names=("input", "output"))
        case "broadcast":
            out = _only(call, "outs")
            if _position(call, "source", call.source) == here:
                _match(call, _only(call, "ins"), out, 0, 1, names=("input", "output"))
        case "reduce_scatter":
            x, out = _only(call, "ins"), _only(call, "outs")
            check_op(call, x.dtype)
            _match(call, out, x, wrapped_dim(call, call.dim, out), num, names=("output", "input"))
        case "alltoall":
            x, out = _only(call, "ins"), _only(call, "outs")
            split, cat = wrapped_dim(call, call.split, x), wrapped_dim(call, call.cat, x)
            if x.dim() == 0 or x.shape[split] % num:
                raise _refuse(
                    call,
                    f"dim {split} cannot be split into {num} equal chunks",
                    expected=f"a multiple of {num}",
                    got=list(x.shape),
                    cure=f"pad dim {split} to a multiple of {num}, or use alltoallv",
                )
            part = list(x.shape)
            part[split] //= num
            expected = scaled(part, cat, num)
            if x.dtype != out.dtype or tuple(out.shape) != expected:
                want = f"{x.dtype} {list(expected)}"
                raise _refuse(call, "the output does not hold what is received", expected=want, got=f"{out.dtype} {list(out.shape)}")
        case "alltoallv":
            x, out = _only(call, "ins"), _only(call, "outs")
            if x.dtype != out.dtype or x.shape[1:] != out.shape[1:]:
                raise _refuse(call, "input and output may differ in dim 0 only", expected=show_type(x), got=show_type(out))
            _check_counts(call, "send_counts", call.send_counts, x)
            _check_counts(call, "recv_counts", call.recv_counts, out)
