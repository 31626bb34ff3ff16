"""A torch function becomes a Fusion: the function is run once on fake tensors and what it does to them is written down.

Mutation is made functional first (a mutated argument becomes a result that is written back into it), views stay views, and functions
that are one operation for us (``linear``, ``layer_norm``, attention) are kept whole where torch would take them apart. A ``Unit`` is
such a function with a name and a bounded cache of its fusions by argument types.
"""

from __future__ import annotations

import inspect
import logging
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final, Literal, TypeAlias, overload

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hostir.errors import HostIrError, Location, UnitTraceError, caller_location
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.row import REQUIRED, Function, Param, Row
from hostir.graph.show import identifier
from hostir.graph.table import TABLE
from hostir.torch_forms import callable_form
from hostir.torch_types import to_torch
from hostir.trace_graph import add_graph, is_mutation
from hostir.trace_symbols import SCALAR_CURE, NoExprError, Symbols, to_host, user_location
from hostir.types import Expr, Memory, Sym, TensorType, Var, dims_of, dtype_of, key

Kind: TypeAlias = Literal["int", "float", "bool"]
KINDS: Final = ("int", "float", "bool")
Spec: TypeAlias = Any  # TensorType | Kind | a Python number (a constant) | containers of these
_LOCK: Final = threading.RLock()  # torch's tracing keeps process-wide state

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


def _keepers() -> dict[Any, tuple[Row, Function, Any]]:
    found: dict[Any, tuple[Row, Function, Any]] = {}
    for row in TABLE.values():
        if row.functions:
            declared = _declare(row)
            for function in row.functions:
                target = reduce(getattr, function.path.split(".")[1:], torch)
                found[target] = (row, function, declared)
    return found


_KEEP: Final = _keepers()


class _Keep(TorchFunctionMode):  # type: ignore[misc]
    """While a unit is traced: functions of the table stay whole, and every torch call notes the user's line."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()
        self.symbols = symbols
        self.spans: list[tuple[int, Location]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        kwargs = kwargs or {}
        mode = get_proxy_mode()
        if mode is not None and (loc := user_location()) is not None:
            self.spans.append((len(mode.tracer.graph.nodes), loc))
        try:
            entry = _KEEP.get(func)
        except TypeError:  # a callable that does not hash
            entry = None
        if entry is not None and (found := _kept_arguments(*entry[:2], args, kwargs)) is not None and self.fits(entry[0], found):
            return entry[2](*found)
        return func(*args, **kwargs)

    def fits(self, row: Row, values: Sequence[Any]) -> bool:
        """Whether the row's type rule takes these values; where it does not, torch's own decomposition is traced."""
        try:
            _rule(row, values, self.symbols)
        except (HostIrError, NoExprError):
            return False
        return True

def _lines(graph: torch.fx.Graph, spans: Sequence[tuple[int, Location]]) -> dict[torch.fx.Node, Location]:
    """Each node's line: that of the call during which it appeared (``spans``: number of nodes before it, line)."""
    found = {}
    at = 0
    for i, node in enumerate(graph.nodes):
        while at < len(spans) and spans[at][0] <= i:
            at += 1
        if at:
            found[node] = spans[at - 1][1]
    return found


class _Again(torch.fx.Interpreter):  # type: ignore[misc]
    """Runs a traced graph, so that it can be traced again; lines are handed on."""

    def __init__(self, graph: torch.fx.Graph, locations: Mapping[torch.fx.Node, Location]) -> None:
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
    if any(v is NotImplemented for v in values):
        return None
    ranks = tuple(v.dim() for v in values if isinstance(v, torch.Tensor))
    return None if ranks in row.decomposed_ranks else values


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


def _copy(x: torch.Tensor, y: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: ARG001
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
    return torch.ops.aten.alias.default(x) if x.dim() < 2 else x.transpose(0, 1)  # type: ignore[no-any-return]


_REWRITES: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.ops.aten.copy.default: _copy,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.split_with_sizes.default: _split_sizes,
    torch.ops.aten.unbind.int: _unbind,
    torch.ops.aten.t.default: _t,
}

