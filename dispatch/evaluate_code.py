"""A Fusion as one straight-line Python function over torch: what a person would write, temporaries dropped at their last use.

The function is generated once for each way in which outputs may be written (a ``Plan``), from the ATen forms of the op table. Numbered
locals stand for values, so no name of a program reaches the code.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from hostir.dispatch.aliasing import overlap
from hostir.errors import BuildError, InputError
from hostir.graph.fusion import Fusion, Op, TensorView
from hostir.graph.row import Row, form_names
from hostir.graph.rules import common_dtype
from hostir.graph.table import TABLE, bound_of
from hostir.torch_forms import GLOBALS
from hostir.torch_types import to_torch
from hostir.types import DType, Expr, Leaf, Predicate, Sym, TensorType, Var, leaves, source


@dataclass(frozen=True, slots=True)
class Plan:
    """How results reach their places. ``direct``: results whose operation writes the output itself; ``order``: the others, as
    (result, take a temporary first); ``fresh``: results that must be copied before anything is written."""

    direct: frozenset[int] = frozenset()
    order: tuple[tuple[int, bool], ...] = ()
    fresh: frozenset[int] = frozenset()


def torch_target(name: str) -> Any:
    """``aten.add.Tensor`` -> the operation of torch."""
    namespace, op, overload = name.split(".", 2)
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except AttributeError:
        raise InputError(f"this torch has no operation {name}", cure="the fusion was made with another version of torch") from None


def views_of(f: Fusion) -> dict[TensorView, frozenset[int]]:
    """For each value the parameters whose memory it may share."""
    found: dict[TensorView, frozenset[int]] = {p: frozenset([i]) for i, p in enumerate(f.params) if isinstance(p, TensorView)}
    for op in f.ops:
        below = frozenset().union(*(found[tv] for tv in op.reads())) if _may_alias(op) else frozenset()
        found |= dict.fromkeys(op.outs, below)
    return found


def _may_alias(op: Op) -> bool:
    if (row := TABLE.get(op.name)) is not None:
        return row.view
    return any(r.alias_info is not None for r in torch_target(op.name)._schema.returns)


def _returns_list(op: Op) -> bool:
    return op.name not in TABLE and isinstance(torch_target(op.name)._schema.returns[0].type, torch.ListType)


class CodeWriter:
    """Writes the function for one fusion; ``write(plan)`` may be called for several plans."""

    def __init__(self, f: Fusion) -> None:
        self.f = f
        self.views = views_of(f)
        self.names: dict[object, str] = {}
        for i, p in enumerate(f.params):
            self.names[p if isinstance(p, TensorView) else id(p)] = f"a{i}"
        self.constants: dict[str, Any] = {}
        self.symbols = self._symbols()

    def _symbols(self) -> dict[str, str]:
        """Each symbol's name and where it is read from: the first parameter dim that is that bare symbol."""
        found: dict[str, str] = {}
        for i, p in enumerate(self.f.params):
            if isinstance(p, TensorView):
                for d, size in enumerate(p.known.dims):
                    if isinstance(size, Sym):
                        found.setdefault(size.name, f"a{i}.shape[{d}]")
        return found

    # ---- expressions

    def leaf(self, leaf: Leaf) -> str:
        if isinstance(leaf, Var) and id(leaf) in self.names:
            return self.names[id(leaf)]
        if isinstance(leaf, Sym) and leaf.name in self.symbols:
            self.used.add(leaf.name)
            return f"n_{list(self.symbols).index(leaf.name)}"
        raise BuildError(f"nothing gives {leaf} a value in the fusion {self.f.name}", cure="make it the size of an input, or a scalar input")

    def text(self, v: Any) -> str:
        if isinstance(v, TensorView):
            return self.names[v]
        if isinstance(v, (Expr, Predicate)):
            return source(v, self.leaf)
        if isinstance(v, tuple):
            return f"[{', '.join(self.text(x) for x in v)}]"
        if isinstance(v, DType):
            return str(to_torch(v))
        return f"float({str(v)!r})" if isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))) else repr(v)

    def number(self, row: Row, values: Mapping[str, Any], v: Any) -> str:
        """A number where the ATen form takes only tensors: a 0-d tensor of the dtype in which torch would compute."""
        operands = [x.type if isinstance(x, TensorView) else x for x in values.values() if isinstance(x, (TensorView, int, float, Expr))]
        known = [x for x in operands if x is not None]
        dtype = to_torch(common_dtype(row.promotion, known))
        if isinstance(v, Expr):
            return f"torch.full((), {self.text(v)}, dtype={dtype})"
        name = f"c{len(self.constants)}"
        self.constants[name] = torch.full((), v, dtype=dtype)
        return name

    def call(self, op: Op, out: str | None = None) -> str:
        """The expression that evaluates ``op``; with ``out`` the form that writes there."""
        row = TABLE.get(op.name)
        if row is None:
            return self.opaque(op)
        values = bound_of(op.name, op.args, op.attrs)
        kinds = {p.name: p.kind for p in row.params}

        def swap(name: str) -> str | None:
            if name == "o":
                return out
            if name not in values:
                return None
            v = values[name]
            if kinds[name] == "value" and v is not None and not isinstance(v, TensorView) and name not in row.numbers:
                return self.number(row, values, v)
            return self.text(v)

        form = row.aten
        if out is not None:
            form = f"{row.aten[:-1]}, out=o)" if row.out == "+" else row.out
        if "device" in form:
            self.needs_device = True
        return form_names(form)(swap)

    def opaque(self, op: Op) -> str:
        target = torch_target(op.name)
        name = f"f{len(self.constants)}"
        self.constants[name] = target
        parts = [self.text(a) for a in op.args] + [f"{k}={self.text(v)}" for k, v in op.attrs]
        if any(a.name == "device" and a.kwarg_only for a in target._schema.arguments) and not any(True for _ in op.reads()):
            self.needs_device = True
            parts.append("device=device")
        return f"{name}({', '.join(parts)})"

    # ---- the function

    def write(self, plan: Plan) -> tuple[Callable[..., list[Any]], Mapping[int, Op]]:
        """The function ``run(a, o, device)`` (arguments, outputs or None for each, device) and the operation of each of its lines."""
        self.used: set[str] = set()
        self.needs_device = False
        direct = {self.f.results[j].value: j for j in sorted(plan.direct, reverse=True)}
        last = self._last_uses()
        body: list[str] = []
        at: dict[int, Op] = {}
        locals_: set[str] = set()
        for position, op in enumerate(self.f.ops):
            for tv in op.outs:
                self.names[tv] = f"t{len(locals_)}"
                locals_.add(self.names[tv])
            into = direct.get(op.outs[0])
            call = self.call(op, f"o{into}" if into is not None else None)
            left = ", ".join(self.names[tv] for tv in op.outs) + ("," if len(op.outs) == 1 and _returns_list(op) else "")
            at[len(body)] = op
            if into is not None:
                body.append(f"{call}; {left} = o{into}")
            else:
                body.append(f"{left} = {call}")
            gone = [self.names[tv] for tv in dict.fromkeys((*op.reads(), *op.outs)) if last.get(tv) == position]
            if gone:
                body.append(f"del {', '.join(gone)}")
        results = [self.names[r.value] for r in self.f.results]
        for j in sorted(plan.fresh):
            body.append(f"r{j} = {results[j]}.clone()")
            results[j] = f"r{j}"
        for j, temporary in plan.order:
            body.append(f"r{j} = apart({results[j]}, o{j}, {j})" if not temporary else f"r{j} = keep({results[j]}, o{j}, {j})")
        for j, _ in plan.order:
            body.append(f"o{j}.copy_(r{j})")
        places = {j for j, _ in plan.order} | plan.direct
        returned = ", ".join(f"o{j}" if j in places else results[j] for j in range(len(results)))
        head = [f"a{i} = a[{i}]" for i in range(len(self.f.params))]
        head += [f"o{j} = o[{j}]" for j in sorted(places)]
        for number, (name, where) in enumerate(self.symbols.items()):
            if name in self.used:
                head.append(f"n_{number} = {where}")
        text = "\n    ".join(["def run(a, o, device):", *head, *body, f"return [{returned}]"]) + "\n"
        return self._compiled(text), {i + 2 + len(head): op for i, op in at.items()}

    def _last_uses(self) -> dict[TensorView, int]:
        kept = {r.value for r in self.f.results}
        last: dict[TensorView, int] = {}
        for position, op in enumerate(self.f.ops):
            for tv in (*op.outs, *op.reads()):
                if tv not in kept and tv.definition is not None:
                    last[tv] = position
        return last

    def _compiled(self, text: str) -> Callable[..., list[Any]]:
        self.source = text
        names: dict[str, Any] = {**GLOBALS, **self.constants, **HELPER_NAMES}
        exec(compile(text, CODE_FILE, "exec"), names)
        made: Callable[..., list[Any]] = names["run"]
        return made


