"""Sizes and scalars while torch traces: our expressions as torch's symbols, and torch's symbolic results back as our expressions.

Each distinct size expression becomes one symbol with a large hint of its own, so that no two sizes are equal by accident. A size is
never asked for its value: a branch of the traced function that depends on one, or a scalar that torch must know, is refused here,
where the reason is known, and not somewhere inside torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, Literal

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from hostir.errors import Location, UnitTraceError
from hostir.torch_types import from_torch
from hostir.types import Bin, Cmp, Dim, Expr, Operand, Sym, TensorType, Tree, Truth, Var, binary, evaluate, key, show_expr, simplify

_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HOSTIR: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_MADE: Final = ("<string>", "<eval_with_key", "<frozen", "<hostir")  # code that a program wrote, not a user
SCALAR_CURE: Final = (
    "numbers that vary between calls may only take part in arithmetic: branch on the host (p.if_), index the buffer outside the unit "
    "(p.call(u, a[i])), or pass a Python number, which is a constant"
)
SIZE_CURE: Final = "trace with that size as a number, or write the unit so that it does not depend on the size's value"


def user_frame(start: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``start`` outwards, that is neither torch's nor hostir's."""
    while start is not None:
        file = start.f_code.co_filename
        if not file.startswith((_TORCH, _HOSTIR, *_MADE)):
            return start
        start = start.f_back
    return None


def user_location() -> Location | None:
    """The line of the user's code that runs now."""
    frame = user_frame(sys._getframe(1))
    return None if frame is None else Location(frame.f_code.co_filename, frame.f_lineno)


def _asked_by_user() -> bool:
    """True when the value is needed by an ``if``, ``int()`` or index in the user's code and not by a check inside torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name in ("__bool__", "__int__", "__index__", "__float__") and frame.f_code.co_filename == torch.__file__:
            caller = frame.f_back
            while caller is not None and caller.f_code.co_name in ("__torch_function__", "wrapper"):
                caller = caller.f_back
            return caller is not None and not caller.f_code.co_filename.startswith(_TORCH)
        frame = frame.f_back
    return False


def _primes() -> Iterator[int]:
    found: list[int] = []
    n = 11
    while True:
        if all(n % p for p in found) and n % 2 and n % 3 and n % 5 and n % 7:
            found.append(n)
            yield n
        n += 2


class Naming:
    """What torch's symbols are called here."""

    def __init__(self) -> None:
        self.ours: dict[sympy.Symbol, Expr] = {}

    def type_of(self, t: torch.Tensor) -> TensorType:
        """Our type of one of torch's fake tensors; NoExprError where there is none."""
        if (dtype := from_torch(t.dtype)) is None:
            raise NoExprError(str(t.dtype))
        return TensorType(dtype, tuple(to_host(s, self.ours) for s in t.shape))

    def named(self, text: str) -> str:
        """torch's message with our names for the symbols."""
        names = {str(s): show_expr(e) for s, e in self.ours.items()}
        return re.sub(r"\b(?:s|u|zuf|zf)\d+\b", lambda m: names.get(m[0], m[0]), text)


