"""A plan as one generated Python function: allocations, addresses, launches, copies, in a straight line.

Two forms: ``runner`` takes tensors at each call; ``bound`` holds tensors that stay where they are, so that a launch is one call of a C
function with constants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from hostir.graph.fusion import Fusion, TensorView
from hostir.kernels import launch
from hostir.kernels.plan import Plan
from hostir.kernels.source import Argument, Int, Pointer, Scalar
from hostir.torch_types import to_torch
from hostir.types import Expr, Leaf, Predicate, Sym, Var, source

Runner = Callable[[Sequence[Any], Sequence["torch.Tensor | None"], Sequence[int], Sequence[int]], list[torch.Tensor]]


@contextlib.contextmanager
def on_device(index: int) -> Any:
    """Make a CUDA device current, and the former one again afterwards."""
    with torch.cuda.device(index):
        yield


class Text:
    """The lines of one function and the names that they use."""

    def __init__(self, fusion: Fusion, plan: Plan, device: torch.device, kernels: Sequence[Any], moved: frozenset[int]) -> None:
        self.fusion = fusion
        self.plan = plan
        self.device = device
        self.kernels = kernels
        self.moved = moved
        self.num_params = len(fusion.params)
        self.names: dict[str, Any] = {"empty": torch.empty, "device": device}
        self.lines: list[str] = []

    # ---- tensors

    def tensors(self, given: Sequence[bool]) -> None:
        """Locals b0, b1, … for every buffer, r0, r1, … for every result; ``given`` says which results have a tensor in ``o``."""
        for i, p in enumerate(self.fusion.params):
            if isinstance(p, TensorView):
                self.lines.append(f"b{i} = a[{i}]" + (".to(device)" if i in self.moved else ""))
            else:
                self.lines.append(f"k{i} = a[{i}]")
        views = {j: (i, layout) for j, i, layout in self.plan.views}
        for j, r in enumerate(self.fusion.results):
            buffer = f"b{self.num_params + j}"
            if given[j]:
                self.lines.append(f"r{j} = {buffer} = o[{j}]")
                if j in self.plan.copies:
                    self.lines.append(f"{buffer} = empty(r{j}.shape, dtype=r{j}.dtype, device=device)")
            elif j in views:
                i, layout = views[j]
                same = r.value is self.fusion.params[i]
                part = f".as_strided({layout.sizes}, {layout.strides}, b{i}.storage_offset() + {layout.offset})"
                self.lines.append(f"r{j} = b{i}{'' if same else part}")
            else:
                self.lines.append(f"r{j} = {buffer} = {self._empty(self.plan.fresh[j], r.value.known.dtype)}")
        self.temporaries()

    def temporaries(self) -> None:
        for t in self.plan.temporaries:
            self.lines.append(f"b{t.buffer} = {self._empty(t.layout.sizes, t.dtype)}")

    def _empty(self, sizes: tuple[int, ...], dtype: Any) -> str:
        name = f"d_{dtype.name}"
        self.names[name] = to_torch(dtype)
        return f"empty({sizes}, dtype={name}, device=device)"

    def copies(self) -> None:
        self.lines += [f"r{j}.copy_(b{self.num_params + j})" for j in self.plan.copies]

    # ---- launches

    def launches(self, address: Callable[[int], str]) -> None:
        """``address(b)`` is the text of a buffer's address."""
        if self.device.type != "cuda":
            self.names["interpret"] = launch.interpret
            for n, s in enumerate(self.plan.sources):
                self.names |= {f"s{n}": s, f"f{n}": self.kernels[n]}
                tensors = ", ".join(f"b{a.buffer}" for a in s.arguments if isinstance(a, Pointer))
                numbers = ", ".join(self._number(a) for a in s.arguments if not isinstance(a, Pointer))
                self.lines.append(f"interpret(f{n}, s{n}, [{tensors}], [{numbers}])")
            return
        if not self.plan.sources:
            return
        self.names |= {"stream_of": launch.current_stream(), "current": launch.current_device(), "on_device": on_device}
        index = self.device.index or 0
        calls = []
        for n, (s, k) in enumerate(zip(self.plan.sources, self.kernels, strict=True)):
            call = k.call(s.programs, str(n))
            self.names |= call.names
            arguments = ", ".join(self._pointer(a, address) if isinstance(a, Pointer) else self._number(a) for a in s.arguments)
            calls.append(f"{call.before}{arguments}{call.after}")
        self.lines.append(f"stream = stream_of({index})")
        self.lines += [
            f"if current() == {index}:",
            *(f"    {c}" for c in calls),
            "else:",
            f"    with on_device({index}):",
            *(f"        {c}" for c in calls),
        ]

    @staticmethod
    def _pointer(a: Pointer, address: Callable[[int], str]) -> str:
        at = a.offset * a.dtype.itemsize
        return address(a.buffer) + (f" + {at}" if at else "")

    def _number(self, a: Argument) -> str:
        if isinstance(a, Int):
            return repr(a.value)
        assert isinstance(a, Scalar)
        if isinstance(a.value, (Expr, Predicate)):
            return f"{'float' if a.kind == 'fp64' else 'int'}({source(a.value, self._leaf)})"
        return _literal(a.value) if a.kind == "fp64" else repr(int(a.value))

    def _leaf(self, leaf: Leaf) -> str:
        for i, p in enumerate(self.fusion.params):
            if p is leaf:
                return f"k{i}"
            if isinstance(p, TensorView) and isinstance(leaf, Sym):
                for d, n in enumerate(p.known.dims):
                    if isinstance(n, Sym) and n.name == leaf.name:
                        return f"b{i}.shape[{d}]"
        raise AssertionError(f"nothing gives {leaf} a value")

    def function(self, parameters: str) -> Callable[..., Any]:
        body = "\n    ".join(self.lines or ["pass"])
        exec(compile(f"def run({parameters}):\n    {body}\n", CODE_FILE, "exec"), self.names)
        made: Callable[..., Any] = self.names["run"]
        return made


