"""Operations are bound, brought to one form and refused in one place."""

from __future__ import annotations

import re

import pytest
import torch

import hostir as hir
from hostir.errors import BuildError
from hostir.graph.fusion import Fusion
from hostir.graph.row import Row
from hostir.graph.show import show_op
from hostir.graph.table import OVERLOADS, TABLE, apply
from hostir.torch_forms import callable_form
from hostir.types import Sym

SPECIFIED = """add mul sub div pow exp log sqrt rsqrt erf tanh sigmoid relu gelu silu where maximum minimum abs neg cast sum mean amax amin
prod var softmax log_softmax layer_norm rms_norm mm bmm matmul linear addmm transpose permute reshape broadcast expand squeeze unsqueeze
slice select cat pad gather index_select embedding scatter_add cumsum argmax topk iota full rand dropout cross_entropy sdpa set""".split()


@pytest.fixture
def f() -> Fusion:
    return Fusion("f")


def text(f: Fusion) -> str:
    return show_op(f.ops[-1])


def test_every_specified_operation_has_a_row() -> None:
    assert [n for n in SPECIFIED if n not in TABLE] == []


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda r: r.name)
def test_a_rows_texts_name_only_its_parameters(row: Row) -> None:
    callable_form(row)
    names = {p.name for p in row.params}
    known = names | {"torch", "F", "h", "o", "device", "None", "True", "False", "or"}
    for form in (row.aten, "" if row.out == "+" else row.out):
        assert set(re.findall(r"(?<![\w.\"'])[A-Za-z_]\w*\b(?!\s*=[^=])", form)) <= known, form
    triton = set(re.findall(r"(?<![\w.\"'])[A-Za-z_]\w*", row.triton))
    assert triton <= names | {"tl", "hd"} | ({"a", "b"} if row.identity else set())
    for o in row.overloads:
        assert {k for k, _ in o.take if k.strip("_")} <= names


@pytest.mark.parametrize("name", sorted(OVERLOADS))
def test_every_listed_overload_exists_in_torch(name: str) -> None:
    packet, overload = name.split(".")
    target = getattr(getattr(torch.ops.aten, packet), overload)
    arguments = {a.name for a in target._schema.arguments}
    for _, o in OVERLOADS[name]:
        assert {what for _, (source, what) in o.take if source == "arg"} | {k for k, _ in o.equal} <= arguments


def test_defaults_are_left_out_and_dims_count_from_the_front(f: Fusion) -> None:
    x = f.input((4, 5, 6), "f32", name="x")
    for attrs, want in [
        ({"dims": (-1,), "keepdim": False}, "sum(%x, dims = [2])"),
        ({"dims": (), "keepdim": True}, "sum(%x, keepdim = true)"),
        ({"dims": 0, "dtype": torch.float64}, "sum(%x, dims = [0], dtype = f64)"),
    ]:
        apply(f, "sum", [x], attrs)
        assert text(f) == f"%t = {want}"
    apply(f, "topk", [x], {"k": 2, "dim": -1})
    assert text(f) == "%t, %t = topk(%x, k = 2)"
    apply(f, "topk", [x], {"k": 2, "dim": 0})
    assert text(f) == "%t, %t = topk(%x, k = 2, dim = 0)"
    apply(f, "slice", [x], {"dim": -2, "start": -3, "stop": 2**63 - 1})
    assert text(f) == "%t = slice(%x, dim = 1, start = 2)"
    apply(f, "select", [x], {"dim": -1, "index": -1})
    assert text(f) == "%t = select(%x, dim = 2, index = 5)"
    apply(f, "reshape", [x], {"shape": (-1, 6)})
    assert text(f) == "%t = reshape(%x, shape = [20, 6])"
    apply(f, "unsqueeze", [x], {"dim": -1})
    assert text(f) == "%t = unsqueeze(%x, dim = 3)"


def test_attributes_may_be_given_by_position(f: Fusion) -> None:
    x = f.input((4, 5), "f32", name="x")
    apply(f, "sum", [x, (0,), True])
    assert text(f) == "%t = sum(%x, dims = [0], keepdim = true)"


