"""Device segments as generated Triton kernels.

Each run looks up what it can rely on (dtypes, sizes, strides, alignment, which outputs lie on which inputs) and finds a function that
was generated for exactly that; the first time, arguments are checked and the function is made.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch

from hostir.dispatch.aliasing import extent, overlap
from hostir.dispatch.evaluate import Evaluator, evaluator
from hostir.dispatch.protocol import Executor, Ids, No, all_or_none
from hostir.errors import InputError, UnsupportedError
from hostir.graph.fusion import Fusion, TensorView
from hostir.runtime.profile import active_profile

if TYPE_CHECKING:
    from hostir.kernels.runner import Runner
    from hostir.kernels.segment import Prepared, Segment
    from hostir.kernels.tiling import Target

MAX_ENTRIES: Final = 256


class KernelExecutor(Executor):
    """Generates Triton kernels for a fusion. One without operations belongs here too and launches nothing."""

    name: ClassVar[str] = "KernelExecutor"

    def __init__(self, ids: Ids | None = None, *, target: Target | None = None) -> None:
        super().__init__(ids)
        self.target = target  # what code is generated for, when it is not the tensors' device as it is

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
        self._in_place_at = [(j, at) for j, at in enumerate(self._in_place) if at is not None]
        self._plain = not any(r.hidden or r.alias is not None for r in fusion.results)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        if not fusion.ops:
            self._sources = [fusion.params.index(r.value) for r in fusion.results]
            return
        from hostir.kernels.segment import Segment

        if not (answer := self.supports(fusion)):
            raise UnsupportedError(f"no kernel can be generated for {fusion.name}", refusals={self.name: answer.why})
        symbolic = [p for p in fusion.params if isinstance(p, TensorView) and not all(isinstance(d, int) for d in p.known.dims)]
        if symbolic and args is None:
            raise InputError(
                f"{fusion.name} has symbolic sizes (%{symbolic[0].name}: {symbolic[0].type}), and kernels are made for sizes",
                cure="ex.compile(fusion, args) with example arguments",
            )
        self._check: Evaluator = evaluator(fusion)
        self.segment: Segment = Segment(fusion, target=self.target)
        self._structural = self.segment.structural
        if args is not None:
            outs = [None if at is None else args[at] for at in self._in_place]
            spent = self.compile_ms
            self._entry(args, outs).variant(args, outs)
            self.compile_ms = spent  # the caller measures this call

    # ---- running

    def run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        if self._compiled and self._plain and (outputs is None or len(outputs) == self._num) and active_profile() is None:
            return self._run(args, outputs)
        return super().run(args, outputs)

    def _run(self, args: Sequence[Any], outputs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        outs: Sequence[torch.Tensor | None]
        if outputs:
            outs = all_or_none(outputs, self._num, self.name) or ()
        else:
            outs = [None] * self._num
            for j, at in self._in_place_at:
                outs[j] = args[at]
        if not self.graph.ops:
            return self._pass_on(args, outs)
        return self._entry(args, outs).variant(args, outs).run(args, outs)

    def prepare(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> None:
        """Make the function for tensors like these, without running it."""
        if self.graph.ops:
            self._entry(args, outs).variant(args, outs)

    def bind(self, args: Sequence[Any], outs: Sequence[torch.Tensor] | None = None) -> Callable[..., None]:
        """A function that runs this segment on these very tensors, with addresses, temporaries and numbers bound: for programs whose
        buffers stay where they are. ``outs``: one for each result (left out: results with an alias lie there, others are made now and
        kept). It takes the scalar parameters, in order, and by default uses those of ``args``.
        """
        places = list(all_or_none(outs, self._num, self.name) or [None if at is None else args[at] for at in self._in_place])
        if not self.graph.ops:

            def pass_on() -> None:
                self._pass_on(args, places)

            return pass_on
        variant = self._entry(args, places).variant(args, places)
        given = [o for o in places if o is not None]
        if len(given) < len(places):
            return self.bind(args, variant.run(args, places))
        from hostir.kernels.runner import bound

        p = variant.prepared
        held = [a.to(p.device) if i in variant.moved else a for i, a in enumerate(args)]
        return bound(self.graph, p.plan, p.device, p.kernels, held, given)

    def _pass_on(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The segment that computes nothing: inputs are results."""
        values = [args[i] for i in self._sources]
        held = [v if o is None or v is o else v.clone() for v, o in zip(values, outs, strict=True)]
        return [v if o is None or v is o else o.copy_(v) for v, o in zip(held, outs, strict=True)]

    # ---- what is known of arguments

    def _entry(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> _Entry:
        """Everything that hangs on dtypes, sizes, strides, alignment and devices. The lookup is the whole check of a later run."""
        key: list[Any] = []
        for t in args:
            if isinstance(t, torch.Tensor):
                key += (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)
            else:
                key.append(type(t))
        for o in outs:
            if o is not None:
                key += (o.shape, o.stride(), o.dtype, o.device, o.data_ptr() & 15)
            else:
                key.append(None)
        key += [args[i] for i in self._structural if i < len(args)]
        found = self._entries.get(k := tuple(key))
        if found is None:
            self._check.check(args, outs)
            found = _Entry(self, args, outs, self._device(args, outs))
            with self._lock:
                self._entries[k] = found
                while len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
        return found

    def _device(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> torch.device:
        """The device of the tensors, which all must lie there; 0-d arguments on the CPU are brought over."""
        named = [(f"argument {i} (%{p.name})", a) for i, (p, a) in enumerate(zip(self.graph.params, args, strict=True))]
        named += [(f"output {j}", o) for j, o in enumerate(outs) if o is not None]
        tensors = [(who, t) for who, t in named if isinstance(t, torch.Tensor)]
        first = next(((who, t) for who, t in tensors if t.dim() > 0 or t.device.type != "cpu"), tensors[0] if tensors else None)
        if first is None:
            return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        for who, t in tensors:
            if t.device != first[1].device and not (t.device.type == "cpu" and t.dim() == 0 and who.startswith("argument")):
                raise InputError(
                    f"{who} of {self.graph.name} lies on another device than {first[0]}", expected=first[1].device, got=t.device, cure="move it there"
                )
        return first[1].device


class _Entry:
    """What hangs on everything but addresses; ``variant`` finds the function for how outputs lie on inputs."""

    def __init__(self, ex: KernelExecutor, args: Sequence[Any], outs: Sequence[torch.Tensor | None], device: torch.device) -> None:
        self.ex = ex
        self.device = device
        self.moved = frozenset(i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.device != device)
        self.variants: dict[frozenset[tuple[int, int, bool]], _Variant] = {}
        # (position, bytes that it spans) of each tensor that shares the device; an empty one touches nothing
        self.inputs = [(i, n) for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in self.moved and (n := _span(a))]
        self.outs = [(j, n) for j, o in enumerate(outs) if o is not None and (n := _span(o))]

    def variant(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> _Variant:
        touching: list[tuple[int, int, bool]] = []
        if self.outs:
            placed = [(i, args[i].data_ptr(), n) for i, n in self.inputs]
            for j, n in self.outs:
                start = outs[j].data_ptr()  # type: ignore[union-attr]
                for i, at, size in placed:
                    if at < start + n and start < at + size and (how := overlap(args[i], outs[j])) != "no":  # type: ignore[arg-type]
                        touching.append((j, i, how == "same"))
            if len(self.outs) > 1:
                self._apart(args, outs)
        key = frozenset(touching)
        if (found := self.variants.get(key)) is None:
            start = time.perf_counter_ns()
            found = self.variants[key] = _Variant(self, args, outs, key)
            self.ex.compile_ms += (time.perf_counter_ns() - start) / 1e6
        return found

    def _apart(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> None:
        spans = sorted((outs[j].data_ptr(), n) for j, n in self.outs)  # type: ignore[union-attr]
        if any(a + n > b for (a, n), (b, _) in pairwise(spans)):
            self.ex._check.check(args, outs)


class _Variant:
    """A function for one way in which outputs lie on inputs."""

    def __init__(self, entry: _Entry, args: Sequence[Any], outs: Sequence[torch.Tensor | None], touching: frozenset[tuple[int, int, bool]]) -> None:
        from hostir.kernels.runner import runner

        ex = entry.ex
        self.moved = entry.moved
        same = frozenset((j, i) for j, i, s in touching if s)
        some = frozenset((j, i) for j, i, s in touching if not s)
        self.prepared: Prepared = ex.segment.prepare(args, outs, same, some, entry.device)
        p = self.prepared
        ex.num_kernels = len(p.plan.sources)
        ex.scheduler = "+".join(dict.fromkeys(p.plan.schedulers)) or "no_op"
        self.run: Runner = runner(ex.graph, p.plan, p.device, p.kernels, [o is not None for o in outs], entry.moved)


def _span(t: torch.Tensor) -> int:
    """The number of bytes between the first and the last that ``t`` touches."""
    start, end = extent(t)
    return end - start
