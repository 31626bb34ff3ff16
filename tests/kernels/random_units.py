"""Random units: operations, dtypes, layouts and shapes drawn together, with NaN and infinities, some written in place. One seed is one unit."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from hostir.errors import BuildError
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.table import apply
from hostir.torch_types import to_torch
from hostir.types import DTYPES
from tests.kernels.support import TOLERANCE, layouts

SHAPES = [(), (1,), (7,), (300,), (5, 9), (1, 33), (17, 1), (4, 3, 8), (2, 5, 1, 6), (3, 2, 2, 2, 3), (64, 130), (2, 3000)]
FLOATS = ("f32", "f32", "bf16", "f16", "f64")
INTS = ("i32", "i64", "i8", "u8", "bool")
UNARY = ("neg", "abs", "relu", "tanh", "sigmoid", "silu", "gelu", "floor", "sign", "logical_not", "isnan", "isfinite", "set", "sin", "bitwise_not")
BINARY = ("add", "sub", "mul", "maximum", "minimum", "lt", "eq", "logical_and", "add", "mul", "bitwise_xor", "floor_divide", "remainder")
FOLDS = ("sum", "mean", "amax", "amin", "any", "all", "var")
ROWWISE = ("softmax", "log_softmax")


# What jumps where its operand is computed: the last bit of a float decides.
STEPS = ("floor_divide", "remainder", "lt", "eq", "any", "all", "logical_and", "logical_not", "sign", "floor")


class Builder:
    """Draws one unit. Values are kept small, so that every dtype can hold what is computed."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.f = Fusion("fuzz")
        self.args: list[torch.Tensor] = []
        self.values: list[TensorView] = []

    def input(self, shape: tuple[int, ...], kind: str) -> TensorView:
        generator = torch.Generator().manual_seed(self.random.getrandbits(16))
        dtype = to_torch(DTYPES[kind])
        if dtype == torch.bool:
            t = torch.rand(shape, generator=generator) < 0.5
        elif dtype.is_floating_point:
            # Multiples of 1/4 below 4: exact in every float dtype.
            t = (torch.randint(-15, 16, shape, generator=generator) / 4).to(dtype)
            if t.numel() > 3 and self.random.randrange(6) == 0:
                t.view(-1)[1] = self.random.choice([float("nan"), float("inf"), -float("inf"), -0.0])
        else:
            t = torch.randint(0 if dtype == torch.uint8 else -9, 10, shape, generator=generator, dtype=dtype)
        kinds = layouts(t)
        self.args.append(kinds[self.random.choice(sorted(kinds))])
        tv = self.f.input(shape, dtype)
        self.values.append(tv)
        return tv

    def pick(self) -> Any:
        return self.random.choice(self.values[-4:])

    def add(self, name: str, args: list[Any], **attrs: Any) -> None:
        if name in STEPS and any(isinstance(x, TensorView) and x.definition is not None and x.known.dtype.is_float for x in args):
            return
        try:
            (out,) = apply(self.f, name, args, attrs)
        except BuildError:
            return
        if out.known.dtype.name != "c64":
            self.values.append(out)

    def step(self) -> None:
        x = self.pick()
        rank = len(x.shape)
        dim = self.random.randrange(rank) if rank else 0
        match self.random.choice(["unary", "binary", "binary", "number", "where", "cast", "view", "fold", "fold", "row", "norm", "move"]):
            case "unary":
                name = self.random.choice(UNARY)
                if x.known.dtype.name != "bool" or name in ("logical_not", "isnan", "isfinite", "set", "bitwise_not"):
                    self.add(name, [x])
            case "binary":
                name = self.random.choice(BINARY)
                y = self.pick()
                if name in ("floor_divide", "remainder"):
                    y = 3
                if name not in ("floor_divide", "remainder") and self.random.random() < 0.5:
                    y = self.input(
                        self.random.choice([x.shape, x.shape[-1:], tuple(1 if i == dim else n for i, n in enumerate(x.shape))]), self.kind()
                    )
                    if name in ("lt", "eq"):
                        x = self.input(x.shape, self.kind())
                self.add(name, [x, y])
            case "number":
                self.add(self.random.choice(["add", "mul", "sub"]), [x, self.random.choice([2, 0.5, -1, True])])
            case "where":
                self.add("where", [self.input(x.shape, "bool"), x, self.random.choice([0, 1.5, self.pick()])])
            case "cast":
                if x.definition is None or not x.known.dtype.is_float:
                    self.add("cast", [x], dtype=DTYPES[self.random.choice([*FLOATS, "i32", "bool"])])
            case "view":
                kind = self.random.choice(["transpose", "flatten", "slice", "unsqueeze", "select", "step"])
                if kind == "transpose" and rank > 1:
                    self.add("transpose", [x], dim0=0, dim1=rank - 1)
                elif kind == "flatten" and rank > 1:
                    self.add("reshape", [x], shape=(-1,))
                elif kind == "slice" and rank and x.shape[dim] > 2:
                    self.add("slice", [x], dim=dim, start=1)
                elif kind == "step" and rank and x.shape[dim] > 2:
                    self.add("slice", [x], dim=dim, step=2)
                elif kind == "unsqueeze":
                    self.add("unsqueeze", [x], dim=dim)
                elif kind == "select" and rank:
                    self.add("select", [x], dim=dim, index=0)
            case "fold" if x.definition is None or x.known.dtype.is_float:
                dims = self.random.choice([(dim,), None, tuple(range(rank))[-2:]]) if rank else None
                attrs = {"dims": dims, "keepdim": self.random.random() < 0.5}
                self.add(self.random.choice(FOLDS), [x], **attrs)
            case "row" if rank:
                self.add(self.random.choice(ROWWISE), [x], dim=dim)
            case "norm" if rank:
                self.add(self.random.choice(["layer_norm", "rms_norm"]), [x], shape=x.shape[-1:])
            case "move" if rank:
                kind = self.random.choice(["cat", "pad", "flip", "tril"])
                if kind == "cat":
                    self.add("cat", [[x, self.input(x.shape, x.known.dtype.name)]], dim=dim)
                elif kind == "pad":
                    self.add("pad", [x], pads=(1, 2), value=1)
                elif kind == "flip":
                    self.add("flip", [x], dims=(dim,))
                elif rank > 1:
                    self.add("tril", [x])

    def kind(self) -> str:
        return self.random.choice([*FLOATS, *FLOATS, *INTS])

    def finish(self) -> None:
        computed = [v for v in self.values if v.definition is not None] or self.values
        self.f.output(computed[-1])
        if len(computed) > 2 and self.random.random() < 0.5:
            self.f.output(computed[-3])
        if self.random.random() < 0.5:
            free = [p for p in self.f.inputs if p.known.agrees(computed[-1].known)]
            if free:
                self.f.output(computed[-1], alias=self.random.choice(free))


