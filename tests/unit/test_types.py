"""Dtypes, host expressions and tensor types: what folds, what never has a truth value, and what prints as text that parses back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostir.errors import BuildError
from hostir.ir.cursor import Cursor
from hostir.ir.lex import Text
from hostir.types import (
    DTYPES,
    Both,
    Either,
    Epoch,
    Expr,
    Leaf,
    Negated,
    Predicate,
    Rank,
    Size,
    Sym,
    TensorType,
    Tree,
    Truth,
    Var,
    as_predicate,
    binary,
    compare,
    dim,
    dims_equal,
    dims_of,
    dtype_of,
    evaluate,
    is_whole,
    key,
    leaves,
    maximum,
    minimum,
    number_text,
    operand,
    product,
    same,
    show_expr,
    simplify,
    source,
    substitute,
)

J: Final = Var("i")
K: Final = Var("k", "scalar", "int")
X: Final = Var("x", "scalar", "float")
T: Final = Var("t", "scalar", "bool")
M: Final = Sym("m")
LEAVES: Final = (J, K, M, Sym("n"), Rank("tp"), Size("tp"), Epoch())
VALUES: Final = {"i": 3, "k": -2, "x": 0.5, "t": True, "m": 7, "n": 1, "tp": 5}


def env(leaf: Leaf, values: dict[str, Any] = VALUES) -> Any:
    match leaf:
        case Var(name) | Sym(name):
            return values[name]
        case Rank(axis):
            return values[axis] - 1
        case Size(axis):
            return values[axis]
        case Epoch():
            return 9


def text_of(e: Tree) -> str:
    return show_expr(e)


def parsed(text: str) -> Tree:
    cursor = Cursor(Text(text))
    cursor.names = {f"%{v.name}": v for v in (J, K, X, T)}
    e = cursor.tree()
    assert cursor.token.kind == "end"
    return e


def integers(depth: int = 3) -> st.SearchStrategy[Any]:
    leaf = st.one_of(st.integers(-9, 9), st.sampled_from(LEAVES))
    ops = st.sampled_from(["+", "-", "*", "//", "%", "min", "max"])

    def bigger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.builds(_binary, ops, inner, inner)

    return st.recursive(leaf, bigger, max_leaves=2**depth)


def _binary(op: str, a: Any, b: Any) -> Any:
    """Division by a constant of at least 1, so that every expression has a value."""
    if op in ("//", "%"):
        b = abs(b) + 1 if isinstance(b, int) else 4
    return binary(op, a, b)


def conditions() -> st.SearchStrategy[Any]:
    leaf = st.one_of(
        st.builds(compare, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), integers(2), integers(2)),
        st.sampled_from([Truth(T), Truth(True), Truth(False)]),
    )
    return st.recursive(leaf, lambda c: st.one_of(st.builds(Both, c, c), st.builds(Either, c, c), st.builds(Negated, c)), max_leaves=6)


# ------------------------------------------------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_has_our_name_and_the_name_of_torch(name: str) -> None:
    import torch

    d = dtype_of(name)
    theirs = getattr(torch, d.torch_name)
    assert dtype_of(theirs) is dtype_of(d.torch_name) is dtype_of(d) is d
    assert d.itemsize == theirs.itemsize
    assert (d.kind == "float") == theirs.is_floating_point
    assert (d.kind == "complex") == theirs.is_complex
    assert str(d) == name


@pytest.mark.parametrize("wrong", ["float", "f33", None, 3, "torch.uint16"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(wrong: object) -> None:
    with pytest.raises(BuildError, match="is not a dtype that programs know") as caught:
        dtype_of(wrong)
    assert caught.value.expected == ", ".join(DTYPES)


# ------------------------------------------------------------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: J + 1, "%i + 1"), (lambda: 1 + J, "1 + %i"), (lambda: J - 1, "%i - 1"), (lambda: 1 - J, "1 - %i"), (lambda: J * 2, "%i * 2"),
        (lambda: 2 * J, "2 * %i"), (lambda: J // 2, "%i // 2"), (lambda: 7 // J, "7 // %i"), (lambda: J % 2, "%i % 2"),
        (lambda: 7 % J, "7 % %i"), (lambda: -J, "0 - %i"), (lambda: (J + 1) * 2, "(%i + 1) * 2"), (lambda: J - (K - 1), "%i - (%k - 1)"),
        (lambda: J - K - 1, "%i - %k - 1"), (lambda: J // K // 2, "%i // %k // 2"), (lambda: J // (K * 2), "%i // (%k * 2)"),
        (lambda: minimum(J, 3), "min(%i, 3)"), (lambda: maximum(J + 1, M), "max(%i + 1, m)"),
        (lambda: Rank("tp") + Size("tp"), "rank(tp) + size(tp)"),
        (lambda: Epoch() * 2, "epoch * 2"), (lambda: X * 1e-05, "%x * 1e-05"),
        (lambda: J * -1, "%i * -1"),
        (lambda: J == 0, "%i == 0"), (lambda: J != K, "%i != %k"), (lambda: J > 0, "%i > 0"), (lambda: J <= 2, "%i <= 2"),
        (lambda: (J < 1) & (K < 2), "%i < 1 & %k < 2"), (lambda: (J < 1) | (K < 2) & (J > 0), "%i < 1 | %k < 2 & %i > 0"),
        (lambda: ((J < 1) | (K < 2)) & (J > 0), "(%i < 1 | %k < 2) & %i > 0"), (lambda: ~(J < 1), "~%i < 1"),
        (lambda: ~((J < 1) & (K < 2)), "~(%i < 1 & %k < 2)"),
        (lambda: T & (J < 1), "%t & %i < 1"), (lambda: (J < 1) & T, "%i < 1 & %t"), (lambda: ~T, "~%t"), (lambda: T | ~T, "%t | ~%t"),
        (lambda: True & (J < 1), "true & %i < 1"), (lambda: (J < 1) | False, "%i < 1 | false"),
    ],
)  # fmt: skip
def test_arithmetic_and_comparison_build_trees_that_print_with_the_fewest_parentheses(make: Callable[[], Tree], text: str) -> None:
    e = make()
    assert isinstance(e, (Expr, Predicate))
    assert show_expr(e) == str(e) == text
    assert same(parsed(text), e)
    assert text in repr(e)


def test_two_numbers_fold_and_nothing_else_is_rewritten() -> None:
    assert binary("+", 2, 3) == 5
    assert binary("//", -7, 2) == -4
    assert binary("%", -7, 2) == 1
    assert minimum(2, 3) == 2
    assert maximum(2, 3) == 3
    assert isinstance(compare("<", 2, 3), Truth)
    assert show_expr(J + 0) == "%i + 0"
    assert show_expr(J * 1) == "%i * 1"


@pytest.mark.parametrize("op", ["//", "%"])
def test_division_by_the_number_zero_is_refused_when_it_is_written(op: str) -> None:
    with pytest.raises(BuildError, match=f"1 {op} 0: division by zero"):
        binary(op, 1, 0)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda: bool(J), "the host number %i"), (lambda: bool(J == 0), "the condition %i == 0"), (lambda: J < 1 < K, "the condition %i < 1"),
        (lambda: 1 if J == K else 2, "the condition %i == %k"), (lambda: (J < 1) and (K < 1), "the condition %i < 1"),
        (lambda: J in (K, M), "the condition %k == %i"), (lambda: not J, "the host number %i"), (lambda: max(J, 3), "the condition"),
    ],
)  # fmt: skip
def test_nothing_has_a_truth_value_while_a_program_is_built(use: Callable[[], object], what: str) -> None:
    with pytest.raises(BuildError, match="has no truth value while a program is being built") as caught:
        use()
    assert caught.value.message.startswith(what)
    assert "p.if_" in str(caught.value.cure)
    assert caught.value.loc is not None
    assert caught.value.loc.file == __file__


@pytest.mark.parametrize("use", [lambda: range(J), lambda: [0, 1][J], lambda: "ab"[J]])
def test_a_host_number_is_no_python_int(use: Callable[[], object]) -> None:
    with pytest.raises(BuildError, match="the host number %i has no value while a program is being built") as caught:
        use()
    assert "p.loop" in str(caught.value.cure)


@pytest.mark.parametrize("wrong", ["a", None, 1j, [1], J < 2, T])
def test_what_is_no_number_cannot_be_part_of_an_expression(wrong: Any) -> None:
    with pytest.raises(BuildError, match=r"cannot be part of a host expression|is a condition, not a number"):
        binary("+", J, wrong)
    with pytest.raises(BuildError):
        compare("<", wrong, J)


def test_numbers_of_other_libraries_become_pythons() -> None:
    import numpy as np
    import torch

    for x in (np.int64(4), torch.tensor(4), True):
        assert type(operand(x)) is int
    assert type(operand(np.float64(0.5))) is float
    assert show_expr(J + np.int64(4)) == "%i + 4"


@pytest.mark.parametrize("wrong", [1, J, "x", None, 0.5])
def test_what_is_no_condition_is_refused(wrong: object) -> None:
    with pytest.raises(BuildError, match="is not a condition") as caught:
        as_predicate(wrong)
    assert caught.value.cure == "compare it: for example `x != 0`"


def test_bitwise_operators_of_numbers_are_refused() -> None:
    for use in (lambda: J & 1, lambda: J | K, lambda: ~J):
        with pytest.raises(BuildError, match="%i is not a condition"):
            use()


@pytest.mark.parametrize(("x", "text"), [(1, "1"), (-3, "-3"), (0.1, "0.1"), (1e-05, "1e-05"), (1e16, "1e+16"), (float("inf"), "inf"),
    (float("-inf"), "-inf"), (float("nan"), "nan"), (True, "true"), (False, "false"), (-0.0, "-0.0")])  # fmt: skip
def test_numbers_print_as_the_grammar_has_them(x: float, text: str) -> None:
    assert number_text(x) == text
    back = parsed(text)
    assert repr(back.value if isinstance(back, Truth) else back) == repr(x)


@settings(deadline=None)
@given(integers())
def test_expressions_survive_text(e: Any) -> None:
    assert same(parsed(show_expr(e)), e)


@settings(deadline=None)
@given(conditions())
def test_conditions_survive_text(c: Any) -> None:
    assert same(parsed(show_expr(c)), c)


@settings(deadline=None)
@given(integers(), st.integers(-5, 5), st.integers(1, 9))
def test_simplifying_keeps_the_value(e: Any, i: int, m: int) -> None:
    values = {**VALUES, "i": i, "m": m}
    assert evaluate(simplify(e), lambda leaf: env(leaf, values)) == evaluate(e, lambda leaf: env(leaf, values))


@settings(deadline=None)
@given(integers(2), integers(2))
def test_sizes_that_are_called_equal_or_different_are(a: Any, b: Any) -> None:
    answer = dims_equal(a, b)
    values = [evaluate(a, env) == evaluate(b, env), evaluate(a, lambda x: env(x, {**VALUES, "i": 0, "m": 2, "k": 5}))
        == evaluate(b, lambda x: env(x, {**VALUES, "i": 0, "m": 2, "k": 5}))]  # fmt: skip
    assert answer is None or values == [answer, answer]


@settings(deadline=None)
@given(st.one_of(integers(), conditions()))
def test_the_python_source_of_an_expression_has_its_value(e: Any) -> None:
    names: dict[str, Any] = {}

    def name(leaf: Leaf) -> str:
        found = f"v{len(names)}"
        names[found] = env(leaf)
        return found

    text = source(e, name)
    assert eval(text, {"min": min, "max": max, **names}) == evaluate(e, env)


@settings(deadline=None)
@given(integers())
def test_substitution_folds_and_keeps_the_value(e: Any) -> None:
    assert substitute(e, env) == evaluate(e, env)
    assert same(substitute(e, lambda leaf: leaf), e)


def test_conditions_are_substituted_too() -> None:
    assert same(substitute(Truth(T), lambda _: True), Truth(True))
    assert same(substitute((J < 2) & ~T, lambda leaf: leaf), (J < 2) & ~T)
    assert show_expr(substitute((J < M) | (J == K), lambda leaf: 1 if leaf is J else leaf)) == "1 < m | 1 == %k"


def test_and_or_do_not_look_at_what_cannot_matter() -> None:
    asked: list[Leaf] = []

    def spy(leaf: Leaf) -> Any:
        asked.append(leaf)
        return 0

    assert evaluate((J < 0) & (K < 0), spy) is False
    assert evaluate((J == 0) | (K < 0), spy) is True
    assert asked == [J, J]


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (M, M, True), (M, Sym("m"), True), (M, Sym("n"), None), (M + 1, M, False), (M * 2, M + M, True), (2 * M // 2, M, True),
        ((M + 1) * (M + 1), M * M + 2 * M + 1, True), (M // 2, M, None), (M * 4 % 2, 0, True), (Size("tp"), Size("tp"), True),
        (Size("tp"), Size("dp"), None), (3, 3, True), (3, 4, False), (minimum(M, 4), minimum(M, 4), True), (minimum(M, 4), 4, None), (J, J, True),
        (J, Var("i"), None), ((J + 1) * 2 - J * 2, 2, True),
    ],
)  # fmt: skip
def test_equality_of_sizes_is_known_or_left_to_a_run(a: Any, b: Any, answer: bool | None) -> None:
    assert dims_equal(a, b) is answer
    assert dims_equal(b, a) is answer


def test_same_is_structural_and_variables_are_themselves() -> None:
    assert same(J + M, J + Sym("m"))
    assert not same(J + M, M + J)
    assert not same(J, Var("i"))
    assert not same(1, J > 1)
    assert same(2, 2)
    assert len({key(J + 1), key(J + 1), key(J + 2)}) == 2


def test_leaves_come_in_order_with_repeats() -> None:
    found = list(leaves((J + M < 2) & (Rank("tp") > J) & (J < 3) | ~T | (Epoch() > 1)))
    assert [show_expr(x) for x in found] == ["%i", "m", "rank(tp)", "%i", "%i", "%t", "epoch"]


def test_whole_numbers_have_no_float_in_them() -> None:
    assert is_whole(J + M // 2)
    assert is_whole(3)
    assert not is_whole(J * 0.5)
    assert not is_whole(M + X)
    assert not is_whole(2.0)


def test_a_product_of_sizes_is_simplified() -> None:
    assert product(()) == 1
    assert product((2, 3)) == 6
    assert show_expr(product((2, M, 3))) == "m * 6"
    assert product((M, 0)) == 0


# ------------------------------------------------------------------------------------------------------------------- tensor types


def test_a_tensor_type_prints_without_its_default_memory() -> None:
    assert str(TensorType(dtype_of("bf16"), (2, M, J + 1))) == "bf16[2, m, %i + 1]"
    assert str(TensorType(dtype_of("f32"), (), "symmetric")) == "f32[] symmetric"


def test_equal_types_are_equal_values() -> None:
    a, b = TensorType(dtype_of("f32"), (2, M)), TensorType(dtype_of("f32"), (2, Sym("m")))
    assert a == b
    assert hash(a) == hash(b)
    assert a != TensorType(dtype_of("f32"), (2, M), "host")
    assert a != TensorType(dtype_of("f16"), (2, M))
    assert a != "f32[2, m]"


def test_types_agree_when_dtype_and_sizes_do() -> None:
    f32, f16 = dtype_of("f32"), dtype_of("f16")
    assert TensorType(f32, (2, M)).agrees(TensorType(f32, (2, M), "host")) is True
    assert TensorType(f32, (2, M)).agrees(TensorType(f32, (2, 4))) is None
    assert TensorType(f32, (2, M)).agrees(TensorType(f32, (3, 4))) is False
    assert TensorType(f32, (2,)).agrees(TensorType(f16, (2,))) is False
    assert TensorType(f32, (2,)).agrees(TensorType(f32, (2, 1))) is False


def test_shapes_are_given_as_an_int_a_size_or_several() -> None:
    assert dims_of(3) == (3,)
    assert dims_of([2, 3]) == (2, 3)
    assert same(dims_of(M)[0], M)
    assert dims_of(()) == ()


@pytest.mark.parametrize("wrong", [-1, 2.5])
def test_a_size_is_a_whole_number_of_at_least_0(wrong: Any) -> None:
    with pytest.raises(BuildError, match=f"{wrong} is not a size"):
        dim(wrong)


@settings(max_examples=20)
@given(st.integers(0, 2**62))
def test_sizes_are_exact(n: int) -> None:
    assert dim(n) == n
