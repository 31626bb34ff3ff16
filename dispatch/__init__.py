"""Executors and how one is chosen: the first that accepts a fusion runs it, and every refusal says why."""

from __future__ import annotations

if __name__ != "hostir.dispatch":
    raise ImportError(f"this package is imported as hostir.dispatch, not as {__name__}: a second copy would have its own classes")

from hostir.dispatch.cache import FusionExecutorCache
from hostir.dispatch.dispatch import ExecutorDispatch
from hostir.dispatch.expr_eval import ExprEvalExecutor
from hostir.dispatch.host_ir import HostIrExecutor, compile
from hostir.dispatch.kernel import KernelExecutor
from hostir.dispatch.protocol import Executor, Ids, No

__all__ = [
    "Executor",
    "ExecutorDispatch",
    "ExprEvalExecutor",
    "FusionExecutorCache",
    "HostIrExecutor",
    "Ids",
    "KernelExecutor",
    "No",
    "compile",
]
