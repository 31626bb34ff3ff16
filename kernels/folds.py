"""How each reduction folds: a state for each lane, how an element joins it, and how the lanes become one.

The three texts of a fold serve every schedule: a persistent tile starts from the elements themselves, a loop joins them one tile at a
time, and a split reduction stores the collapsed states and collapses them again (``merge``). So a variance has the same two-pass or
Welford arithmetic everywhere, and nothing is atomic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hostir.kernels.nodes import I32, I64, Reduce, register
from hostir.types import DType


@dataclass(frozen=True, slots=True)
class Fold:
    """One kind. In the texts ``T`` is the element's type (``LOWEST`` and ``HIGHEST`` its bounds), ``x`` (and ``place``) the operands, ``m`` the mask
    of lanes that exist, ``s0, s1, …`` the state, ``SHAPE`` the tile and ``axis`` the axis that goes.

    ``types``: the state's types, of elements (T) and positions (I). ``start``: the state of nothing. ``single``: the state of one
    element (lanes outside the mask: of nothing).
    ``join``: the state after one more element. ``tile``: the collapsed state of ``N`` elements in one tile, where that is more than
    collapsing their states. ``collapse``: one state from all lanes. ``parts``: which of the state the values are.
    ``one``: the values over exactly one element. ``ordered``: elements must be visited in their order. ``empty``: has a value over nothing.
    """

    types: tuple[str, ...]
    start: tuple[str, ...]
    single: tuple[str, ...]
    join: str
    collapse: str
    parts: tuple[int, ...]
    one: tuple[str, ...]
    ordered: bool = False
    empty: bool = True
    tile: str = ""


def _plain(start: str, join: str, collapse: str, empty: bool = True) -> Fold:
    """A fold whose state is one value of the element's type."""
    return Fold(("T",), (start,), (f"tl.where(m, x, {start})",), f"tl.where(m, {join}, s0)", f"{collapse}(s0, axis)", (0,), ("x",), empty=empty)


_ARG: Final = ("T", "I")


def _place(start: str, better: str, pick: str) -> Fold:
    return Fold(
        _ARG,
        (start, "-1"),
        (f"tl.where(m, x, {start})", "tl.where(m, place, -1)"),
        f"hd.{better}(s0, s1, x, place, m)",
        f"hd.{pick}(s0, s1, axis)",
        (0, 1),
        ("x", "place"),
        ordered=True,
        empty=False,
    )


FOLDS: Final[Mapping[str, Fold]] = MappingProxyType(
    {
        "sum": Fold(("T",), ("0",), ("tl.where(m, x, 0)",), "s0 + tl.where(m, x, 0)", "hd.sum(s0, axis)", (0,), ("x",)),
        "prod": Fold(("T",), ("1",), ("tl.where(m, x, 1)",), "s0 * tl.where(m, x, 1)", "hd.prod(s0, axis)", (0,), ("x",)),
        "amax": _plain("LOWEST", "hd.maximum(s0, x)", "hd.amax", empty=False),
        "amin": _plain("HIGHEST", "hd.minimum(s0, x)", "hd.amin", empty=False),
        "any": _plain("0", "hd.maximum(s0, x)", "hd.amax"),
        "all": _plain("1", "hd.minimum(s0, x)", "hd.amin"),
        "argmax": _place("LOWEST", "later_max", "first_max"),
        "argmin": _place("HIGHEST", "later_min", "first_min"),
        # mean, sum of squared distances from it, number of elements
        "moments": Fold(
            ("T", "T", "T"),
            ("0", "0", "0"),
            ("tl.where(m, x, 0)", "tl.zeros(SHAPE, T)", "tl.where(m, 1.0, 0.0).to(T)"),
            "hd.moments_join(s0, s1, s2, x, m)",
            "hd.moments(s0, s1, s2, axis)",
            (0, 1),
            ("x", "(x - x) * (x - x)"),
            tile="hd.moments_of(x, m, N, axis)",
        ),
        # largest element, sum of exp(element - largest)
        "softmax": Fold(
            ("T", "T"),
            ('float("-inf")', "0"),
            ('tl.where(m, x, float("-inf"))', "tl.where(m, 1.0, 0.0).to(T)"),
            "hd.softmax_join(s0, s1, x, m)",
            "hd.softmax(s0, s1, axis)",
            (0, 1),
            ("x", "hd.exp(x - x)"),
        ),
    }
)


def state_types(of: Reduce) -> tuple[DType, ...]:
    """The dtypes of a reduction's state."""
    if of.merge:
        return tuple(x.dtype for x in of.operands)
    held = fold_type(register(of.operands[0].dtype))
    return tuple(held if t == "T" else place_type(of) for t in FOLDS[of.kind].types)


def place_type(of: Reduce) -> DType:
    """The dtype of positions in the fold."""
    return I32 if of.count < 2**31 else I64


def fold_type(d: DType) -> DType:
    """The dtype in which elements held as ``d`` are folded: narrow integers and bools as i32."""
    return I32 if d.is_integral and d.itemsize < 4 else d


def bounds(d: DType) -> tuple[str, str]:
    """Texts of the lowest and the highest value of ``d``."""
    if d.is_float:
        return 'float("-inf")', 'float("inf")'
    bits = 8 * d.itemsize - 1
    return str(-(2**bits)), str(2**bits - 1)
