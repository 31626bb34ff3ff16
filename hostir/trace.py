"""A torch function becomes a Fusion: the function is run once on fake tensors and what it does to them is written down.

Mutation is made functional first (a mutated argument becomes a result that is written back into it), views stay views, and functions
that are one operation for us (``linear``, ``layer_norm``, attention) are kept whole where torch would take them apart. A ``Unit`` is
such a function with a name and a bounded cache of its fusions by argument types.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, overload

from hostir.errors import HostIrError, caller_location
from hostir.graph.fusion import Fusion
from hostir.graph.show import identifier
from hostir.types import Expr, Memory, Sym, TensorType, dims_of, dtype_of, key

Kind: TypeAlias = Literal["int", "float", "bool"]
Spec: TypeAlias = Any  # TensorType | Kind | a Python number (a constant) | containers of these
_LOCK: Final = threading.RLock()  # torch's tracing keeps process-wide state

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
        from hostir.trace_run import run_trace  # torch's tracer takes a second to import

        try:
            return run_trace(fn, label, specs, named)
        except HostIrError as e:
            e.with_context(loc=loc)
            raise


def function_name(fn: Callable[..., Any]) -> str:
    """A unit's name from its function; ``unit`` for a lambda."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return "unit" if name == "<lambda>" else identifier(name)


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
        from torch.utils import _pytree as pytree

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

    def __reduce__(self) -> tuple[Any, ...]:
        """A unit travels to other processes as its function; they trace it themselves."""
        return Unit, (self.fn, self.name)

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


__all__ = ["Unit", "function_name", "spec", "trace", "unit"]
