"""``hir.ops.add(x, y)``: every row of the op table as a function on the tensors of a Fusion.

The functions are made from the table when they are asked for; ``help(hir.ops.sum)`` shows a row's signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostir.errors import BuildError
from hostir.graph.fusion import Fusion, TensorView
from hostir.graph.table import TABLE, apply


def _fusion_of(values: Any) -> Fusion | None:
    for v in values:
        if isinstance(v, TensorView):
            return v.fusion
        if isinstance(v, (list, tuple)) and (found := _fusion_of(v)) is not None:
            return found
    return None


def _function(name: str) -> Callable[..., Any]:
    row = TABLE[name]

    def call(*args: Any, fusion: Fusion | None = None, **attrs: Any) -> Any:
        target = fusion or _fusion_of((*args, *attrs.values()))
        if target is None:
            raise BuildError(f"{name} has no tensor among its arguments", expected=row.signature, cure=f"say where: hir.ops.{name}(…, fusion=f)")
        outs = apply(target, name, args, attrs)
        return outs[0] if len(outs) == 1 else outs

    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f"{row.signature}\n\nReturns a TensorView{'' if row.num_outs == 1 else f' each for {row.num_outs} results'}; BuildError on wrong types."
    )
    return call


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in TABLE:
        raise AttributeError(f"there is no operation named {name!r}; dir(hir.ops) lists them")
    return _function(name)


def __dir__() -> list[str]:
    return sorted(TABLE)