class Symbols(ShapeEnv, Naming):
    """torch's record of symbolic numbers for one trace, with our names, and our rules for what may be asked of them."""

    def __init__(self) -> None:
        ShapeEnv.__init__(self, duck_shape=False, specialize_zero_one=False)
        Naming.__init__(self)
        self.refusal: UnitTraceError | None = None
        self._sizes: dict[object, tuple[Sym, Any]] = {}
        self._taken: set[str] = set()
        self._hints = _primes()

    # ---- ours to torch's

    def reserve(self, dims: tuple[Dim, ...]) -> None:
        """Names that bare symbols have keep their meaning."""
        self._taken.update(d.name for d in dims if isinstance(d, Sym))

    def size(self, d: Dim) -> tuple[Dim, Any]:
        """(The size as it stands in the fusion, as torch sees it.) Equal expressions are one symbol."""
        if not isinstance(d, Expr):
            return d, d
        k = key(simplify(d))
        if k not in self._sizes:
            named = d if isinstance(d, Sym) else Sym(self._fresh())
            source = ConstantSource(f"size_{named.name}")
            hint = 96 * next(self._hints)
            symbol = self.create_symbol(hint, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
            self.ours[symbol] = named
            self._sizes[k] = (named, self.create_symintnode(symbol, hint=hint, source=source))
        return self._sizes[k]

    def _fresh(self) -> str:
        number = 0
        while (name := f"d{number}") in self._taken:
            number += 1
        self._taken.add(name)
        return name

    def scalar(self, name: str, kind: Literal["int", "float", "bool"]) -> tuple[Var, Any]:
        """A host number that is given at each run: (in the fusion, as torch sees it)."""
        var = Var(name, "scalar", kind)
        with self.ignore_fresh_unbacked_symbols():
            make: Callable[[], Any] = getattr(
                self, {"int": "create_unbacked_symint", "float": "create_unbacked_symfloat"}.get(kind, "create_unbacked_symbool")
            )
            made = make()
        (symbol,) = made.node.expr.free_symbols
        self.ours[symbol] = var
        return var, made

    def torchs(self, e: Operand) -> Any:
        """A host expression over this trace's symbols as torch's symbolic number."""
        known = {key(named): made for named, made in self._sizes.values()}
        return evaluate(e, lambda leaf: known[key(leaf)])

    # ---- what torch asks

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """torch needs a value now. Sizes answer by their hint where every size would answer the same; else this is a refusal."""
        free = orig_expr.free_symbols
        if not free:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        sizes = all(isinstance(self.ours.get(s), Sym) for s in free)
        if not sizes:
            try:
                return super().evaluate_expr(orig_expr, *args, **kwargs)
            except Exception:
                self._refuse(orig_expr, SCALAR_CURE)
                raise
        truth = not isinstance(orig_expr, sympy.Expr)
        if truth and not _asked_by_user():
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        small = (2, 3, 4, 5, 7, 8, 15, 16, 64, 1000) if truth else ()
        if orig_expr.is_Symbol or len({orig_expr.xreplace(dict.fromkeys(free, sympy.Integer(v))) for v in (*small, 96, 960, 96 * 97)}) > 1:
            raise self._refuse(orig_expr, SIZE_CURE)
        return super().evaluate_expr(orig_expr, *args, **kwargs)

    def _refuse(self, asked: Any, cure: str) -> UnitTraceError:
        if any(s not in self.ours for s in asked.free_symbols):
            self.refusal = self.refusal or UnitTraceError(
                "the unit needs the contents of a tensor on the host: a branch, int(), or a size that depends on data",
                cure="use torch.where, or decide outside the unit", loc=user_location(),
            )  # fmt: skip
            return self.refusal
        try:
            text = show_expr(to_tree(asked, self.ours))
        except NoExprError:
            text = self.named(str(asked))
        error = UnitTraceError(f"the unit needs the value of {text}, which is not known while it is traced", cure=cure, loc=user_location())
        self.refusal = self.refusal or error
        return error


# ------------------------------------------------------------------------------------------------------------ torch's to ours


class NoExprError(Exception):
    """A symbolic number of torch that host expressions cannot say."""


def _fold(op: str, args: list[Operand]) -> Operand:
    out = args[0]
    for a in args[1:]:
        out = binary(op, out, a)
    return out


def _floor(e: Any, ours: Mapping[sympy.Symbol, Expr], up: bool) -> Operand:
    """floor or ceil of a true division of integers."""
    if type(e).__name__ == "IntTrueDiv":
        a, b = (to_operand(x, ours) for x in e.args)
        return binary("//", binary("+", a, binary("-", b, 1)), b) if up else binary("//", a, b)
    raise NoExprError(str(e))


_BINARY: Final[Mapping[str, str]] = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "Max": "max", "Min": "min"}
_COMPARE: Final[Mapping[str, str]] = {
    "Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">", "GreaterThan": ">=",
}  # fmt: skip


def to_operand(e: Any, ours: Mapping[sympy.Symbol, Expr]) -> Operand:
    """A sympy number as a host expression; NoExprError where there is none."""
    if e.is_Integer:
        return int(e)
    if e.is_Float:
        return float(e)
    if e.is_Symbol:
        if (found := ours.get(e)) is None:
            raise NoExprError(str(e))
        return found
    kind = type(e).__name__
    if kind == "Add":
        terms = sorted(e.args, key=lambda t: (t.is_number, bool(t.could_extract_minus_sign())))
        out = to_operand(terms[0], ours)
        for t in terms[1:]:
            out = binary("-", out, to_operand(-t, ours)) if t.could_extract_minus_sign() else binary("+", out, to_operand(t, ours))
        return out
    if kind == "Mul":
        if any(a.is_Rational and not a.is_Integer for a in e.args):
            raise NoExprError(str(e))
        return _fold("*", [to_operand(a, ours) for a in sorted(e.args, key=lambda a: bool(a.is_number))])
    if kind in ("Pow", "PowByNatural") and e.args[1].is_Integer and e.args[1] > 0:
        return _fold("*", [to_operand(e.args[0], ours)] * int(e.args[1]))
    if kind in _BINARY:
        return _fold(_BINARY[kind], [to_operand(a, ours) for a in e.args])
    if kind == "ModularIndexing":
        a, b, c = (to_operand(x, ours) for x in e.args)
        return binary("%", binary("//", a, b), c)
    if kind in ("ToFloat", "Identity"):
        return to_operand(e.args[0], ours)
    if kind in ("FloorToInt", "TruncToInt", "CeilToInt"):
        return _floor(e.args[0], ours, up=kind == "CeilToInt")
    raise NoExprError(str(e))


def to_tree(e: Any, ours: Mapping[sympy.Symbol, Expr]) -> Tree:
    """A sympy number or condition."""
    kind = type(e).__name__
    if kind in _COMPARE:
        left, right = e.args
        if kind == "Equality" and left.is_Symbol and isinstance(v := ours.get(left), Var) and v.kind == "bool":
            return v  # the only form in which a bool scalar appears
        return Cmp(_COMPARE[kind], to_operand(left, ours), to_operand(right, ours))
    if e in (sympy.true, sympy.false):
        return Truth(bool(e))
    return to_operand(e, ours)


def to_host(value: Any, ours: Mapping[sympy.Symbol, Expr]) -> Any:
    """A number of a traced graph (int, float, bool, or torch's symbolic ones) as a constant or a host expression."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        tree = to_tree(value.node.expr, ours)
        return simplify(tree) if isinstance(tree, Bin) and _whole(tree) else tree
    return value


def _whole(e: Any) -> bool:
    if isinstance(e, Bin):
        return _whole(e.left) and _whole(e.right)
    return isinstance(e, int) or (isinstance(e, Expr) and getattr(e, "kind", "int") == "int")
