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
MAX_VARIANTS: Final = 64


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
        self._fresh = all(at is None for at in self._in_place)
        self._plain = not any(r.hidden or r.alias is not None for r in fusion.results)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._none: list[torch.Tensor | None] = [None] * self._num
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
        self._key, self._key_fresh = (_key_function(fusion, self.segment.structural, given) for given in (True, False))
        if args is not None:
            outs = [None if at is None else args[at] for at in self._in_place]
            spent = self.compile_ms
            self._variant(args, outs)
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
        elif self._fresh:
            outs = self._none
        else:
            outs = [None if at is None else args[at] for at in self._in_place]
        if not self.graph.ops:
            return self._pass_on(args, outs)
        variant, p, q = self._variant(args, outs)
        return variant.run(args, outs, p, q)

    def prepare(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> None:
        """Make the function for tensors like these, without running it."""
        if self.graph.ops:
            self._variant(args, outs)

    def bind(self, args: Sequence[Any], outs: Sequence[torch.Tensor] | None = None) -> Callable[..., None]:
        """A function that runs this segment on these very tensors, with addresses, temporaries and numbers bound: for programs whose
        buffers stay where they are. ``outs``: one for each result (left out: results with an alias lie there, others are made now and
        kept). It takes the scalar parameters, in order, and by default uses those of ``args``.
        """
        places: list[torch.Tensor | None] = [None if at is None else args[at] for at in self._in_place]
        if outs:
            places = list(all_or_none(outs, self._num, self.name) or ())
        if not self.graph.ops:

            def pass_on() -> None:
                self._pass_on(args, places)

            return pass_on
        variant, at, to = self._variant(args, places)
        given = [o for o in places if o is not None]
        if len(given) < len(places):
            return self.bind(args, variant.run(args, places, at, to))
        from hostir.kernels.runner import bound

        p = variant.prepared
        held = [a.to(p.device) if i in variant.moved else a for i, a in enumerate(args)]
        return bound(self.graph, p.plan, p.device, p.kernels, held, given)

    def _pass_on(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The segment that computes nothing: inputs are results."""
        values: list[torch.Tensor] = [args[i] for i in self._sources]
        held = [v if o is None or v is o else v.clone() for v, o in zip(values, outs, strict=True)]
        return [v if o is None or v is o else o.copy_(v) for v, o in zip(held, outs, strict=True)]

    # ---- what is known of arguments

    def _variant(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> tuple[_Variant, Sequence[int], Sequence[int]]:
        """The function for these arguments and outputs, and the addresses of the tensors among both. Finding it is the whole check of a
        later run."""
        try:
            k, p, q = (self._key_fresh if outs is self._none else self._key)(args, outs)
        except (AttributeError, ValueError, TypeError):  # too few, or no tensor where one belongs
            self._check.check(args, outs)
            raise
        entry = self._entries.get(k)
        if entry is None:
            self._check.check(args, outs)
            entry = _Entry(self, args, outs, self._device(args, outs))
            with self._lock:
                self._entries[k] = entry
                while len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
        return entry.variant(args, outs, p, q), p, q

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
    """What hangs on everything but addresses. How outputs lie on inputs follows from the distances between those that may touch."""

    def __init__(self, ex: KernelExecutor, args: Sequence[Any], outs: Sequence[torch.Tensor | None], device: torch.device) -> None:
        self.ex = ex
        self.device = device
        self.moved = frozenset(i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.device != device)
        tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        # Positions among the addresses, and bytes from the first to the last that each touches; an empty tensor touches nothing.
        ins = [(m, n) for m, (i, a) in enumerate(tensors) if i not in self.moved and (n := _span(a))]
        self.outs = [(j, n) for j, o in enumerate(outs) if o is not None and (n := _span(o))]
        self.pairs = [(x, y, nx, ny) for y, ny in self.outs for x, nx in ins]
        self.variants: dict[tuple[tuple[int, int, int], ...], _Variant] = {}

    def variant(self, args: Sequence[Any], outs: Sequence[torch.Tensor | None], p: Sequence[int], q: Sequence[int]) -> _Variant:
        """The function for these addresses (``p`` of the arguments, ``q`` of the outputs)."""
        near = tuple([(x, y, p[x] - q[y]) for x, y, nx, ny in self.pairs if -nx < p[x] - q[y] < ny])
        if len(self.outs) > 1:
            spans = sorted([(q[y], n) for y, n in self.outs])
            if any(a + n > b for (a, n), (b, _) in pairwise(spans)):
                self.ex._check.check(args, outs)
        if (found := self.variants.get(near)) is None:
            start = time.perf_counter_ns()
            if len(self.variants) >= MAX_VARIANTS:
                self.variants.clear()
            found = self.variants[near] = _Variant(self, args, outs)
            self.ex.compile_ms += (time.perf_counter_ns() - start) / 1e6
        return found


class _Variant:
    """A function for one way in which outputs lie on inputs."""

    def __init__(self, entry: _Entry, args: Sequence[Any], outs: Sequence[torch.Tensor | None]) -> None:
        from hostir.kernels.runner import runner

        ex = entry.ex
        self.moved = entry.moved
        found: dict[str, set[tuple[int, int]]] = {"same": set(), "some": set(), "no": set()}
        for j, o in enumerate(outs):
            for i, a in enumerate(args):
                if o is not None and isinstance(a, torch.Tensor) and i not in self.moved:
                    found[overlap(a, o)].add((j, i))
        same, some = frozenset(found["same"]), frozenset(found["some"])
        self.prepared: Prepared = ex.segment.prepare(args, outs, same, some, entry.device)
        p = self.prepared
        ex.num_kernels = len(p.plan.sources)
        ex.scheduler = "+".join(dict.fromkeys(p.plan.schedulers)) or "no_op"
        self.run: Runner = runner(ex.graph, p.plan, p.device, p.kernels, [o is not None for o in outs], entry.moved)


def _key_function(fusion: Fusion, structural: Sequence[int], given: bool) -> Callable[..., tuple[Hashable, Sequence[int], Sequence[int]]]:
    """A function of arguments and outputs that gives all that a plan and its checks hang on, and the addresses of the tensors in both.
    Written out, because it runs at each call."""
    names = [f"a{i}" for i in range(len(fusion.params))]
    outs = [f"o{j}" for j in range(len(fusion.results))] if given else []
    tensors = [name for name, p in zip(names, fusion.params, strict=True) if isinstance(p, TensorView)]
    parts = [_TENSOR.format(n) if n in tensors else f"type({n})" for n in names] + [names[i] for i in structural]
    parts += [f"({_TENSOR.format(o)}) if {o} is not None else None" for o in outs]
    lines = [f"{', '.join(names)}, = a"] if names else []
    lines += [f"{', '.join(outs)}, = o"] if outs else []
    lines += [f"p_{n} = {n}.data_ptr()" for n in tensors]
    lines += [f"p_{o} = {o}.data_ptr() if {o} is not None else 0" for o in outs]
    p, q = (f"({', '.join(f'p_{n}' for n in some)}{',' if some else ''})" for some in (tensors, outs))
    body = "\n    ".join([*lines, f"return ({', '.join(parts)}{',' if parts else ''}), {p}, {q}"])
    made: dict[str, Any] = {}
    exec(compile(f"def key(a, o):\n    {body}\n", "<hostir key>", "exec"), made)
    found: Callable[..., tuple[Hashable, Sequence[int], Sequence[int]]] = made["key"]
    return found


_TENSOR: Final = "{0}.shape, {0}.stride(), {0}.dtype, {0}.device, p_{0} & 15"


def _span(t: torch.Tensor) -> int:
    """The number of bytes between the first and the last that ``t`` touches."""
    start, end = extent(t)
    return end - start