# ---------------------------------------------------------------------------------------------------------------------- tracing


def spec(shape: object, dtype: object, memory: Memory = "global") -> TensorType:
    """The type of a tensor to trace with: ``hir.spec((t, h), torch.bfloat16)``; sizes are ints, ``hir.sym`` or host expressions."""
    return TensorType(dtype_of(dtype), dims_of(shape), memory)


def trace(fn: Callable[..., Any], *specs: Spec, name: str | None = None, **named: Spec) -> Fusion:
    """``fn`` as a Fusion, traced on tensors of these types.

    A spec is a type (``hir.spec``), ``"int"``, ``"float"`` or ``"bool"`` for a number that is given at each run, a Python number or
    string (a constant), or a list, tuple or dict of specs. Arguments that ``fn`` mutates become results written in place
    (``Output.alias``): hidden, unless the function also returns that argument. UnitTraceError where that is impossible.
    """
    label = name or function_name(fn)
    loc = caller_location()
    with _LOCK:
        try:
            return _trace(fn, label, specs, named)
        except HostIrError as e:
            e.with_context(loc=loc)
            raise


def function_name(fn: Callable[..., Any]) -> str:
    """A unit's name from its function; ``unit`` for a lambda."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return "unit" if name == "<lambda>" else identifier(name)


def _argument_names(fn: Callable[..., Any], specs: Sequence[Spec], named: Mapping[str, Spec]) -> list[str]:
    """A name for each leaf of the arguments, from the function's signature."""
    try:
        bound = inspect.signature(fn).bind(*specs, **named)
    except TypeError as e:
        raise UnitTraceError(f"the specs do not fit the function's signature: {e}", got=f"{len(specs)} specs") from None
    except ValueError:  # a builtin
        return [f"x{i}" for i in range(len(pytree.tree_leaves((specs, dict(named)))))]
    labels: list[str] = []
    parameters = inspect.signature(fn).parameters
    positional: list[tuple[str, Spec]] = []
    keyword: dict[str, str] = {}
    for p, value in bound.arguments.items():
        kind = parameters[p].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [(f"{p}_{i}", v) for i, v in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keyword |= {k: k for k in value}
        elif p in named:
            keyword[p] = p
        else:
            positional.append((p, value))
    for label, value in positional:
        labels += _leaf_labels(label, value)
    for k, value in named.items():
        labels += _leaf_labels(keyword[k], value)
    return labels


def _leaf_labels(label: str, value: Spec) -> list[str]:
    count = len(pytree.tree_leaves(value))
    return [label] if not isinstance(value, (list, tuple, dict)) else [f"{label}_{i}" for i in range(count)]


def _trace(fn: Callable[..., Any], label: str, specs: Sequence[Spec], named: Mapping[str, Spec]) -> Fusion:
    names = _argument_names(fn, specs, named)
    leaves, structure = pytree.tree_flatten((list(specs), dict(named)))
    symbols = Symbols()
    f = Fusion(label)
    for leaf in leaves:
        if isinstance(leaf, TensorType):
            symbols.reserve(leaf.dims)
    mode = FakeTensorMode(shape_env=symbols, allow_non_fake_inputs=True)
    fakes: list[Any] = []
    places: list[int] = []
    constants = list(leaves)
    for i, (leaf, argument) in enumerate(zip(leaves, names, strict=True)):
        if isinstance(leaf, TensorType):
            pairs = [symbols.size(d) for d in leaf.dims]
            f.params.append(TensorView(f, TensorType(leaf.dtype, tuple(p[0] for p in pairs), leaf.memory), argument))
            with mode:
                fakes.append(torch.empty([p[1] for p in pairs], dtype=to_torch(leaf.dtype), device="cpu"))
            places.append(i)
        elif isinstance(leaf, str) and leaf in KINDS:
            var, fake = symbols.scalar(argument, leaf)  # type: ignore[arg-type]
            f.params.append(var)
            fakes.append(fake)
            places.append(i)
        elif isinstance(leaf, torch.Tensor):
            raise UnitTraceError(f"{argument} is a tensor; a trace takes types", cure=f"hir.spec({tuple(leaf.shape)}, {leaf.dtype})")
        elif isinstance(leaf, Expr):
            raise UnitTraceError(f"{argument} is the host number {leaf}; a trace takes its kind", cure='"int", "float" or "bool"')
    keep = _Keep(symbols)

    def flat(*given: Any) -> Any:
        full = list(constants)
        for place, value in zip(places, given, strict=True):
            full[place] = value
        args, kwargs = pytree.tree_unflatten(full, structure)
        before = [_layout(t) for t in given]
        with keep:
            out = fn(*args, **kwargs)
        for place, t, was in zip(places, given, before, strict=True):
            if _layout(t) != was:
                raise UnitTraceError(
                    f"the unit @{label} changes the shape or strides of its argument {names[place]} in place",
                    cure="use the form that returns a new tensor (x.t(), x.squeeze())", loc=function_location(fn),
                )  # fmt: skip
        results, shape = pytree.tree_flatten(out)
        _check_results(label, results)
        returned.append(shape)
        return results

    returned: list[Any] = []
    graph = _run(flat, fakes, mode, symbols, label)
    locations = _lines(graph, keep.spans)
    for _ in range(2):
        if not any(map(is_mutation, graph.nodes)):
            break
        # Some functions of torch write in place inside, below the layer that makes things functional: once more, on the graph.
        again = _Again(graph, locations)
        graph = _run(again.run, fakes, mode, symbols, label)
        locations = _lines(graph, again.spans)
    outputs, written = add_graph(f, graph, f.params, symbols, locations)
    _set_results(f, outputs, written)
    return f


def _layout(t: Any) -> tuple[str, str] | None:
    return (str(t.shape), str(t.stride())) if isinstance(t, torch.Tensor) else None


def function_location(fn: Callable[..., Any]) -> Location | None:
    """Where a function was written."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return None if code is None else Location(code.co_filename, code.co_firstlineno)


def _run(flat: Callable[..., Any], fakes: list[Any], mode: FakeTensorMode, symbols: Symbols, label: str) -> torch.fx.Graph:
    functional = torch.func.functionalize(flat, remove="mutations")
    try:
        with torch.inference_mode(False), torch.no_grad(), _no_autocast(), _quiet(), mode:
            return make_fx(functional, decomposition_table=dict(_REWRITES))(*fakes).graph
    except Exception as e:
        if symbols.refusal is not None:
            raise symbols.refusal from None
        if isinstance(e, HostIrError):
            raise
        raise _explained(e, label, symbols) from e


def _explained(e: Exception, label: str, symbols: Symbols) -> UnitTraceError:
    """torch's or the user's exception, with our names for sizes and the user's line."""
    text = symbols.named(str(e)).split("\n\n", maxsplit=1)[0].strip() or type(e).__name__
    loc: Location | None = None
    tb = e.__traceback__
    from hostir.trace_symbols import user_frame

    while tb is not None:
        if user_frame(tb.tb_frame) is tb.tb_frame:
            loc = Location(tb.tb_frame.f_code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    cure = None
    if "data-dependent" in text:
        cure = SCALAR_CURE
    elif "must match" in text or "cannot be multiplied" in text:
        cure = "sizes that are always equal need one symbol: use the same hir.sym (or number) for both"
    return UnitTraceError(f"the unit @{label} cannot be traced: {type(e).__name__}: {text}", cure=cure, loc=loc)


class _no_autocast:  # noqa: N801
    """The ambient autocast is not part of a unit."""

    def __enter__(self) -> None:
        self.devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        for d in self.devices:
            torch.set_autocast_enabled(d, False)

    def __exit__(self, *_: object) -> None:
        for d in self.devices:
            torch.set_autocast_enabled(d, True)


class _quiet(logging.Filter):  # noqa: N801
    """torch logs what it is about to raise; the error says it already. Other threads' records pass."""

    loggers: Final = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        for name in self.loggers:
            logging.getLogger(name).addFilter(self)

    def __exit__(self, *_: object) -> None:
        for name in self.loggers:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread


def _check_results(label: str, results: Sequence[Any]) -> None:
    for r in results:
        if not isinstance(r, torch.Tensor) and r is not None:
            raise UnitTraceError(
                f"the unit @{label} returns {r!r} ({type(r).__name__})", expected="tensors, also in tuples and lists", cure="return tensors only"
            )


def _set_results(f: Fusion, outputs: Sequence[Any], written: Mapping[TensorView, TensorView]) -> None:
    """Returned values in order, then the arguments that were only mutated. A mutated argument that is returned is one result."""
    by_value = {id(new): param for param, new in written.items()}
    done: set[int] = set()
    for value in outputs:
        if value is None:
            continue
        param = by_value.get(id(value))
        if param is not None and id(param) not in done:
            done.add(id(param))
            f.output(value, alias=param, hidden=False)
        else:
            f.output(value)
    for param, new in written.items():
        if id(param) not in done:
            f.output(new, alias=param)


# ------------------------------------------------------------------------------------------------------------------------ units


class Unit:
    """A torch function that programs call; ``hir.unit`` makes it. Traced and cached for each tuple of argument types."""

    cache_size: Final = 128

    def __init__(self, fn: Callable[..., Any], name: str | None = None) -> None:
        self.fn = fn
        self.name = name or function_name(fn)
        self.__name__ = self.name
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        self._cache: OrderedDict[object, Fusion] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """On buffers of a program: record the call there. On tensors: just run the function."""
        for a in (*args, *kwargs.values()):
            program = getattr(a, "program", None)
            if program is not None:
                return program.call(self, *args, **kwargs)
        out = kwargs.pop("out", None)
        result = self.fn(*args, **kwargs)
        if out is None:
            return result
        for target, value in zip(pytree.tree_leaves(out), pytree.tree_leaves(result), strict=True):
            target.copy_(value)
        return out

    def fusion(self, arg_types: Sequence[TensorType | str | float]) -> Fusion:
        """The unit's Fusion for arguments of these types: ``TensorType``, a kind (``"int"``), or a Python number (a constant)."""
        k = _cache_key(arg_types)
        with self._lock:
            if (found := self._cache.get(k)) is not None:
                self._cache.move_to_end(k)
                return found
        made = trace(self.fn, *arg_types, name=self.name)
        with self._lock:
            kept = self._cache.setdefault(k, made)
            self._cache.move_to_end(k)
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return kept

    def __repr__(self) -> str:
        return f"<unit @{self.name}>"


def _cache_key(arg_types: Sequence[Any]) -> object:
    """Equal for types that trace alike: expressions count by which are equal, not by what they are."""
    numbers: dict[object, int] = {}

    def size(d: Any) -> object:
        if not isinstance(d, Expr):
            return d
        return ("sym", d.name) if isinstance(d, Sym) else ("expr", numbers.setdefault(key(d), len(numbers)))

    def go(a: Any) -> object:
        if isinstance(a, TensorType):
            return (a.dtype.name, a.memory, *(size(d) for d in a.dims))
        if isinstance(a, (list, tuple)):
            return tuple(go(x) for x in a)
        return (type(a).__name__, a)

    return tuple(go(a) for a in arg_types)


@overload
def unit(fn: Callable[..., Any]) -> Unit: ...
@overload
def unit(*, name: str | None = None) -> Callable[[Callable[..., Any]], Unit]: ...
def unit(fn: Callable[..., Any] | None = None, *, name: str | None = None) -> Unit | Callable[[Callable[..., Any]], Unit]:
    """``@hir.unit`` or ``@hir.unit(name="fma")``: a torch function as a unit of programs."""
    if fn is None:
        return lambda f: Unit(f, name)
    return Unit(fn, name)


__all__ = ["Unit", "Var", "function_name", "spec", "trace", "unit"]