def unit(seed: int) -> tuple[Fusion, list[torch.Tensor]]:
    """The unit of this seed and arguments for it."""
    b = Builder(Random(seed))
    b.input(b.random.choice(SHAPES), b.kind())
    for _ in range(b.random.randint(2, 8)):
        b.step()
    b.finish()
    return b.f, b.args


def check_results(f: Fusion, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Every result has its dtype and agrees with the reference in f64; integers exactly."""
    # What is held as f32 in the middle, or rounded by a cast, shows in a wider result too.
    computed = {to_torch(o.outs[0].known.dtype) for o in f.ops}
    rounds = "cast" in {o.name for o in f.ops}
    floats = {d if d.itemsize > 2 or rounds else torch.float32 for d in computed if d.is_floating_point} | {torch.float64}
    for r, g, w in zip(f.results, got, want, strict=True):
        dtype = to_torch(r.value.known.dtype)
        assert g.dtype == dtype, f
        if dtype.is_floating_point:
            rtol, atol = map(max, zip(*(TOLERANCE[d] for d in {dtype, *floats}), strict=True))
            torch.testing.assert_close(g.double(), w.to(dtype).double(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{f}\n{m}")
        else:
            torch.testing.assert_close(g, w.to(dtype), rtol=0, atol=0, msg=lambda m: f"{f}\n{m}")
