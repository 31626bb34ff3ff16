"""Every row's type rule against torch itself, over dtypes, kinds of operand (tensor, 0-d tensor, number) and shapes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hostir.errors import BuildError
from hostir.graph.fusion import Fusion
from hostir.graph.row import Row
from hostir.graph.table import TABLE, apply
from hostir.torch_forms import callable_form
from hostir.torch_types import from_torch, to_torch
from hostir.types import DTYPES, DType, Sym

Case = tuple[tuple[Any, ...], dict[str, Any]]  # operands as (dtype, shape) or numbers; attributes
DT = [d.name for d in DTYPES.values() if not d.name.startswith("f8")]
FLOATS = ["f64", "f32", "f16", "bf16"]
NUMBERS = (True, 2, 1.5)
# torch takes these, the table does not: they are traced as opaque operations
NARROWER = {("amax", "c64"), ("amin", "c64"), ("rms_norm", "c64"), ("pow", "bool")}


def pairs() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    yield from [((2, 3), (2, 3)), ((2, 3), ()), ((), (2, 3)), ((), ()), ((3,), (2, 1)), ((0, 3), (1, 3))]


def pointwise_cases(row: Row) -> Iterator[Case]:
    if row.name == "where":
        for a, b in itertools.product(DT, DT):
            for sa, sb in [((2, 3), (2, 3)), ((2, 3), ()), ((), ())]:
                yield (("bool", (2, 3)), (a, sa), (b, sb)), {}
        for a, v in itertools.product(DT, NUMBERS):
            yield (("bool", (3,)), (a, (3,)), v), {}
            yield (("bool", (3,)), v, (a, ())), {}
    elif row.name == "cast":
        for a, b in itertools.product(DT, DT):
            yield ((a, (2, 0)),), {"dtype": DTYPES[b]}
    elif row.name == "clamp":
        for d, (low, high) in itertools.product(DT, [(1.5, None), (None, 2), (0.5, True), (0, 4)]):
            yield ((d, (2,)),), {"low": low, "high": high}
    elif len(row.operands) == 1:
        for d, s in itertools.product(DT, [(2, 3), (), (0, 3), (1, 1)]):
            yield ((d, s),), {}
    else:
        for a, b in itertools.product(DT, DT):
            for sa, sb in pairs():
                yield ((a, sa), (b, sb)), {}
        for d, s, v in itertools.product(DT, [(2, 3), ()], NUMBERS):
            if "y" in row.numbers:
                yield ((d, s), v), {}
            if "x" in row.numbers:
                yield (v, (d, s)), {}


def reduction_cases(row: Row) -> Iterator[Case]:
    for d, s, keep in itertools.product(DT, [(2, 3, 4), (), (0, 3), (3, 0), (8, 1, 5, 1)], [False, True]):
        if any(p.name == "dims" for p in row.params):
            for dims in [None, (0,), (-1,), (0, 1), (1, 3)]:
                if dims is None or max(dims) < max(len(s), 1):
                    yield ((d, s),), {"dims": dims, "keepdim": keep}
        else:
            for dim in [None, 0, -1]:
                yield ((d, s),), {"dim": dim, "keepdim": keep}


def other_cases() -> Iterator[tuple[str, Any]]:
    x: tuple[str, tuple[int, ...]]
    attrs: dict[str, Any]
    for d in DT:
        x = (d, (2, 3))
        for s, dt in itertools.product([(2, 3), ()], [None, DTYPES["f32"]]):
            for name in ("softmax", "log_softmax", "cumsum"):
                yield name, (((d, s),), {"dim": -1, "dtype": dt})
        for s in [(2, 3), (), (0, 3)]:
            yield "topk", (((d, s),), {"k": 1})
            yield "topk", (((d, s),), {"k": 3, "dim": 0})
        yield "layer_norm", ((x,), {"shape": (3,)})
        yield "rms_norm", ((x,), {"shape": (3,)})
        for e in DT:
            yield "layer_norm", ((x, (e, (3,)), (e, (3,))), {"shape": (3,)})
            yield "rms_norm", ((x, (e, (3,))), {"shape": (3,)})
            yield "mm", ((x, (e, (3, 4))), {})
            yield "bmm", (((d, (5, 2, 3)), (e, (5, 3, 4))), {})
            yield "addmm", (((e, (4,)), x, (d, (3, 4))), {})
            yield "baddbmm", (((e, (2, 4)), (d, (5, 2, 3)), (d, (5, 3, 4))), {})
            yield "linear", ((x, (e, (4, 3))), {})
            yield "linear", ((x, (d, (4, 3)), (e, (4,))), {})
            yield "cat", (([x, (e, (4, 3))],), {})
            yield "stack", (([x, (e, (2, 3))],), {"dim": -1})
        for sa, sb in [
            ((2, 3), (3, 4)), ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (1, 3, 4)),
            ((6, 1, 2, 3), (5, 3, 4)), ((2, 3), (2, 3)), ((), (3,)), ((0, 3), (3, 2)), ((2, 0), (0, 2)),
        ]:  # fmt: skip
            yield "matmul", (((d, sa), (d, sb)), {})
        for sa, sb in [((3,), (4, 3)), ((2, 5, 3), (4, 3)), ((2, 3), (3,)), ((3,), (3,))]:
            yield "linear", (((d, sa), (d, sb)), {})
        yield "dropout", ((x,), {})
        yield "tril", ((x,), {})
        yield "triu", (((d, (2,)),), {})
        for s, t in [((5, 7), (5,)), ((7,), ()), ((2, 7, 3), (2, 3)), ((5, 7), (5, 7)), ((5, 7), (6,))]:
            for td, red in itertools.product(["i64", "i32", "f32"], ["mean", "sum", "none"]):
                yield "cross_entropy", (((d, s), (td, t)), {"reduction": red})
        for q, k, v in [((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 9)), ((5, 8), (6, 8), (6, 9)), ((2, 4, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8))]:
            yield "sdpa", (((d, q), (d, k), (d, v)), {})
        yield "sdpa", (((d, (2, 4, 5, 8)), (d, (2, 2, 6, 8)), (d, (2, 2, 6, 8))), {"gqa": True})
        for i in ("i64", "i32", "i16", "bool"):
            yield "gather", ((x, (i, (2, 2))), {"dim": 1})
            yield "index_select", ((x, (i, (2,))), {"dim": 1})
            yield "embedding", ((x, (i, (2, 4))), {})
            yield "scatter_add", ((x, (i, (2, 2)), (d, (2, 2))), {"dim": 1})
        yield "gather", (((d, ()), ("i64", ())), {"dim": 0})
        yield "gather", (((d, ()), ("i64", (3,))), {"dim": 0})
        yield "index_select", (((d, ()), ("i64", ())), {"dim": 0})
        yield "index_select", (((d, (3,)), ("i64", ())), {"dim": 0})
        yield "scatter_add", (((d, ()), ("i64", ()), (d, ())), {"dim": 0})
    x = ("f32", (2, 3, 1, 4))
    views: list[tuple[str, dict[str, Any]]] = [
        ("transpose", {"dim0": 1, "dim1": -1}), ("permute", {"dims": (3, 0, 2, 1)}), ("permute", {"dims": (0, 0, 1, 2)}),
        ("reshape", {"shape": (4, -1)}), ("reshape", {"shape": (5, -1)}), ("reshape", {"shape": (24,)}), ("expand", {"shape": (5, -1, 3, 7, 4)}),
        ("expand", {"shape": (2, 3)}), ("squeeze", {"dims": (2,)}), ("squeeze", {"dims": (0, 2)}), ("unsqueeze", {"dim": -1}),
        ("unsqueeze", {"dim": 5}),
        ("slice", {"dim": 1, "start": 1}), ("slice", {"dim": -1, "start": 1, "stop": 3}), ("slice", {"dim": 3, "stop": 4, "step": 3}),
        ("select", {"dim": 1, "index": -1}), ("select", {"dim": 1, "index": 3}), ("pad", {"pads": (1, 2, 0, 1)}), ("pad", {"pads": (-1, 0)}),
        ("flip", {"dims": (0, -1)}), ("flip", {"dims": (0, 0)}), ("broadcast", {"dims": (0, 3)}),
    ]  # fmt: skip
    for name, attrs in views:
        yield name, ((x,), attrs)
    yield "transpose", ((("f32", ()),), {"dim0": 0, "dim1": -1})
    yield "select", ((("f32", ()),), {"dim": 0, "index": 0})
    yield "reshape", ((("f32", (0, 3)),), {"shape": (3, 0)})
    yield "slice_scatter", ((x, ("f32", (2, 2, 1, 4))), {"dim": 1, "start": 1})
    yield "select_scatter", ((x, ("f32", (2, 1, 4))), {"dim": 1, "index": 2})
    counts: list[dict[str, Any]] = [{"stop": 7}, {"start": 2, "stop": 9, "step": 3}, {"start": 9, "stop": 2, "step": -2}, {"stop": 3}]
    counts.append({"stop": 3, "dtype": DTYPES["f32"]})
    for attrs in counts:
        yield "iota", ((), attrs)
    for value, dtype in [(1, None), (1.5, None), (True, None), (2, DTYPES["bf16"])]:
        yield "full", ((), {"shape": (2, 0), "value": value, "dtype": dtype})
    for d in ("f32", "bf16", "f64"):
        yield "rand", ((), {"shape": (2,), "dtype": DTYPES[d]})
        yield "randn", ((), {"shape": (), "dtype": DTYPES[d]})


def ours(row: Row, case: Case) -> Any:
    f = Fusion()

    def operand(v: Any) -> Any:
        return [operand(x) for x in v] if isinstance(v, list) else f.input(v[1], v[0]) if isinstance(v, tuple) else v

    try:
        return [(t.known.dtype.name, t.known.dims) for t in apply(f, row.name, [operand(v) for v in case[0]], case[1])]
    except BuildError as e:
        return e


def theirs(row: Row, case: Case, device: str) -> Any:
    def operand(v: Any, name: str) -> Any:
        if isinstance(v, list):
            return [operand(x, name) for x in v]
        if not isinstance(v, tuple):
            return v
        fill = torch.zeros if name in ("index", "target") else torch.ones
        return fill(v[1], dtype=to_torch(DTYPES[v[0]]), device=device)

    values = {p.name: p.default for p in row.params}
    values |= {p.name: operand(v, p.name) for p, v in zip(row.params, case[0], strict=False)}
    values |= case[1]
    values = {k: to_torch(v) if isinstance(v, DType) else v for k, v in values.items()}
    try:
        result = callable_form(row)(**values, **({"device": device} if "device" in row.aten else {}))
    except Exception as e:  # noqa: BLE001
        return e
    found = [(from_torch(t.dtype), tuple(t.shape)) for t in (result if isinstance(result, tuple) else (result,))]
    return [(None if d is None else d.name, s) for d, s in found]


def agree(row: Row, case: Case) -> None:
    mine = ours(row, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = theirs(row, case, "cpu")
        if isinstance(real, Exception) and "not implemented for" in str(real) and not isinstance(mine, Exception):
            real = theirs(row, case, "meta")  # no kernel on this device: the types are still torch's
    if not isinstance(mine, Exception):
        assert mine == real, f"{row.name}{case}"
    elif not isinstance(real, Exception):
        dtypes = {v[0] for v in case[0] if isinstance(v, tuple)}
        nameless = any(d is None for d, _ in real)
        assert nameless or any((row.name, d) in NARROWER for d in dtypes), f"{row.name}{case}: refused ({mine}), torch gives {real}"


@pytest.mark.parametrize("name", [n for n, r in TABLE.items() if r.pointwise and r.operands])
def test_pointwise_types_are_torchs(name: str) -> None:
    row = TABLE[name]
    for case in pointwise_cases(row):
        agree(row, case)


@pytest.mark.parametrize("name", [n for n, r in TABLE.items() if r.reduction])
def test_reduction_types_are_torchs(name: str) -> None:
    for case in reduction_cases(TABLE[name]):
        agree(TABLE[name], case)


OTHERS = [n for n, r in TABLE.items() if not r.reduction and not (r.pointwise and r.operands)]


@pytest.mark.parametrize("name", OTHERS)
def test_other_types_are_torchs(name: str) -> None:
    cases = [case for n, case in other_cases() if n == name]
    assert cases, f"no case for {name}"
    for case in cases:
        agree(TABLE[name], case)


# ------------------------------------------------------------------------------------------------------------ symbolic sizes

M, N = Sym("m"), Sym("n")


def typed(name: str, *shapes: Any, **attrs: Any) -> str:
    f = Fusion()
    return str(apply(f, name, [f.input(s, "f32") for s in shapes], attrs)[0].type)


def test_sizes_stay_symbolic_through_rules() -> None:
    assert typed("add", (M, 8), (8,)) == "f32[m, 8]"
    assert typed("add", (M, 1), (1, N)) == "f32[m, n]"
    assert typed("mm", (M, 8), (8, N)) == "f32[m, n]"
    assert typed("reshape", (M, 8), shape=(-1, 4)) == "f32[m * 2, 4]"
    assert typed("reshape", (M, N, 4), shape=(M, -1)) == "f32[m, n * 4]"
    assert typed("slice", (M,), start=1) == "f32[m - 1]"
    assert typed("slice", (M,), start=1, stop=-1, step=2) == "f32[(m - 1) // 2]"
    assert typed("pad", (M,), pads=(1, 2)) == "f32[m + 3]"
    assert typed("sum", (M, N), dims=(0,), keepdim=True) == "f32[1, n]"


def test_concatenated_symbolic_sizes_add_up() -> None:
    f = Fusion()
    x, y = f.input((M, 4), "f32"), f.input((N, 4), "f32")
    assert str(apply(f, "cat", [[x, y, x]])[0].type) == "f32[m * 2 + n, 4]"


def test_equal_sizes_are_not_equal_symbols() -> None:
    f = Fusion()
    with pytest.raises(BuildError, match="sizes m and n do not agree"):
        apply(f, "add", [f.input((M,), "f32"), f.input((N,), "f32")])


def test_a_symbol_is_not_one() -> None:
    f = Fusion()
    with pytest.raises(BuildError, match="do not agree"):
        apply(f, "add", [f.input((M,), "f32"), f.input((4,), "f32")])


@pytest.mark.parametrize(("kind", "dtype"), [("int", "i64"), ("float", "f32"), ("bool", "bool")])
def test_host_scalars_promote_like_numbers(kind: Any, dtype: str) -> None:
    f = Fusion()
    k = f.scalar("k", kind)
    for d in DT:
        x = f.input((2,), d)
        number = {"int": 2, "float": 1.5, "bool": True}[kind]
        assert apply(f, "mul", [x, k])[0].dtype == apply(f, "mul", [x, number])[0].dtype
    assert apply(f, "full", (), {"shape": (), "value": k})[0].dtype.name == dtype
