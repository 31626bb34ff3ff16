"""A fusion with an executor for every kind of input that it meets: the thing a user holds when shapes change from call to call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hostir.dispatch.dispatch import ExecutorDispatch
from hostir.dispatch.protocol import Executor, Ids
from hostir.errors import InputError
from hostir.graph.fusion import Fusion, TensorView
from hostir.passes.sizes import local_type
from hostir.types import Sym

MAX_IDS: Final = 100
_ANY_SIZE: Final = "a fusion with hir.sym sizes takes any"


@dataclass(slots=True)
class CacheStats:
    """``hits``: the inputs' id was known. ``reused``: new sizes, an executor that was there served them. ``runtimes``: an executor was
    compiled. ``evicted``: ids that the LRU dropped."""

    hits: int = 0
    reused: int = 0
    runtimes: int = 0
    evicted: int = 0


class FusionExecutorCache:
    """``cache.run(*tensors)`` runs the fusion and returns the list of its visible results.

    Inputs are identified by sizes, strides, dtypes and device (an LRU of 100 ids); executors are shared by all inputs of one device
    and dtype whose constant sizes agree.
    """

    def __init__(self, fusion: Fusion, dispatch: ExecutorDispatch | None = None, *, fusion_id: int = 0) -> None:
        self.fusion = fusion
        self.stats = CacheStats()
        self._dispatch = dispatch or ExecutorDispatch.default()
        self._fusion_id = fusion_id
        self._ids: OrderedDict[Hashable, Executor] = OrderedDict()
        self._executors: dict[Hashable, Executor] = {}

    def run(self, *args: Any) -> list[torch.Tensor]:
        """Run on tensors (and host numbers, where the fusion has scalar inputs)."""
        return self.executor(args).run(args)

    def executor(self, args: Sequence[Any]) -> Executor:
        """The compiled executor for these arguments."""
        key = tuple(self._id(a) for a in args)
        if (found := self._ids.get(key)) is not None:
            self._ids.move_to_end(key)
            self.stats.hits += 1
            return found
        self._check(args)
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
        found = self._executors.get(device)
        if found is None:
            ids = Ids(fusion=self._fusion_id, runtime=len(self._executors))
            found = self._dispatch.make(self.fusion, ids=ids, device=device)
            found.compile(found.fusion, args)
            self._executors[device] = found
            self.stats.runtimes += 1
        else:
            self.stats.reused += 1
        self._ids[key] = found
        if len(self._ids) > MAX_IDS:
            self._ids.popitem(last=False)
            self.stats.evicted += 1
        return found

    @staticmethod
    def _id(a: Any) -> Hashable:
        return (a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else (type(a), a)

    def _check(self, args: Sequence[Any]) -> None:
        """Dtypes, dimensions and constant sizes against the fusion's inputs."""
        params = self.fusion.params
        if len(args) != len(params):
            raise InputError(f"the fusion {self.fusion.name} takes {len(params)} arguments", got=len(args))
        for i, (p, a) in enumerate(zip(params, args, strict=True)):
            if not isinstance(p, TensorView):
                continue
            want = local_type(p)
            if not isinstance(a, torch.Tensor):
                raise InputError(f"argument {i + 1} (%{p.name}) is no tensor", expected=want, got=type(a).__name__)
            sizes = zip(want.dims, a.shape, strict=False)
            fits = len(want.dims) == a.dim() and all(d == n for d, n in sizes if isinstance(d, int))
            if str(a.dtype) != f"torch.{want.dtype.torch_name}" or not fits:
                raise InputError(
                    f"argument {i + 1} (%{p.name}) of the fusion {self.fusion.name} has another type", expected=want,
                    got=f"{a.dtype} {list(a.shape)}", cure=None if any(isinstance(d, Sym) for d in want.dims) else _ANY_SIZE,
                )  # fmt: skip
