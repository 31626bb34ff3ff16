"""Single operations as units, and what a unit is traced for: the compute half of the builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostir.buffers import Buffer
from hostir.build_comm import On
from hostir.errors import BuildError, Location, caller_location
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.table import apply
from hostir.ir.nodes import Unit
from hostir.types import Dim, Expr, Sym, TensorType, Var, key


def signature_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """What a unit is traced for: sizes that are no constants become symbols, host numbers their kind, the rest constants."""
    names: dict[object, Sym] = {}
    taken = {leaf.name for a in args if isinstance(a, Buffer) for leaf in a.shape if isinstance(leaf, Sym)}

    def size(d: Dim) -> Dim:
        if not isinstance(d, Expr) or isinstance(d, Sym):
            return d
        if key(d) not in names:
            name = next(n for i in range(len(taken) + 1) if (n := f"d{i}") not in taken)
            taken.add(name)
            names[key(d)] = Sym(name)
        return names[key(d)]

    out: list[Any] = []
    for a in args:
        if isinstance(a, Buffer):
            out.append(TensorType(a.dtype, tuple(size(d) for d in a.shape)))
        elif isinstance(a, Expr):
            out.append(a.kind if isinstance(a, Var) else "int")
        elif isinstance(a, TensorView):
            raise BuildError("a TensorView belongs to a Fusion; a program's units take buffers", loc=caller_location())
        else:
            out.append(a)
    return tuple(out)


def _type_key(s: Any) -> object:
    return s if not isinstance(s, (int, float)) else (type(s).__name__, s)


class Operations:
    """What ``Program`` inherits: one operation of the table as a unit, with ``out=`` and ``on=`` as ``call`` has them."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    def __init__(self) -> None:
        self._units: dict[object, Unit] = {}

    def _need_open(self) -> None:
        raise NotImplementedError

    def _call(self, unit: Unit, args: Sequence[Any], out: Any, on: On, awaits: Buffer | None, loc: Location | None) -> Any:
        raise NotImplementedError

    def _op(self, name: str, args: Sequence[Any], out: Any, on: On, **attrs: Any) -> Any:
        """One operation of the table as a unit."""
        self._need_open()
        loc = caller_location()
        signature = signature_of(args)
        cache_key = (name, tuple(_type_key(s) for s in signature), tuple(attrs.items()))
        unit = self._units.get(cache_key)
        if unit is None:
            fusion = Fusion(name)
            letters = iter("abcdefgh")
            values: list[Any] = []
            for s in signature:
                if isinstance(s, TensorType):
                    values.append(fusion.input(s.dims, s.dtype, name=next(letters)))
                else:
                    values.append(fusion.scalar(next(letters), s) if s in ("int", "float", "bool") else s)
            try:
                fusion.output(apply(fusion, name, values, attrs, loc=loc)[0])
            except BuildError as e:
                raise e.with_context(program=self.name, statement=name, loc=loc) from None
            unit = self._units[cache_key] = Unit(name, fusion)
        return self._call(unit, [a for a in args if isinstance(a, (Buffer, Expr))], out, on, None, loc)

    def matmul(self, a: Buffer, b: Buffer, out: Buffer | None = None, *, on: On = None) -> Any:
        """``a @ b``, shapes as in torch.matmul."""
        return self._op("matmul", (a, b), out, on)

    def linear(self, x: Buffer, weight: Buffer, bias: Buffer | None = None, out: Buffer | None = None, *, on: On = None) -> Any:
        """``x @ weight.T + bias``: weight [n, k], bias [n]."""
        return self._op("linear", (x, weight) if bias is None else (x, weight, bias), out, on)

    def add(self, a: Any, b: Any, out: Buffer | None = None, *, on: On = None) -> Any:
        return self._op("add", (a, b), out, on)

    def sub(self, a: Any, b: Any, out: Buffer | None = None, *, on: On = None) -> Any:
        return self._op("sub", (a, b), out, on)

    def mul(self, a: Any, b: Any, out: Buffer | None = None, *, on: On = None) -> Any:
        return self._op("mul", (a, b), out, on)

    def div(self, a: Any, b: Any, out: Buffer | None = None, *, on: On = None) -> Any:
        return self._op("div", (a, b), out, on)

    def sum(self, x: Buffer, dim: int | Sequence[int] | None = None, keepdim: bool = False, out: Buffer | None = None, *, on: On = None) -> Any:
        """The sum over ``dim`` (default: all dimensions)."""
        dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
        return self._op("sum", (x,), out, on, dims=dims, keepdim=keepdim)
