"""A segment ready to run: plans for the shapes it has met, and the kernels that they share.

What a plan depends on is read from the tensors (sizes, strides, which outputs lie on which inputs); a new combination is planned, and
compiled only when its text is new. The number of kernels is bounded by the few classes in which sizes come.
"""

from __future__ import annotations

import linecache
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hostir.graph.fusion import Fusion, TensorView
from hostir.kernels import jit, launch
from hostir.kernels.layout import Layout
from hostir.kernels.lower import structural
from hostir.kernels.plan import Plan, Shape, make
from hostir.kernels.source import Source
from hostir.kernels.tiling import Target


def layout_of(t: torch.Tensor) -> Layout:
    """The layout of a tensor, counted from its first element; a dim of one element has no stride."""
    return Layout(tuple(t.shape), tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan with its kernels, loaded on ``device``; under the interpreter they are functions."""

    plan: Plan
    device: torch.device
    kernels: tuple[Any, ...]


class Segment:
    """One fusion as kernels. Thread-safe; ``num_kernels`` counts the distinct kernels that were made. ``target`` overrides what code is
    generated for."""

    def __init__(self, fusion: Fusion, name: str | None = None, target: Target | None = None) -> None:
        self.fusion = fusion
        self.name = name
        self.target = target
        self.structural = tuple(sorted(structural(fusion)))
        self.tight = all(isinstance(d, int) for p in fusion.params if isinstance(p, TensorView) for d in p.known.dims)
        self._functions: dict[str, Any] = {}
        self._kernels: dict[Hashable, launch.Loaded] = {}
        self._lock = threading.RLock()

    @property
    def num_kernels(self) -> int:
        return len(self._functions) if jit.INTERPRETED else len(self._kernels)

    @property
    def loaded(self) -> list[launch.Loaded]:
        """The kernels on devices."""
        return list(self._kernels.values())

    def prepare(
        self,
        args: Sequence[Any],
        outs: Sequence[torch.Tensor | None],
        same: frozenset[tuple[int, int]],
        some: frozenset[tuple[int, int]],
        device: torch.device,
    ) -> Prepared:
        """Plan and compile for these arguments and outputs (None: a fresh one). ``same``, ``some``: see ``plan.Shape``."""
        inputs = tuple(layout_of(a) if isinstance(a, torch.Tensor) else None for a in args)
        given = tuple(None if o is None else layout_of(o) for o in outs)
        shape = Shape(inputs, given, same, some, tuple((i, args[i]) for i in self.structural))
        target = self.target or Target(jit.INTERPRETED, self.tight, num_sms(device))
        plan = make(self.fusion, shape, target, self.name)
        aligned = {b: t.data_ptr() % 16 for b, t in enumerate((*args, *outs)) if isinstance(t, torch.Tensor)}
        with self._lock:
            kernels = tuple(self._function(s) if jit.INTERPRETED else self._kernel(s, aligned, device) for s in plan.sources)
        return Prepared(plan, device, kernels)

    def _function(self, source: Source) -> Any:
        """The Triton function of a text, which goes when the segment goes."""
        if (found := self._functions.get(source.text)) is None:
            found = self._functions[source.text] = jit.function(source, self)
            weakref.finalize(self, linecache.cache.pop, jit.file_of(source, self), None)
        return found

    def _kernel(self, source: Source, aligned: dict[int, int], device: torch.device) -> launch.Loaded:
        """The loaded kernel; fresh tensors and temporaries begin at multiples of 16 bytes."""
        index = device.index or 0
        flags = jit.alignment(source, aligned)
        key = (source.text, source.num_warps, source.wide, flags, index)
        if (found := self._kernels.get(key)) is None:
            found = self._kernels[key] = launch.Loaded(self._function(source), source, flags, index)
        return found


def num_sms(device: torch.device) -> int:
    """How many programs a device runs at once, about."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
