"""What calls and reductions compute when a program is run in another order: nothing that anyone could guess, or the real thing.

``Free`` takes every unit for an unknown function: each output element depends on every bit of every input, so that two runs agree only
where all data came from the same places. ``Real`` evaluates units with ATen on int64. Moving data means the same in both.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hostir.dispatch.evaluate import evaluator
from hostir.graph.show import show_fusion
from hostir.ir.nodes import Buffer, Call, Comm, Unit
from hostir.ir.walk import Step

Array: TypeAlias = npt.NDArray[Any]
Data: TypeAlias = Sequence[Sequence[Array]]  # of each member, what it read
_MASK: Final = 2**64 - 1
_WEIGHTS: Final = np.random.default_rng(7).integers(0, 2**63, 1 << 14, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


class Machine(Protocol):
    """``dtype`` is that of all memory."""

    dtype: npt.DTypeLike

    def initial(self, rank: int, param: int, length: int) -> Array:
        """What an input holds, as uint64 bits."""

    def constant(self, value: float, like: Array | None = None) -> Any:
        """What a buffer is filled with; a flag (no ``like``) with the number itself."""

    def digest(self, arrays: Sequence[Array]) -> int: ...

    def call(self, s: Call, arrays: Sequence[Array], numbers: Sequence[Any], outs: Sequence[Array]) -> list[Array]: ...

    def reduce(self, op: str, parts: Sequence[Array]) -> Array: ...


def digest(arrays: Sequence[Array]) -> int:
    h = 0x9E3779B97F4A7C15
    for a in arrays:
        h = _mixed(h ^ int((a.reshape(-1).view(np.uint64) * _WEIGHTS[: a.size]).sum()))
    return h


def _mixed(h: int) -> int:
    h = h * 0xBF58476D1CE4E5B9 & _MASK
    return h ^ h >> 31


class Free:
    """Every unit is an unknown function of its inputs, every reduction one of its parts in team order."""

    dtype: npt.DTypeLike = np.uint64

    def __init__(self) -> None:
        self._names: dict[int, tuple[object, int]] = {}

    def initial(self, rank: int, param: int, length: int) -> Array:
        return np.arange(length, dtype=np.uint64) + np.uint64((rank * 64 + param + 1) << 32)

    def constant(self, value: float, like: Array | None = None) -> Any:
        if like is None:
            return np.uint64(int(value) & _MASK)
        return (_WEIGHTS[: like.size] * np.uint64(zlib.crc32(repr(float(value)).encode()))).reshape(like.shape)

    def digest(self, arrays: Sequence[Array]) -> int:
        return digest(arrays)

    def call(self, s: Call, arrays: Sequence[Array], numbers: Sequence[Any], outs: Sequence[Array]) -> list[Array]:
        if [op.name for op in s.unit.fusion.ops] == ["full"]:  # how passes fill a buffer
            return [self.constant(s.unit.fusion.ops[0].attr("value"), o) for o in outs]
        h = digest(arrays) ^ self._name(s)
        for x in numbers:
            h = _mixed(h ^ zlib.crc32(repr(x).encode()))
        return [((_WEIGHTS[: o.size] ^ np.uint64(_mixed(h + k))) * np.uint64(0x94D049BB133111EB)).reshape(o.shape) for k, o in enumerate(outs)]

    def _name(self, s: Call) -> int:
        if id(s) not in self._names:
            types = [a.type.dtype.name for a in (*s.args, *s.outs) if isinstance(a, Buffer)]
            self._names[id(s)] = (s, zlib.crc32(f"{show_fusion(s.unit.fusion, name='u')} {types}".encode()))
        return self._names[id(s)][1]

    def reduce(self, op: str, parts: Sequence[Array]) -> Array:
        total = np.full(parts[0].shape, zlib.crc32(op.encode()), np.uint64)
        for part in parts:
            total = (total ^ part) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(1)
        return total


class Real:
    """Units by ATen, for programs whose buffers are all i64. Element i of an input on rank r starts as 1000 (r + 1) + i, plus 100 for
    each input before it."""

    dtype: npt.DTypeLike = np.int64

    def __init__(self) -> None:
        self._made: dict[int, tuple[Unit, Any]] = {}

    def initial(self, rank: int, param: int, length: int) -> Array:
        return (np.arange(length, dtype=np.int64) + 1000 * (rank + 1) + 100 * param).view(np.uint64)

    def constant(self, value: float, like: Array | None = None) -> Any:
        return np.int64(value)

    def digest(self, arrays: Sequence[Array]) -> int:
        return digest(arrays)

    def call(self, s: Call, arrays: Sequence[Array], numbers: Sequence[Any], outs: Sequence[Array]) -> list[Array]:
        if id(s.unit) not in self._made:
            self._made[id(s.unit)] = (s.unit, evaluator(s.unit.fusion))
        tensors, rest = iter(torch.from_numpy(a.copy()) for a in arrays), iter(numbers)
        args = [next(tensors) if isinstance(a, Buffer) else next(rest) for a in s.args]
        return [t.numpy() for t in self._made[id(s.unit)][1].run(args, [torch.empty(o.shape, dtype=torch.int64) for o in outs])]

    def reduce(self, op: str, parts: Sequence[Array]) -> Array:
        ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
        total = parts[0].copy()
        for part in parts[1:]:
            total = ufunc(total, part)
        return total


def moved(machine: Machine, steps: Sequence[Step], at: int) -> Callable[[Data], Array]:
    """What member ``at`` of a collective gets, as a function of what all members have read."""
    step, num = steps[at], len(steps)
    c = step.op
    assert isinstance(c, Comm)
    source = step.source or 0

    def part(x: Array, dim: int, i: int) -> Array:
        return np.split(np.atleast_1d(x), num, axis=dim)[i]

    match c.kind:
        case "allreduce" | "reduce":
            return lambda data: machine.reduce(c.op, [d[0] for d in data])
        case "reduce_scatter":
            return lambda data: machine.reduce(c.op, [part(d[0], c.dim, at) for d in data])
        case "allgather" | "gather":
            return lambda data: np.concatenate([np.atleast_1d(d[0]) for d in data], axis=c.dim)
        case "broadcast" | "permute":
            return lambda data: data[source][0]
        case "scatter":
            return lambda data: part(data[source][0], c.dim, at)
        case "alltoall":
            return lambda data: np.concatenate([part(d[0], c.split, at) for d in data], axis=c.cat)
        case "alltoallv":
            counts = [s.counts[0] for s in steps if s.counts is not None]
            return lambda data: np.concatenate([d[0][sum(n[:at]) : sum(n[: at + 1])] for d, n in zip(data, counts, strict=True)])
    raise AssertionError(c.kind)
