"""One trace, from types to a Fusion: fake arguments, torch's tracer over the functionalised function, then the graph as rows.

Everything that torch keeps for the whole process (autocast, loggers) is put back, and whatever torch or the user's function raises
leaves as a UnitTraceError with our names for the sizes and the user's line.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from hostir.errors import HostIrError, Location, UnitTraceError
from hostir.graph.fusion import Fusion, TensorView
from hostir.torch_types import to_torch
from hostir.trace_graph import add_graph, is_mutation, set_results
from hostir.trace_keep import REWRITES, Again, Keep, lines
from hostir.trace_symbols import SCALAR_CURE, Symbols, user_frame
from hostir.types import Expr, TensorType

KINDS: Final = ("int", "float", "bool")


def _argument_names(fn: Callable[..., Any], specs: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """A name for each leaf of the arguments, from the function's signature."""
    try:
        bound = inspect.signature(fn).bind(*specs, **named)
    except TypeError as e:
        raise UnitTraceError(f"the specs do not fit the function's signature: {e}", got=f"{len(specs)} specs") from None
    except ValueError:  # a builtin
        return [f"x{i}" for i in range(len(pytree.tree_leaves((specs, dict(named)))))]
    labels: list[str] = []
    parameters = inspect.signature(fn).parameters
    positional: list[tuple[str, Any]] = []
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


def _leaf_labels(label: str, value: Any) -> list[str]:
    count = len(pytree.tree_leaves(value))
    return [label] if not isinstance(value, (list, tuple, dict)) else [f"{label}_{i}" for i in range(count)]


def run_trace(fn: Callable[..., Any], label: str, specs: Sequence[Any], named: Mapping[str, Any]) -> Fusion:
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
    keep = Keep(symbols)

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
    locations = lines(graph, keep.spans)
    for _ in range(2):
        if not any(map(is_mutation, graph.nodes)):
            break
        # Some functions of torch write in place inside, below the layer that makes things functional: once more, on the graph.
        again = Again(graph, locations)
        graph = _run(again.run, fakes, mode, symbols, label)
        locations = lines(graph, again.spans)
    outputs, written = add_graph(f, graph, f.params, symbols, locations)
    set_results(f, outputs, written)
    if not f.results:
        raise UnitTraceError(f"the unit @{label} returns no tensor and writes into none", cure="return what it computes", loc=function_location(fn))
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
            return make_fx(functional, decomposition_table=dict(REWRITES))(*fakes).graph
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
    while tb is not None:
        if user_frame(tb.tb_frame) is tb.tb_frame:
            loc = Location(tb.tb_frame.f_code.co_filename, tb.tb_lineno)
        tb = tb.tb_next
    cure = None
    if type(e).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        cure = "the result depends on the contents of a tensor: do that outside the unit"
    elif "data-dependent" in text:
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
