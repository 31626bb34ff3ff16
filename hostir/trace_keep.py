"""What happens to torch's functions while a unit is traced: which ones stay whole, which are rewritten, and whose line they are.

Functions that are one operation of our table (``linear``, ``layer_norm``, attention) would reach the trace in pieces. They become
operators of torch for the duration (library ``hostir``), so that torch's own machinery carries each through as one node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from hostir.errors import HostIrError, Location
from hostir.graph.row import REQUIRED, Function, Param, Row
from hostir.graph.table import TABLE
from hostir.torch_forms import callable_form
from hostir.torch_types import to_torch
from hostir.trace_symbols import NoExprError, Symbols, to_host, user_location
from hostir.types import TensorType

# ------------------------------------------------------------------------------------------- functions that stay one operation

_SCHEMA: Final[Mapping[str, str]] = {
    "tensor": "Tensor", "value": "Tensor", "number": "Scalar", "sizes": "SymInt[]", "int": "int", "bool": "bool", "str": "str",
}  # fmt: skip
_LIBRARY: Final = torch.library.Library("hostir", "DEF")


def _declare(row: Row) -> Any:
    """An operator of torch for a row, so that torch's own machinery carries it through a trace as one node."""
    parts = [f"{_SCHEMA[p.kind]}{'?' if p.optional else ''} {p.name}" for p in row.params]
    _LIBRARY.define(f"{row.name}({', '.join(parts)}) -> Tensor")
    form = callable_form(row)

    def kernel(*args: Any) -> torch.Tensor:
        return form(*args)  # type: ignore[no-any-return]

    def fake(*args: Any) -> torch.Tensor:
        first = next(a for a in args if isinstance(a, torch.Tensor))
        symbols = first.fake_mode.shape_env  # type: ignore[attr-defined]
        if not isinstance(symbols, Symbols):
            return kernel(*args)
        found = _rule(row, args, symbols)
        assert isinstance(found, TensorType)
        return first.new_empty([symbols.torchs(d) for d in found.dims], dtype=to_torch(found.dtype))

    _LIBRARY.impl(row.name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hostir::{row.name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.hostir, row.name).default


def _keepers() -> dict[Any, tuple[tuple[Row, Function, Any], ...]]:
    found: dict[Any, tuple[tuple[Row, Function, Any], ...]] = {}
    for row in TABLE.values():
        if row.functions:
            declared = _declare(row)
            for function in row.functions:
                target = reduce(getattr, function.path.split(".")[1:], torch)
                found[target] = (*found.get(target, ()), (row, function, declared))
    return found


_KEEP: Final = _keepers()


class Keep(TorchFunctionMode):
    """While a unit is traced: functions of the table stay whole, and every torch call notes the user's line."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self.symbols = symbols
        self.spans: list[tuple[int, Location]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode = get_proxy_mode()
        if mode is not None and (loc := user_location()) is not None:
            self.spans.append((len(mode.tracer.graph.nodes), loc))
        try:
            candidates = _KEEP.get(func, ())
        except TypeError:  # a callable that does not hash
            candidates = ()
        for row, function, declared in candidates:
            found = _kept_arguments(row, function, args, kwargs)
            if found is not None and self.fits(row, found):
                return declared(*found)
        return func(*args, **kwargs)

    def fits(self, row: Row, values: Sequence[Any]) -> bool:
        """Whether the row's type rule takes these values."""
        try:
            _rule(row, values, self.symbols)
        except (HostIrError, NoExprError):
            return False
        return True


def lines(graph: torch.fx.Graph, spans: Sequence[tuple[int, Location]]) -> dict[torch.fx.Node, Location]:
    """Each node's line: that of the call during which it appeared (``spans``: number of nodes before it, line)."""
    found = {}
    at = 0
    for i, node in enumerate(graph.nodes):
        while at < len(spans) and spans[at][0] <= i:
            at += 1
        if at:
            found[node] = spans[at - 1][1]
    return found


class Again(torch.fx.Interpreter):
    """Runs a traced graph, so that it can be traced again; lines are handed on."""

    def __init__(self, graph: torch.fx.Graph, locations: Mapping[torch.fx.Node, Location]) -> None:
        assert graph.owning_module is not None
        super().__init__(graph.owning_module)
        self.places = locations
        self.spans: list[tuple[int, Location]] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        mode = get_proxy_mode()
        if mode is not None and n in self.places:
            self.spans.append((len(mode.tracer.graph.nodes), self.places[n]))
        return super().run_node(n)


def _kept_arguments(row: Row, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The row's values for a call of ``function``, or None where the call says more than the row can."""
    names = [n for n, _ in function.params]
    if len(args) > len(names) or any(k not in names for k in kwargs):
        return None
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    sources = dict(function.take)
    taken = {what for source, what in sources.values() if source == "arg"}
    for name, default in function.params:
        if name in given and name not in taken and (isinstance(given[name], torch.Tensor) or given[name] != default):
            return None
        if name not in given:
            if default is REQUIRED:
                return None
            given[name] = default
    values = [_kept_value(p, given[sources[p.name][1]]) for p in row.params]
    return None if any(v is NotImplemented for v in values) else values


def _kept_value(p: Param, v: Any) -> Any:
    if v is None:
        return None if p.optional else NotImplemented if p.default is REQUIRED else p.default
    if p.kind == "tensor":
        return v if isinstance(v, torch.Tensor) else NotImplemented
    if p.kind == "sizes":
        return [v] if isinstance(v, (int, torch.SymInt)) else list(v)
    return v


def _rule(row: Row, values: Sequence[Any], symbols: Symbols) -> Any:
    """The row's type rule on torch's values."""

    def go(v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            return symbols.type_of(v)
        return tuple(go(x) for x in v) if isinstance(v, (list, tuple)) else to_host(v, symbols.ours)

    return row.rule(**{p.name: go(v) for p, v in zip(row.params, values, strict=True)})


# -------------------------------------------------------------------------------------------------- small rewrites while tracing


def _copy(x: torch.Tensor, y: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``x.copy_(y)`` without the writing."""
    fresh = y if y.dtype == x.dtype else y.to(x.dtype)
    if fresh.dim() != x.dim() or any(a is not b and not _static_equal(a, b) for a, b in zip(fresh.shape, x.shape, strict=True)):
        fresh = fresh.expand(x.shape).clone()
    return fresh.clone() if fresh is y else fresh


def _static_equal(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def _split(x: torch.Tensor, size: Any, dim: int = 0) -> list[torch.Tensor]:
    total = x.shape[dim]
    count = max(operator.index((total + size - 1) // size), 1) if _static_equal(size, 0) is False else 1
    return [torch.ops.aten.slice.Tensor(x, dim, i * size, total if i == count - 1 else (i + 1) * size) for i in range(count)]


def _split_sizes(x: torch.Tensor, sizes: Sequence[Any], dim: int = 0) -> list[torch.Tensor]:
    parts, start = [], 0
    for i, size in enumerate(sizes):
        stop = x.shape[dim] if i == len(sizes) - 1 else start + size
        parts.append(torch.ops.aten.slice.Tensor(x, dim, start, stop))
        start = stop
    return parts


def _unbind(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    return [x.select(dim, i) for i in range(operator.index(x.shape[dim]))]


def _t(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.alias.default(x) if x.dim() < 2 else x.transpose(0, 1)


REWRITES: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.split_with_sizes.default: _split_sizes,
    torch.ops.aten.unbind.int: _unbind,
    torch.ops.aten.t.default: _t,
}
