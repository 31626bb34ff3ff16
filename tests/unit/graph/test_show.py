"""The text of a unit is canonical."""

from __future__ import annotations

import hostir as hir
from hostir.graph.fusion import Fusion
from hostir.graph.show import show_fusion
from hostir.graph.table import apply
from hostir.types import Sym


def test_a_unit_looks_as_the_golden_text() -> None:
    f = Fusion("mm_acc")
    a, b, c = f.input((2, 8), "f32", name="a"), f.input((8, 3), "f32", name="b"), f.input((2, 3), "f32", name="c")
    (t,) = apply(f, "mm", [a, b])
    (o,) = apply(f, "add", [c, t], hints=["o"])
    f.output(o)
    assert str(f) == ("unit @mm_acc(%a: f32[2, 8], %b: f32[8, 3], %c: f32[2, 3]) {\n  %t = mm(%a, %b)\n  %o = add(%c, %t)\n  return %o\n}")


def test_names_are_made_unique_in_order_of_appearance() -> None:
    f = Fusion("f")
    x, y = f.input((2,), "f32", name="x"), f.input((2,), "f32", name="x")
    (t,) = apply(f, "add", [y, x], hints=["x"])
    f.output(t)
    f.output(x, alias=y)
    assert str(f) == "unit @f(%x: f32[2], %x_1: f32[2]) {\n  %x_2 = add(%x_1, %x)\n  return %x_2, %x\n}"


def test_every_kind_of_argument_has_a_text() -> None:
    f = Fusion("f")
    m = Sym("m")
    x = f.input((m, 8), "bf16", name="x")
    k, s = f.scalar("k"), f.scalar("s", "float")
    apply(f, "mul", [x, k * 2 + 1])
    apply(f, "add", [x, float("-inf")])
    apply(f, "add", [x, s])
    apply(f, "cast", [x], {"dtype": "f8e4m3"})
    apply(f, "cat", [[x, x]], {"dim": 1})
    apply(f, "gelu", [x], {"approximate": "tanh"})
    apply(f, "aten.index.Tensor", [x, [None, x]], {"flag": True})
    apply(f, "expand", [x], {"shape": (3, m, 8)})
    assert [line.strip() for line in str(f).splitlines()[:-2]] == [
        "unit @f(%x: bf16[m, 8], %k: int, %s: float) {",
        "%t = mul(%x, %k * 2 + 1)",
        "%t_1 = add(%x, -inf)",
        "%t_2 = add(%x, %s)",
        "%t_3 = cast(%x, dtype = f8e4m3)",
        "%t_4 = cat([%x, %x], dim = 1)",
        '%t_5 = gelu(%x, approximate = "tanh")',
        "%t_6 = aten.index.Tensor(%x, [none, %x], flag = true)",
        "%t_7 = expand(%x, shape = [3, m, 8])",
    ]


def test_rename_makes_equal_bodies_equal_texts() -> None:
    def build(name: str) -> Fusion:
        f = Fusion("f")
        x = f.input((2,), "f32", name=name)
        f.output(hir.ops.exp(x))
        return f

    a, b = build("a"), build("b")
    assert str(a) != str(b)
    assert show_fusion(a, "u", lambda _: "v") == show_fusion(b, "u", lambda _: "v") == "unit @u(%v: f32[2]) {\n  %v_1 = exp(%v)\n  return %v_1\n}"
