"""Choosing an executor: HostIr, then ExprEval, then Kernel; the first that accepts wins and every refusal is kept.

Nothing is global: a dispatch is a tuple of executor classes, and ``with_executor`` gives a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostir.dispatch.expr_eval import ExprEvalExecutor
from hostir.dispatch.kernel import KernelExecutor
from hostir.dispatch.marking import marked
from hostir.dispatch.protocol import Executor, Ids
from hostir.errors import BuildError, UnsupportedError
from hostir.graph.fusion import Fusion


class _OnClassOrInstance:
    """A method that, called on the class, acts on ``ExecutorDispatch.default()``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[..., Any]:
        held = instance if instance is not None else owner.default()
        return lambda *args, **kwargs: self._function(held, *args, **kwargs)


@dataclass(frozen=True)
class ExecutorDispatch:
    """An ordered list of executor classes."""

    executors: tuple[type[Executor], ...]

    @staticmethod
    def default() -> ExecutorDispatch:
        from hostir.dispatch.host_ir import HostIrExecutor

        return ExecutorDispatch((HostIrExecutor, ExprEvalExecutor, KernelExecutor))

    def with_executor(self, executor: type[Executor], *, before: str | None = None) -> ExecutorDispatch:
        """A dispatch that also asks ``executor``, before the one named (default: last)."""
        names = [e.name for e in self.executors]
        if before is not None and before not in names:
            raise BuildError(f"there is no executor {before!r} to stand before", expected=", ".join(names), got=before)
        at = len(names) if before is None else names.index(before)
        return ExecutorDispatch((*self.executors[:at], executor, *self.executors[at:]))

    def _pick(self, fusion: Any, device: str | torch.device | None = None) -> tuple[type[Executor], Any, dict[str, str]]:
        """The executor class, the fusion as marked for the device, and who refused before it. What no executor takes as it is marked
        is evaluated as a whole, by the first that takes it so."""
        where = str(device) if device is not None else _default_device()
        refusals: dict[str, str] = {}
        for ready in (marked(fusion, where), marked(fusion, None)) if isinstance(fusion, Fusion) else (fusion,):
            for e in self.executors:
                answer = e.supports(ready)
                if answer:
                    return e, ready, {k: v for k, v in refusals.items() if k != e.name}
                refusals.setdefault(e.name, answer.why)
        raise UnsupportedError(f"no executor takes {getattr(fusion, 'name', fusion)!s}", refusals=refusals, statement=str(fusion).splitlines()[0])

    def _make(self, fusion: Any, ids: Ids | None = None, device: str | torch.device | None = None) -> Executor:
        """The executor for ``fusion``, not compiled yet. UnsupportedError lists each refusal; a mix of communication and compute
        is a MixedFusionError."""
        cls, ready, refusals = self._pick(fusion, device)
        made = cls(ids)
        made.refusals = refusals
        made.fusion = ready
        return made

    pick = _OnClassOrInstance(_pick)
    make = _OnClassOrInstance(_make)

    @staticmethod
    def compile(executor: Executor, fusion: Any = None, args: Sequence[Any] | None = None) -> Executor:
        return executor.compile(executor.fusion if fusion is None else fusion, args)

    @staticmethod
    def is_compiled(executor: Executor | None) -> bool:
        """False for None."""
        return executor is not None and executor.is_compiled

    @staticmethod
    def run(executor: Executor, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        return executor.run(args, outputs)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