CODE_FILE: Final = "<hostir launch>"


def _literal(v: Any) -> str:
    v = float(v)
    return repr(v) if v - v == 0 else f"float({str(v)!r})"


def runner(fusion: Fusion, plan: Plan, device: torch.device, kernels: Sequence[Any], given: Sequence[bool], moved: frozenset[int]) -> Runner:
    """A function of the arguments, the given outputs (None where not ``given``) and the addresses of both, that runs the plan and returns
    every result. ``p``: the addresses of the tensors among the arguments, ``q``: one for each result (0 where fresh). ``moved``: 0-d arguments
    that lie on the CPU and are copied over."""
    text = Text(fusion, plan, device, kernels, moved)
    text.tensors(given)
    if device.type == "cuda":
        known = {i: f"p[{n}]" for n, i in enumerate(tensor_params(fusion)) if i not in moved}
        known |= {len(fusion.params) + j: f"q[{j}]" for j, g in enumerate(given) if g and j not in plan.copies}
        used = {a.buffer for s in plan.sources for a in s.arguments if isinstance(a, Pointer)}
        text.lines += [f"p{b} = {known.get(b, f'b{b}.data_ptr()')}" for b in sorted(used)]
    text.launches(lambda b: f"p{b}")
    text.copies()
    text.lines.append(f"return [{', '.join(f'r{j}' for j in range(len(fusion.results)))}]")
    return text.function("a, o, p, q")


def tensor_params(fusion: Fusion) -> list[int]:
    """The positions of the parameters that are tensors."""
    return [i for i, p in enumerate(fusion.params) if isinstance(p, TensorView)]


def bound(
    fusion: Fusion, plan: Plan, device: torch.device, kernels: Sequence[Any], args: Sequence[Any], outs: Sequence[torch.Tensor]
) -> Callable[..., None]:
    """A function that runs the plan on these very tensors. It takes the scalar parameters, in order, and by default uses those of ``args``."""
    text = Text(fusion, plan, device, kernels, frozenset())
    held: dict[int, torch.Tensor] = {i: a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    for j, o in enumerate(outs):
        text.names[f"r{j}"] = held[text.num_params + j] = o
        if j in plan.copies:
            held[text.num_params + j] = torch.empty(o.shape, dtype=o.dtype, device=device)
    for t in plan.temporaries:
        held[t.buffer] = torch.empty(t.layout.sizes, dtype=to_torch(t.dtype), device=device)
    text.names |= {f"b{b}": t for b, t in held.items()}
    text.launches(lambda b: repr(held[b].data_ptr()))
    text.copies()
    scalars = [(i, args[i]) for i, p in enumerate(fusion.params) if isinstance(p, Var)]
    text.names |= {f"default{i}": v for i, v in scalars}
    return text.function(", ".join(f"k{i}=default{i}" for i, _ in scalars))
