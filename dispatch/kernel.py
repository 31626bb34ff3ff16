"""Device segments as generated Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Literal

import torch

from hostir.dispatch.aliasing import overlap
from hostir.dispatch.evaluate import Evaluator, evaluator
from hostir.dispatch.protocol import Executor, No, all_or_none
from hostir.errors import InputError
from hostir.graph.fusion import Fusion, TensorView
from hostir.torch_types import to_torch
from hostir.types import Var

Pairs = frozenset[tuple[int, int]]


class KernelExecutor(Executor):
    """Generates Triton kernels for a fusion. One without operations belongs here too and launches nothing."""

    name: ClassVar[str] = "KernelExecutor"

    @classmethod
    def supports(cls, fusion: Any) -> Literal[True] | No:
        if not isinstance(fusion, Fusion):
            return No(f"a {type(fusion).__name__} is no fusion")
        if not fusion.ops:
            return True
        from hostir.kernels.lower import why_not

        why = why_not(fusion)
        return True if why is None else No(why)

    def _compile(self, fusion: Fusion, args: Sequence[Any] | None) -> None:
        self.graph = fusion
        self._num = len(fusion.results)
        self._in_place = [None if r.alias is None else fusion.params.index(r.alias) for r in fusion.results]
        self._check: Evaluator = evaluator(fusion)
        if not fusion.ops:
            self._sources = [fusion.params.index(r.value) for r in fusion.results]
            return
        from hostir.kernels.segment import Segment

        symbolic = [p for p in fusion.params if isinstance(p, TensorView) and not all(isinstance(d, int) for d in p.known.dims)]
        if symbolic and args is None:
            raise InputError(
                f"{fusion.name} has symbolic sizes (%{symbolic[0].name}: {symbolic[0].type}), and kernels are made for sizes",
                cure="ex.compile(fusion, args) with example arguments",
            )
        self.segment = Segment(fusion)
        self._checked: dict[Hashable, bool] = {}
        if args is not None:
            self._prepare(args, [None] * self._num)

    # ---- running

    def _run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        given = all_or_none(outputs, self._num, self.name)
        if not self.graph.ops:
            return self._pass_on(args, given)
        outs: list[torch.Tensor | None] = list(given) if given is not None else [None if at is None else args[at] for at in self._in_place]
        args, prepared = self._prepare(args, outs)
        results, buffers, copies = self._places(prepared, args, outs)
        prepared.bind(buffers, self.segment.numbers(args))(None)
        for out, temporary in copies:
            out.copy_(temporary)
        return results

    def bind(self, args: Sequence[Any], outs: Sequence[torch.Tensor] | None = None) -> Callable[..., None]:
        """A function that runs this segment on these very tensors, with addresses, temporaries and numbers bound: for programs whose
        buffers stay where they are. Called with numbers (one for each scalar parameter, in order) it uses those instead.
        """
        places = list(all_or_none(outs, self._num, self.name) or [])
        if not self.graph.ops:
            return lambda *_: self._pass_on(args, places) and None
        given: list[torch.Tensor | None] = list(places) if places else [None if at is None else args[at] for at in self._in_place]
        held, prepared = self._prepare(args, given)
        _, buffers, copies = self._places(prepared, held, given)
        launch = prepared.bind(buffers, self.segment.numbers(held))
        scalars = [i for i, p in enumerate(self.graph.params) if isinstance(p, Var)]

        def run(*numbers: Any) -> None:
            if numbers:
                now = list(held)
                for i, v in zip(scalars, numbers, strict=True):
                    now[i] = v
                launch(self.segment.numbers(now))
            else:
                launch(None)
            for out, temporary in copies:
                out.copy_(temporary)

        return run

    def _pass_on(self, args: Sequence[Any], given: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        results: list[torch.Tensor] = [args[i] for i in self._sources]
        if not given:
            return results
        held = [r if r is o else r.clone() for r, o in zip(results, given, strict=True)]
        for o, r in zip(given, held, strict=True):
            if o is not r:
                o.copy_(r)
        return list(given)

    # ---- what is where

    def _prepare(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> tuple[Sequence[Any], Any]:
        self._check.check(args, outs)
        device = self._device(args, outs)
        args = [a.to(device) if isinstance(a, torch.Tensor) and a.device != device else a for a in args]
        same: set[tuple[int, int]] = set()
        some: set[tuple[int, int]] = set()
        for j, o in enumerate(outs):
            if o is not None:
                for i, a in enumerate(args):
                    if isinstance(a, torch.Tensor) and (how := overlap(a, o)) != "no":
                        (same if how == "same" else some).add((j, i))
        return args, self.segment.prepare(args, outs, frozenset(same), frozenset(some), device)

    def _device(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> torch.device:
        """The device of the tensors, which all must lie there; 0-d ones on the CPU count as numbers."""
        named = [(f"argument {i} (%{p.name})", a) for i, (p, a) in enumerate(zip(self.graph.params, args, strict=True))]
        named += [(f"output {j}", o) for j, o in enumerate(outs) if o is not None]
        tensors = [(who, t) for who, t in named if isinstance(t, torch.Tensor)]
        first = next(((who, t) for who, t in tensors if t.dim() > 0 or t.device.type != "cpu"), tensors[0] if tensors else None)
        if first is None:
            return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        for who, t in tensors:
            if t.device != first[1].device and not (t.device.type == "cpu" and t.dim() == 0 and who.startswith("argument")):
                raise InputError(f"{who} of {self.graph.name} lies on another device", expected=f"{first[1].device} (as {first[0]})", got=t.device)
        return first[1].device

    def _places(
        self, prepared: Any, args: Sequence[Any], outs: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The results, the tensor of each buffer, and what is to be copied afterwards."""
        plan = prepared.plan
        buffers: dict[int, torch.Tensor] = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        results: dict[int, torch.Tensor] = {j: o for j, o in enumerate(outs) if o is not None}
        for j, sizes in plan.fresh.items():
            results[j] = torch.empty(sizes, dtype=to_torch(self.graph.results[j].value.known.dtype), device=prepared.device)
        for j, i, layout in plan.views:
            a = args[i]
            results[j] = (
                a
                if layout.sizes == tuple(a.shape) and not layout.offset and self.graph.results[j].value is self.graph.params[i]
                else a.as_strided(layout.sizes, layout.strides, a.storage_offset() + layout.offset)
            )
        copies = []
        for j, t in results.items():
            buffers[len(args) + j] = t
            if j in plan.copies:
                buffers[len(args) + j] = temporary = torch.empty(t.shape, dtype=t.dtype, device=t.device)
                copies.append((t, temporary))
        return [results[j] for j in range(self._num)], buffers | prepared.temporaries(), copies
