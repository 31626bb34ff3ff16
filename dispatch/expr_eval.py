"""Evaluation by ATen: views of inputs, library calls, and everything on a device that has no Triton target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch

from hostir.dispatch.evaluate import Evaluator, evaluator
from hostir.dispatch.marking import is_view_of_input
from hostir.dispatch.protocol import Executor, No, all_or_none
from hostir.graph.fusion import Fusion
from hostir.graph.table import TABLE


class ExprEvalExecutor(Executor):
    """Takes a fusion iff every output is a view of an input or is marked for evaluation (``dispatch.marking``)."""

    name: ClassVar[str] = "ExprEvalExecutor"

    @classmethod
    def supports(cls, fusion: Any) -> Literal[True] | No:
        if not isinstance(fusion, Fusion):
            return No(f"a {type(fusion).__name__} is no fusion")
        if not fusion.ops:
            return No("nothing to evaluate: a fusion without operations belongs to the KernelExecutor")
        for r in fusion.results:
            if not r.evaluate and (r.alias is not None or not is_view_of_input(r.value)):
                what = "is written in place" if r.alias is not None else "is no view of an input"
                return No(f"output %{r.value.name} {what} and is not marked for evaluation")
        return True

    def _compile(self, fusion: Fusion, args: Sequence[Any] | None) -> None:
        self._evaluator: Evaluator = evaluator(fusion)
        self._num = len(fusion.results)
        self.scheduler = "expr_eval"
        self.num_kernels = sum(1 for op in fusion.ops if (row := TABLE.get(op.name)) is None or not row.view)

    @property
    def evaluator(self) -> Evaluator:
        """How each result is computed: for ``explain`` and for inlining into generated host code."""
        return self._evaluator

    def _run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        return self._evaluator.run(args, all_or_none(outputs, self._num, self.name))