def test_missing_operands_in_the_middle_are_none(f: Fusion) -> None:
    x, b = f.input((4, 5), "f32", name="x"), f.input((5,), "f32", name="b")
    apply(f, "layer_norm", [x], {"b": b, "shape": (5,)})
    assert text(f) == "%t = layer_norm(%x, none, %b, shape = [5])"


def test_an_end_past_a_symbol_stays(f: Fusion) -> None:
    x = f.input((Sym("m"),), "f32", name="x")
    apply(f, "slice", [x], {"stop": 64})
    assert text(f) == "%t = slice(%x, stop = 64)"
    assert str(f.ops[-1].outs[0].type) == "f32[64]"


def refused(f: Fusion, name: str, *args: object, **attrs: object) -> str:
    with pytest.raises(BuildError) as e:
        apply(f, name, args, attrs)
    assert e.value.loc is not None
    assert e.value.loc.file == __file__
    return str(e.value)


def test_wrong_arguments_are_refused_with_the_signature(f: Fusion) -> None:
    x = f.input((4, 5), "f32", name="x")
    assert "expected: sum(x, dims = none, keepdim = false, dtype = none)" in refused(f, "sum", x, axis=1)
    assert "sum needs x" in refused(f, "sum")
    assert "takes at most 2 arguments" in refused(f, "add", x, x, x)
    assert "given x twice" in refused(f, "sum", x, x=x)
    assert "x of sum is a tensor" in refused(f, "sum", 3)
    assert "keepdim of sum is true or false" in refused(f, "sum", x, keepdim=1)
    assert "dims of sum is a list of ints" in refused(f, "sum", x, dims=[1.5])
    assert "y of add is a tensor or a number" in refused(f, "add", x, "2")
    assert "is not a dtype" in refused(f, "cast", x, dtype="f33")


def test_wrong_types_are_refused_with_the_statement_and_both_types(f: Fusion) -> None:
    x, y = f.input((4, 5), "f32", name="x"), f.input((4, 5), "f32", name="y")
    message = refused(f, "mm", x, y)
    assert "statement: mm(%x, %y)" in message
    assert "expected: 5" in message
    assert "got: 4" in message
    assert "dim 2 does not exist" in refused(f, "softmax", x, dim=2)


def test_unknown_names_suggest_near_ones(f: Fusion) -> None:
    assert "softmax" in refused(f, "sofmax")


def test_refused_operations_are_not_added(f: Fusion) -> None:
    x = f.input((4, 5), "f32")
    refused(f, "mm", x, x)
    assert f.ops == []


def test_opaque_operations_have_unknown_types_that_spread(f: Fusion) -> None:
    x = f.input((4,), "f32", name="x")
    (y,) = apply(f, "aten.nonzero.default", [x])
    (z,) = apply(f, "add", [y, 1])
    assert (y.type, z.type) == (None, None)
    with pytest.raises(BuildError, match=r"aten\.nonzero\.default"):
        _ = y.shape


def test_operands_of_another_fusion_are_refused(f: Fusion) -> None:
    other = Fusion("other")
    with pytest.raises(BuildError, match="belongs to the fusion other"):
        apply(f, "add", [f.input((2,), "f32"), other.input((2,), "f32")])


def test_ops_are_functions_made_from_the_table() -> None:
    f = hir.Fusion("f")
    x = f.input((3, 4), torch.float32, name="x")
    values, indices = hir.ops.topk(x, 2)
    assert (str(values.type), str(indices.type)) == ("f32[3, 2]", "i64[3, 2]")
    assert str(hir.ops.full((2,), 1.5, fusion=f).type) == "f32[2]"
    assert set(dir(hir.ops)) == set(TABLE)
    with pytest.raises(BuildError, match="no tensor among its arguments"):
        hir.ops.full((2,), 1.5)
    with pytest.raises(AttributeError, match="no operation named 'addd'"):
        hir.ops.addd(x, x)