CODE_FILE: Final = "<hostir evaluation>"


def fits(value: torch.Tensor, out: torch.Tensor, position: int) -> None:
    """A result whose type only torch knew has the output's type, or InputError."""
    if value.shape != out.shape or value.dtype != out.dtype:
        raise InputError(
            f"output {position} has another type than the result",
            expected=f"{value.dtype} of shape {tuple(value.shape)}", got=f"{out.dtype} of shape {tuple(out.shape)}",
        )  # fmt: skip


def _apart(value: torch.Tensor, out: torch.Tensor, position: int) -> torch.Tensor:
    """``value``, safe to be copied into ``out``: a temporary where the two overlap and are not the same."""
    fits(value, out, position)
    return value.clone() if overlap(value, out) == "some" else value


def _keep(value: torch.Tensor, out: torch.Tensor, position: int) -> torch.Tensor:
    """A temporary: another output overwrites what ``value`` shows before it is copied."""
    fits(value, out, position)
    return value.clone()


HELPER_NAMES: Final[Mapping[str, Any]] = MappingProxyType({"apart": _apart, "keep": _keep})


def dims_leaves(t: TensorType) -> Iterator[Leaf]:
    for d in t.dims:
        yield from leaves(d) if isinstance(d, Expr) else ()


__all__ = ["CODE_FILE", "CodeWriter", "Plan", "Sequence", "fits", "linecache", "torch_target", "views_of"]
