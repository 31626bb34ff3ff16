"""A segment ready to run: plans for the shapes it has met, the kernels that they share, and the launches with everything bound.

What a plan depends on is read from the tensors at each run (sizes, strides, alignment, which outputs lie on which inputs) and looked up;
a new combination is planned, and compiled only when its text is new. The number of plans kept is bounded; the number of kernels is bounded
by the few classes in which sizes come.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from hostir.graph.fusion import Fusion, TensorView
from hostir.kernels import jit, launch
from hostir.kernels.layout import Layout
from hostir.kernels.lower import structural
from hostir.kernels.plan import Plan, Shape, make
from hostir.kernels.source import Pointer, Source
from hostir.kernels.tiling import Target
from hostir.torch_types import to_torch
from hostir.types import Leaf, Sym, Var, evaluate

Numbers = Callable[[Any], Any]
MAX_PLANS: Final = 256


def layout_of(t: torch.Tensor) -> Layout:
    """The layout of a tensor, counted from its first element."""
    return Layout(tuple(t.shape), tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)))


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a plan: where each pointer comes from (buffer, bytes from its beginning), and the kernel."""

    source: Source
    pointers: tuple[tuple[int, int], ...]


class Prepared:
    """A plan on a device. ``run`` takes tensors by buffer number and launches."""

    def __init__(self, segment: Segment, plan: Plan, device: torch.device, aligned: Sequence[int]) -> None:
        self.plan = plan
        self.device = device
        self.segment = segment
        self.steps = [Step(s, tuple((a.buffer, a.offset * a.dtype.itemsize) for a in s.arguments if isinstance(a, Pointer))) for s in plan.sources]
        self.kernels: list[launch.Launch] = []
        if not jit.INTERPRETED and plan.sources:
            rest = dict(enumerate(aligned))
            self.kernels = [segment.kernel(s, jit.alignment(s, rest), device) for s in plan.sources]

    def temporaries(self) -> dict[int, torch.Tensor]:
        """Fresh temporaries, by buffer number."""
        return {t.buffer: torch.empty(t.layout.sizes, dtype=to_torch(t.dtype), device=self.device) for t in self.plan.temporaries}

    def bind(self, buffers: dict[int, torch.Tensor], numbers: Numbers) -> Callable[[Numbers | None], None]:
        """A function that launches everything on these tensors; called with other numbers it uses those."""
        if jit.INTERPRETED:
            return self._bind_interpreted(buffers, numbers)
        index = self.device.index or 0
        calls = []
        for step, kernel in zip(self.steps, self.kernels, strict=True):
            addresses = iter([buffers[b].data_ptr() + at for b, at in step.pointers])
            calls.append((kernel, step.source, list(addresses)))
        fixed = [(kernel, _merged(source, addresses, launch.numbers_of(source, numbers))) for kernel, source, addresses in calls]
        stream_of = launch.current_stream

        def run(others: Numbers | None = None) -> None:
            stream = stream_of(index)
            if others is None:
                for kernel, arguments in fixed:
                    kernel(stream, *arguments)
            else:
                for kernel, source, addresses in calls:
                    kernel(stream, *_merged(source, addresses, launch.numbers_of(source, others)))

        return run

    def _bind_interpreted(self, buffers: dict[int, torch.Tensor], numbers: Numbers) -> Callable[[Numbers | None], None]:
        calls = []
        for step in self.steps:
            tensors = []
            for b, at in step.pointers:
                t = buffers[b]
                tensors.append(t.as_strided((1,), (1,), t.storage_offset() + at // t.element_size()))
            calls.append((step.source, tensors))

        def run(others: Numbers | None = None) -> None:
            for source, tensors in calls:
                launch.interpret(source, tensors, launch.numbers_of(source, others or numbers))

        return run


def _merged(source: Source, addresses: Sequence[int], numbers: Sequence[Any]) -> list[Any]:
    left, rest = iter(addresses), iter(numbers)
    return [next(left) if isinstance(a, Pointer) else next(rest) for a in source.arguments]


class Segment:
    """One fusion as kernels. Thread-safe; ``num_kernels`` counts the distinct kernels that were made."""

    def __init__(self, fusion: Fusion, name: str | None = None) -> None:
        self.fusion = fusion
        self.name = name
        self.structural = structural(fusion)
        self.symbols = self._symbols()
        self.tight = not any(not isinstance(d, int) for p in fusion.params if isinstance(p, TensorView) for d in p.known.dims)
        self._plans: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._kernels: dict[Hashable, launch.Loaded] = {}
        self._texts: set[str] = set()
        self._lock = threading.RLock()

    @property
    def num_kernels(self) -> int:
        return len(self._texts) if jit.INTERPRETED else len(self._kernels)

    def _symbols(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for i, p in enumerate(self.fusion.params):
            if isinstance(p, TensorView):
                for d, size in enumerate(p.known.dims):
                    if isinstance(size, Sym):
                        found.setdefault(size.name, (i, d))
        return found

    def numbers(self, args: Sequence[Any]) -> Numbers:
        """The value of host numbers at these arguments."""
        where = {id(p): i for i, p in enumerate(self.fusion.params) if isinstance(p, Var)}

        def env(leaf: Leaf) -> Any:
            if isinstance(leaf, Sym):
                i, d = self.symbols[leaf.name]
                return args[i].shape[d]
            return args[where[id(leaf)]]

        return lambda v: evaluate(v, env)

    def kernel(self, source: Source, aligned: tuple[bool, ...], device: torch.device) -> launch.Launch:
        """The loaded kernel, launched over the source's programs."""
        index = device.index or 0
        key = (source.text, source.num_warps, aligned, index)
        with self._lock:
            if (found := self._kernels.get(key)) is None:
                found = self._kernels[key] = launch.Loaded(source, aligned, index)
        return found.for_programs(source.programs)

    def prepare(
        self,
        args: Sequence[Any],
        outs: Sequence[torch.Tensor | None],
        same: frozenset[tuple[int, int]],
        some: frozenset[tuple[int, int]],
        device: torch.device,
    ) -> Prepared:
        """The plan for these arguments and outputs (None: a fresh one). ``same``, ``some``: see ``plan.Shape``."""
        inputs = tuple(layout_of(a) if isinstance(a, torch.Tensor) else None for a in args)
        given = tuple(None if o is None else layout_of(o) for o in outs)
        scalars = tuple((i, args[i]) for i in sorted(self.structural))
        aligned = tuple(t.data_ptr() % 16 if isinstance(t, torch.Tensor) else 0 for t in (*args, *outs))
        shape = Shape(inputs, given, same, some, scalars)
        key = (shape, aligned, device)
        with self._lock:
            if (found := self._plans.get(key)) is not None:
                self._plans.move_to_end(key)
                return found
            plan = make(self.fusion, shape, Target(jit.INTERPRETED, self.tight, _num_sms(device)), self.name)
            self._texts.update(s.text for s in plan.sources)
            found = self._plans[key] = Prepared(self, plan, device, (*aligned, *(0 for _ in plan.temporaries)))
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
            return found


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
