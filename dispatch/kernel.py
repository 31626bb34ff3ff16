"""Device segments as Triton kernels. So far it takes the segment that computes nothing, and refuses the rest with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch

from hostir.dispatch.protocol import Executor, No, all_or_none
from hostir.graph.fusion import Fusion


class KernelExecutor(Executor):
    """Generates one Triton kernel for a fusion. A fusion without operations belongs here and launches nothing."""

    name: ClassVar[str] = "KernelExecutor"

    @classmethod
    def supports(cls, fusion: Any) -> Literal[True] | No:
        if not isinstance(fusion, Fusion):
            return No(f"a {type(fusion).__name__} is no fusion")
        if not fusion.ops:
            return True
        return No("no Triton code is generated for operations yet")

    def _compile(self, fusion: Fusion, args: Sequence[Any] | None) -> None:
        self._sources = [fusion.params.index(r.value) for r in fusion.results]

    def _run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        results: list[torch.Tensor] = [args[i] for i in self._sources]
        if (given := all_or_none(outputs, len(results), self.name)) is None:
            return results
        held = [r if r is o else r.clone() for r, o in zip(results, given, strict=True)]
        for o, r in zip(given, held, strict=True):
            if o is not r:
                o.copy_(r)
        return list(given)
