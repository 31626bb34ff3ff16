"""Mode ``graph``: the compiled function captured as a CUDA graph, replayed when the same tensors come again.

The first run of a set of tensors executes the function (which warms up whatever torch makes lazily), the second one captures it and
replays. A capture is tied to addresses and to host scalars; another shape is another plan. Fresh outputs are copies of the graph's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hostir.dispatch.binding import Binding
from hostir.dispatch.bound import Bound
from hostir.dispatch.compiled import CompiledProgram
from hostir.dispatch.profiled import NO_PROBE
from hostir.errors import InputError
from hostir.ir.nodes import Comm, Program, every

CAPTURABLE = ("nccl",)


def why_not(p: Program, device: torch.device, backend: str | None) -> str | None:
    """Why ``p`` cannot be captured here, or None."""
    if device.type != "cuda":
        return f"CUDA graphs need a CUDA device, and the program runs on {device}"
    if backend == "threads":
        return "ranks that are threads of one process cannot capture at the same time"
    messages = any(isinstance(s, Comm) and s.kind != "copy" for s in every(p.body))
    if messages and backend == "symm":
        return "flags of symmetric memory count upwards with every run, which a replayed graph would not"
    if messages and backend is not None and backend not in CAPTURABLE:
        return f"communication over {backend} passes through the host, which a graph cannot replay"
    return None


class GraphedProgram(CompiledProgram):
    """A CompiledProgram whose runs are replays. Its outputs live in the graph; callers that want fresh ones get copies."""

    copies_outputs = True

    def __init__(self, *args: object, static_outputs: bool = False, **kwargs: object) -> None:
        super().__init__(*args, static_outputs=True, **kwargs)  # type: ignore[arg-type]
        self.copies_outputs = not static_outputs
        self._outs = {id(t) for t in self._static or ()}

    def run(self, binding: Binding, outputs: Sequence[torch.Tensor] | None, epoch: int, marks: Sequence[object] = ()) -> list[torch.Tensor]:
        results = super().run(binding, outputs, epoch, marks)  # type: ignore[arg-type]
        if outputs is not None or not self.copies_outputs:
            return results
        return [r if root in self.flat.inputs else r.clone() for r, root in zip(results, (x.root for x in self.flat.results), strict=True)]

    def replayer(self, bound: Bound, scalars: Sequence[object]) -> Callable[[], None] | None:
        graph = bound.graphs.get(tuple(scalars))
        return None if graph is None else graph.replay

    def execute(self, bound: Bound, fresh: Sequence[torch.Tensor], scalars: Sequence[object], epoch: int) -> None:
        if self.probe is not NO_PROBE:  # marks are made by the function itself: a profiled run is not a replay
            super().execute(bound, fresh, scalars, epoch)
            return
        key = tuple(scalars)
        graph = bound.graphs.get(key)
        if graph is None and key not in bound.seen:
            bound.seen.add(key)
            super().execute(bound, fresh, scalars, epoch)
            return
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                super().execute(bound, fresh, scalars, epoch)
            bound.graphs[key] = graph
        graph.replay()


def refuse(p: Program, why: str) -> InputError:
    return InputError(f"mode graph is not possible: {why}", program=p.name, cure='mode="compiled", or mode="auto" to take what is possible')
