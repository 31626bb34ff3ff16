"""A row of the op table: everything the project knows of one operation, as data.

Texts in a row are small languages, read once at import. A signature is ``"x: tensor, y: value | dim: dim = -1"``: operands, then
attributes. An ATen form is a Python expression over the parameters with ``torch``, ``F`` and the few helpers of
``hostir.torch_forms``; an overload says how an operation of torch is written with this row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hostir.graph.rules import Rule
from hostir.types import DTYPES

REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. ``kind``: tensor, tensors, value (tensor or number), number, size, sizes, new_sizes (-1 is
    worked out), int, dim, dims, new_dim, new_dims (of the result), index, start, stop, bool, dtype, str; ``optional`` ones may be None."""

    name: str
    kind: str
    operand: bool
    optional: bool = False
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class Overload:
    """``aten.<name>`` is this row when every schema argument in ``equal`` has that value and the unnamed ones their default.

    ``take`` gives each parameter's source: ``("arg", name)``, ``("const", value)``, ``("result", "shape" | "dtype")`` (of torch's result; the schema
    arguments that say the same count as named). A parameter ``_`` takes an argument that does not matter.
    """

    name: str
    take: tuple[tuple[str, tuple[str, Any]], ...]
    equal: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of torch that a trace keeps as this row, where torch itself would take it apart. The first row in the table's order
    whose type rule takes the arguments gets the call; where none does, torch's own decomposition is traced.

    ``path`` is where it is found (``torch.nn.functional.linear``), ``params`` its parameters with their defaults.
    """

    path: str
    params: tuple[tuple[str, Any], ...]
    take: tuple[tuple[str, tuple[str, Any]], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One operation.

    ``aten``: how it is evaluated; ``out``: the same, written into ``o`` (empty: none, "+": ``out=o`` is added to ``aten``).
    ``numbers``: which ``value`` operands that form takes as Python numbers; others become 0-d tensors first.
    ``triton``: an expression over the operands (after promotion by ``promotion``, in f32 for f16 and bf16), with ``tl`` and ``hd``,
    the device functions of hostir.kernels. For a reduction: how two elements ``a`` and ``b`` combine, from ``identity``.
    ``shard``, ``cost``: names of rules. ``decompose``: how a composite is written with other rows: statements in the text of units
    over the parameters' names, the last one naming ``result``; may be empty.
    ``flags``: view, random, library, reduction, composite, pointwise; shape (the result is the operand where the types are equal).
    """

    name: str
    params: tuple[Param, ...]
    rule: Rule
    aten: str
    out: str = ""
    numbers: tuple[str, ...] = ("y",)
    num_outs: int = 1
    overloads: tuple[Overload, ...] = ()
    functions: tuple[Function, ...] = ()
    promotion: str = ""
    triton: str = ""
    identity: str = ""
    shard: str = "none"
    cost: str = "pointwise"
    decompose: str = ""
    flags: frozenset[str] = frozenset()

    @property
    def operands(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if p.operand)

    @property
    def attributes(self) -> tuple[Param, ...]:
        return tuple(p for p in self.params if not p.operand)

    @property
    def view(self) -> bool:
        return "view" in self.flags

    @property
    def random(self) -> bool:
        return "random" in self.flags

    @property
    def library(self) -> bool:
        return "library" in self.flags

    @property
    def reduction(self) -> bool:
        return "reduction" in self.flags

    @property
    def composite(self) -> bool:
        return "composite" in self.flags

    @property
    def pointwise(self) -> bool:
        return "pointwise" in self.flags

    @property
    def signature(self) -> str:
        """For messages: ``sum(x, dims = none, keepdim = false, dtype = none)``."""
        from hostir.graph.show import show_arg

        return f"{self.name}({', '.join(p.name if p.default is REQUIRED else f'{p.name} = {show_arg(p.default)}' for p in self.params)})"


def row(
    name: str,
    signature: str,
    rule: Rule,
    aten: str,
    *,
    flags: str = "",
    overloads: Sequence[str] = (),
    functions: Sequence[str] = (),
    numbers: str = "y",
    **rest: Any,
) -> Row:
    """A Row from its texts."""
    return Row(
        name,
        tuple(_params(signature)),
        rule,
        aten,
        overloads=tuple(_overload(t) for t in overloads),
        functions=tuple(_function(t) for t in functions),
        numbers=tuple(numbers.split()),
        flags=frozenset(flags.split()),
        **rest,
    )


def _params(signature: str) -> list[Param]:
    operands, _, attributes = signature.partition("|")
    found = []
    for text, operand in ((operands, True), (attributes, False)):
        for item in re.split(r",(?![^\[(]*[\])])", text):
            if not item.strip():
                continue
            m = re.fullmatch(r"\s*(\w+): (\w+)(\?)?(?: = (.+?))?\s*", item)
            assert m, f"bad parameter {item!r}"
            default = REQUIRED if m[4] is None else _constant(m[4])
            found.append(Param(m[1], m[2], operand, m[3] is not None, None if m[3] and m[4] is None else default))
    return found


def _constant(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "inf": float("inf"), "-inf": float("-inf")}
    if text in words:
        return words[text]
    return DTYPES[text] if text in DTYPES else ast.literal_eval(text)


def _source(node: ast.expr) -> tuple[str, Any]:
    match node:
        case ast.Attribute(value=ast.Name(id="result"), attr=attr):
            return ("result", attr)
        case ast.Name(id=name) if name in DTYPES:
            return ("const", DTYPES[name])
        case ast.Name(id=name):
            return ("arg", name)
        case _:
            return ("const", ast.literal_eval(node))


def _call(text: str) -> tuple[str, tuple[tuple[str, tuple[str, Any]], ...], tuple[tuple[str, Any], ...]]:
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call), text
    take, equal = [], []
    for a in node.args:
        if isinstance(a, ast.Compare):
            assert isinstance(a.left, ast.Name)
            equal.append((a.left.id, ast.literal_eval(a.comparators[0])))
        else:
            assert isinstance(a, ast.Name), text
            take.append((a.id, _source(a)))
    take += [(k.arg, _source(k.value)) for k in node.keywords if k.arg]
    return ast.unparse(node.func), tuple(take), tuple(equal)


def _overload(text: str) -> Overload:
    return Overload(*_call(text))


def _function(text: str) -> Function:
    """``path(param, param=default) -> (x=param, …)``."""
    left, _, right = text.partition(" -> ")
    node = ast.parse(left, mode="eval").body
    assert isinstance(node, ast.Call), text
    params: list[tuple[str, Any]] = [(a.id, REQUIRED) for a in node.args if isinstance(a, ast.Name)]
    params += [(k.arg, ast.literal_eval(k.value)) for k in node.keywords if k.arg]
    return Function(ast.unparse(node.func), tuple(params), _call("f" + right)[1])


def form_names(text: str) -> Callable[[Callable[[str], str | None]], str]:
    """A form with its names replaced: ``form_names("torch.add(x, y)")(swap)``; keywords and attributes stay."""
    parts = re.split(r"((?<![\w.\"'])[A-Za-z_]\w*\b(?!\s*=[^=]))", text)

    def fill(swap: Callable[[str], str | None]) -> str:
        return "".join((swap(t) or t) if i % 2 else t for i, t in enumerate(parts))

    return fill
