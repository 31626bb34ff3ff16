"""Evaluation by ATen: right on any layout, and all inputs are read before any output is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hostir as hir
from hostir.dispatch.evaluate import Evaluator, evaluator
from hostir.errors import BuildError, InputError
from hostir.graph.fusion import Fusion
from hostir.graph.row import REQUIRED, Row
from hostir.graph.table import TABLE, apply
from hostir.torch_types import from_torch, to_torch
from hostir.types import Sym

M, N = Sym("m"), Sym("n")


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape).to(dtype)


def evaluation(fn: Callable[..., Any], *args: torch.Tensor) -> Evaluator:
    return evaluator(hir.trace(fn, *(hir.spec(tuple(t.shape), from_torch(t.dtype)) for t in args)))


def into(fn: Callable[..., Any], args: list[torch.Tensor], outs: list[torch.Tensor]) -> Evaluator:
    """Evaluate into ``outs`` and compare with what the function gives on copies of the arguments."""
    want = fn(*[a.clone() for a in args])
    want = want if isinstance(want, tuple) else (want,)
    want = [w.clone() for w in want]
    e = evaluation(fn, *args)
    found = e.run(args, outs)
    for f, o, w in zip(found, outs, want, strict=True):
        assert f is o
        assert torch.equal(o, w)
    return e


# ------------------------------------------------------------------------------------------------------ shared memory


def test_a_swap_needs_one_temporary() -> None:
    x, y = numbered(3), numbered(3) + 10
    e = into(lambda x, y: (y, x), [x, y], [x, y])
    assert (x.tolist(), y.tolist()) == ([10, 11, 12], [0, 1, 2])
    assert e.source([x, y], [x, y]).count("keep(") == 1


def test_a_product_may_overwrite_its_operand() -> None:
    y, w = numbered(3, 3), numbered(3, 3) + 1
    e = into(lambda y, w: y @ w, [y, w], [y])
    assert "out=" not in e.source([y, w], [y])
    assert "out=o0" in e.source([y, w], [numbered(3, 3)])


def test_a_square_may_be_transposed_in_place() -> None:
    x = numbered(4, 4)
    into(lambda x: x.T, [x], [x])


def test_a_sum_may_be_written_over_a_row_that_it_reads() -> None:
    x = numbered(3, 4)
    rest = x[1:].clone()
    into(lambda x: x.sum(0), [x], [x[0]])
    assert torch.equal(x[1:], rest)


def test_an_elementwise_operation_writes_over_its_own_operand_directly() -> None:
    c, a, b = numbered(5), numbered(5), numbered(5)
    e = into(lambda c, a, b: c + a * b, [c, a, b], [c])
    assert "torch.add(a0, t0, out=o0)" in e.source([c, a, b], [c])


def test_an_elementwise_operation_takes_a_temporary_for_a_shifted_operand() -> None:
    base = numbered(6)
    into(lambda x: x * 2, [base[:5]], [base[1:]])


def test_an_in_place_output_that_is_read_later_does_not_disturb() -> None:
    """out0 = relu(t0) in place of t0; out1 = t0 + t1 must see the old t0, also when out1 lies elsewhere or nowhere."""
    t0, t1 = numbered(10) - 5, numbered(2, 10)
    out = torch.empty(2, 10)
    into(lambda t0, t1: (torch.relu(t0), t0 + t1), [t0, t1], [t0, out])
    t0 = numbered(10) - 5
    e = evaluation(lambda t0, t1: (torch.relu(t0), t0), t0, t1)
    old = t0.clone()
    first, second = e.run([t0, t1], [t0, None])
    assert first is t0
    assert torch.equal(second, old)


def test_a_pure_copy_into_a_given_tensor_happens() -> None:
    src, dst = numbered(4), torch.zeros(4)
    into(lambda dst, src: src, [dst, src], [dst])
    assert dst.tolist() == [0, 1, 2, 3]
    f = Fusion("copy")
    a, b = f.input((4,), "f32"), f.input((4,), "f32")
    f.output(hir.ops.set(b), alias=a)
    dst.zero_()
    assert evaluator(f).run([dst, src])[0] is dst
    assert dst.tolist() == [0, 1, 2, 3]


def test_views_of_one_buffer_that_are_apart_need_no_temporary() -> None:
    buf = numbered(2, 3, 4)
    e = into(lambda x: x * 2, [buf[0]], [buf[1]])
    assert "out=o0" in e.source([buf[0]], [buf[1]])
    wide = numbered(4, 8)
    e = into(lambda x: x @ x, [wide[:, :4]], [wide[:, 4:]])
    assert "out=o0" in e.source([wide[:, :4]], [wide[:, 4:]])


def test_a_result_that_is_returned_twice_reaches_both_outputs() -> None:
    x = numbered(3)

    def fn(x: torch.Tensor) -> Any:
        y = x + 1
        return y, y

    into(fn, [x], [torch.empty(3), x])


def test_guard_elements_around_outputs_stay() -> None:
    base = torch.full((5, 6), -1.0)
    x = numbered(3, 4)
    into(lambda x: (x * 2).sum(1), [x], [base[1:4, 2]])
    assert int((base == -1).sum()) == 27


def test_in_place_arguments_are_written_when_no_outputs_are_given() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(2)
        return x + y, x

    x, y = numbered(3), numbered(3)
    e = evaluation(fn, x, y)
    first, second = e.run([x, y])
    assert second is x
    assert (x.tolist(), first.tolist()) == ([0, 2, 4], [0, 3, 6])


BODIES: list[Callable[..., Any]] = [
    lambda x, y: (x + y, y),
    lambda x, y: (y, x),
    lambda x, y: (x.T, y.T),
    lambda x, y: (x @ y, x - y),
    lambda x, y: (x.sum(0, keepdim=True).expand(3, 3), x),
    lambda x, y: (x.clone(), y.flip(0)),
    lambda x, y: (y * 2, (y * 2).T),
    lambda x, y: (torch.cat([x[1:], y[:1]]), x.cumsum(1)),
    lambda x, y: (torch.where(x > y, x, y), x.reshape(-1)[:9].view(3, 3)),
]


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.integers(0, len(BODIES) - 1), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=4, max_size=4))
def test_any_arrangement_of_arguments_and_outputs_in_one_buffer_is_right_or_refused(number: int, windows: list[tuple[int, int, bool]]) -> None:
    buffer = numbered(5, 5)
    x, y, *outs = [buffer[r : r + 3, c : c + 3].T if t else buffer[r : r + 3, c : c + 3] for r, c, t in windows]
    want = [w.clone() for w in BODIES[number](x.clone(), y.clone())]
    if EVALUATIONS[number] is None:
        EVALUATIONS[number] = evaluation(BODIES[number], x, y)
    cells = [{(r + i, c + j) for i in range(3) for j in range(3)} for r, c, _ in windows[2:]]
    before = buffer.clone()
    if cells[0] & cells[1]:
        with pytest.raises(InputError, match="outputs 0 and 1 of unit share memory"):
            EVALUATIONS[number].run([x, y], outs)
        assert torch.equal(buffer, before)
        return
    EVALUATIONS[number].run([x, y], outs)
    for o, w in zip(outs, want, strict=True):
        assert torch.equal(o, w)
    untouched = torch.ones(5, 5, dtype=torch.bool)
    for i, j in cells[0] | cells[1]:
        untouched[i, j] = False
    assert torch.equal(buffer[untouched], before[untouched])


EVALUATIONS: list[Any] = [None] * len(BODIES)

# ---------------------------------------------------------------------------------------------------------------- layouts


def layouts(*shape: int) -> list[torch.Tensor]:
    """The same shape as a dense, a permuted, a padded and an expanded tensor."""
    dense = numbered(*shape)
    padded = torch.full((*shape[:-1], shape[-1] + 3), -7.0)[..., : shape[-1]]
    permuted = numbered(*reversed(shape)).permute(*reversed(range(len(shape))))
    return [dense, permuted, padded, torch.tensor(2.0).expand(shape)]


def test_one_evaluator_serves_every_layout() -> None:
    e = evaluator(hir.trace(lambda x: (x.sin(), x.sum(0), x.view(-1), x.flatten().cumsum(0)), hir.spec((M, N), "f32")))
    for x in [*layouts(3, 3), *layouts(4, 2), numbered(3, 4)[:, 1:2]]:
        got = e.run([x])
        for g, w in zip(got, (x.sin(), x.sum(0), x.reshape(-1), x.flatten().cumsum(0)), strict=True):
            assert torch.equal(g, w)


def test_outputs_of_any_layout_are_filled() -> None:
    x = numbered(3, 4)
    for out in [torch.empty(4, 3).T, torch.empty(3, 9)[:, 2:6], torch.empty(6, 4)[::2]]:
        into(lambda x: x * 2 + 1, [x], [out])
        into(lambda x: x @ (x.T @ x), [x], [out])


@pytest.mark.filterwarnings("ignore:var")
def test_empty_single_and_zero_dimensional_tensors() -> None:
    x = numbered(3, 4, 0, 5)
    e = evaluation(lambda x: (x.sum(1), x.sum(2), x.sum()), x)
    assert [list(t.shape) for t in e.run([x])] == [[3, 0, 5], [3, 4, 5], []]
    assert float(e.run([x])[1].abs().sum()) == 0
    for shape in [(8, 7, 5, 1), (8, 1, 5, 1)]:
        y = numbered(*shape)
        e = evaluation(lambda y: (y.sum((1, 3)), y.mean((1, 3)), y.var((1, 3)), y.var((1, 3), correction=0)), y)
        for got, w in zip(e.run([y]), (y.sum((1, 3)), y.mean((1, 3)), y.var((1, 3)), y.var((1, 3), correction=0)), strict=True):
            torch.testing.assert_close(got, w, equal_nan=True, rtol=0, atol=0)
    expanded = torch.tensor(1.0).expand(2, 3)
    assert evaluation(lambda x: x.sum(0), expanded).run([expanded])[0].tolist() == [2, 2, 2]
    z = torch.tensor(3.0)
    into(lambda z: z * 2, [z], [z])
    assert float(z) == 6


def test_an_extremum_of_nothing_is_an_error_that_names_the_operation() -> None:
    e = evaluator(hir.trace(lambda x: x.amax(1), hir.spec((M, N), "f32")))
    with pytest.raises(InputError) as error:
        e.run([numbered(3, 0)])
    assert error.value.statement == "%t = amax(%x, dims = [1])"
    assert error.value.loc is not None
    assert error.value.loc.file == __file__


def test_a_slice_past_the_end_is_an_error_and_not_shorter() -> None:
    e = evaluator(hir.trace(lambda x: x[1:4], hir.spec((M,), "f32")))
    assert e.run([numbered(4)])[0].tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="past the end of dim 0, which has size 3"):
        e.run([numbered(3)])


# --------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def adding() -> Evaluator:
    return evaluator(hir.trace(lambda x, y, k: x + y * k, hir.spec((M, 3), "f32"), hir.spec((M, 3), "f32"), "int", name="adding"))


@pytest.mark.parametrize(
    ("args", "outs", "message", "expected", "got"),
    [
        ([numbered(2, 3), 1], None, "adding takes 3 arguments", "3", "2"),
        ([numbered(2, 3), numbered(2, 3).double(), 1], None, r"argument 1 \(%y\) of adding has another type", "f32[m, 3]", "float64 of shape [2, 3]"),
        ([numbered(2, 3), numbered(6), 1], None, r"argument 1 \(%y\)", "f32[m, 3]", "float32 of shape [6]"),
        ([numbered(2, 3), numbered(5, 3), 1], None, r"dim 0 of argument 1 \(%y\)", "2 (f32[m, 3])", "float32 of shape [5, 3]"),
        ([numbered(2, 4), numbered(2, 4), 1], None, r"dim 1 of argument 0 \(%x\)", "3 (f32[m, 3])", "float32 of shape [2, 4]"),
        ([numbered(2, 3), numbered(2, 3), 1.5], None, r"argument 2 \(%k\) of adding is a number", "int", "1.5"),
        ([numbered(2, 3), numbered(2, 3), 1], [numbered(2, 3).double()], "output 0 of adding has", "f32[m, 3]", "float64 of shape [2, 3]"),
        ([numbered(2, 3), numbered(2, 3), 1], [numbered(1, 3)], "dim 0 of output 0", "2 (f32[m, 3])", "float32 of shape [1, 3]"),
        ([numbered(2, 3), numbered(2, 3), 1], [torch.zeros(1, 3).expand(2, 3)], "has elements that share memory", None, "strides (0, 1)"),
        ([numbered(2, 3), numbered(2, 3), 1], [], "adding has 1 results", "1 outputs", "0"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_written(
    adding: Evaluator, args: list[Any], outs: Any, message: str, expected: str | None, got: str | None
) -> None:
    before = [o.clone() for o in outs or []]
    with pytest.raises(InputError, match=message) as error:
        adding.run(args, outs)
    assert (error.value.expected, error.value.got) == (expected, got)
    assert all(torch.equal(a, b) for a, b in zip(before, outs or [], strict=True))


def test_an_output_of_unknown_type_must_fit_what_comes() -> None:
    e = evaluator(hir.trace(lambda x: x.nonzero(), hir.spec((M,), "f32")))
    out = torch.empty(2, 1, dtype=torch.int64)
    assert e.run([torch.tensor([0.0, 1, 2])], [out])[0] is out
    assert out.tolist() == [[1], [2]]
    with pytest.raises(InputError, match="output 0 has another type than the result"):
        e.run([torch.tensor([3.0, 1, 2])], [out])


# ------------------------------------------------------------------------------------------------------------------ the rest


def test_copies_say_which_outputs_are_copied_and_why() -> None:
    e = evaluation(lambda x: (x + 1, x, x.topk(1)[0], x.T), numbered(2, 2))
    assert [(c.result, c.why) for c in e.copies] == [
        (1, "%x is an input"),
        (2, "topk has no form that writes into a given tensor"),
        (3, "permute has no form that writes into a given tensor"),
    ]


def test_a_specialised_function_gives_the_same_bits() -> None:
    f = hir.trace(lambda c, a, b, k: c + a @ b * k, hir.spec((3, 3), "f32"), hir.spec((3, 3), "f32"), hir.spec((3, 3), "f32"), "float")
    e = evaluator(f)
    c, a, b = torch.randn(3, 3, 3)
    fixed = e.specialise([c, a, b, 1.0], [c])
    for k in (0.5, 2.0):
        want = e.run([c.clone(), a, b, k])[0]
        assert fixed([c, a, b, k], [c])[0] is c
        assert torch.equal(c, want)


def test_numbers_stand_where_torch_takes_only_tensors() -> None:
    f = Fusion("f")
    x = f.input((3,), "i32", name="x")
    k = f.scalar("k", "float")
    for name, args in [
        ("maximum", (x, 2)),
        ("sub", (5, x)),
        ("div", (1, x)),
        ("lt", (1, x)),
        ("where", (hir.ops.gt(x, 1), x, 0)),
        ("maximum", (k, x)),
    ]:
        f.output(getattr(hir.ops, name)(*args))
    x_ = torch.tensor([1, 2, 3], dtype=torch.int32)
    found = evaluator(f).run([x_, 2.5])
    assert [t.tolist() for t in found] == [[2, 2, 3], [4, 3, 2], [1.0, 0.5, pytest.approx(1 / 3)], [False, True, True], [0, 2, 3], [2.5, 2.5, 3.0]]
    assert [t.dtype for t in found] == [torch.int32, torch.int32, torch.float32, torch.bool, torch.int32, torch.float32]


def test_constants_keep_their_value_in_every_dtype() -> None:
    big = 2**53 + 1
    x = torch.zeros(2, dtype=torch.int64)
    assert evaluation(lambda x: x + big, x).run([x])[0].tolist() == [big, big]
    y = torch.zeros(2, dtype=torch.float64)
    assert evaluation(lambda y: y + 0.1, y).run([y])[0].tolist() == [0.1, 0.1]
    z = torch.ones(1)
    found = evaluation(lambda z: (z * float("inf"), z * float("nan"), z - float("inf")), z).run([z])
    assert [str(float(t)) for t in found] == ["inf", "nan", "-inf"]


def test_temporaries_die_at_their_last_use() -> None:
    e = evaluation(lambda x: ((x + 1) * 2).exp(), numbered(3))
    assert e.source([numbered(3)]).count("del ") == 2


def operands(row: Row, dtype: str) -> list[Any] | None:
    """Operands for a row by their names, or None where the row needs more than tensors of one shape."""
    if {p.kind for p in row.operands} - {"tensor", "value"} or not row.operands:
        return None
    special = {"cond": ("bool", (4, 4)), "index": ("i64", (4, 4)), "target": ("i64", (4,))}
    return [special.get(p.name, (dtype, (4, 4))) for p in row.operands if p.default is REQUIRED]


ATTRIBUTES: dict[str, Any] = {
    "dim": 0, "dims": (0,), "shape": (4,), "dtype": "f64", "pads": (0, 0), "k": 2, "dim0": 0, "dim1": 1, "low": 0, "high": 2, "index": 1,
}  # fmt: skip


def one_operation(name: str, dtype: str) -> Fusion | None:
    """The row on operands of ``dtype``; None where it takes none such."""
    row = TABLE[name]
    square = (dtype, (4, 4))
    special: dict[str, list[Any]] = {
        "index_select": [square, ("i64", (4,))], "cat": [square], "stack": [square], "bmm": [(dtype, (2, 4, 4))] * 2,
        "baddbmm": [(dtype, (2, 4, 4))] * 3, "full": [], "iota": [],
    }  # fmt: skip
    given = special.get(name) or operands(row, dtype)
    attrs = {p.name: ATTRIBUTES[p.name] for p in row.attributes if p.default is REQUIRED and p.name in ATTRIBUTES}
    chosen: dict[str, dict[str, Any]] = {
        "full": {"shape": (3, 4), "value": 2}, "iota": {"start": 1, "stop": 9, "step": 2}, "clamp": {"low": 0.5},
    }  # fmt: skip
    attrs |= chosen.get(name, {})
    f = Fusion(name)
    tensors = [f.input(s, d) for d, s in given or []]
    try:
        (value,) = apply(f, name, [tensors] if name in ("cat", "stack") else tensors, attrs)
    except BuildError:
        return None
    f.output(value)
    return f


@pytest.mark.parametrize("name", [n for n, r in TABLE.items() if r.out])
def test_every_form_that_writes_into_an_output_gives_the_bits_of_the_plain_form(name: str) -> None:
    tried = 0
    for dtype in ("f32", "i64", "bool", "bf16"):
        if (f := one_operation(name, dtype)) is None:
            continue
        e = evaluator(f)
        args = [data(*t.shape, dtype=to_torch(t.dtype)) for t in f.inputs]
        torch.manual_seed(3)
        try:
            (want,) = e.run(args)
        except InputError as error:
            if "not implemented" in str(error):  # torch has no such kernel on this device
                continue
            raise
        tried += 1
        shape = list(want.shape)
        flipped = torch.empty(shape[::-1], dtype=want.dtype).T if len(shape) == 2 else torch.empty_like(want)
        for out in (torch.empty_like(want), torch.empty([*shape, 2], dtype=want.dtype)[..., 0], flipped):
            torch.manual_seed(3)
            assert e.run(args, [out])[0] is out
            exact = out.is_contiguous() or not TABLE[name].library  # a product into strided memory may add up in another order
            torch.testing.assert_close(out, want, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, equal_nan=True)
        for i, a in enumerate(args):
            if a.shape == want.shape and a.dtype == want.dtype:
                copies = [t.clone() for t in args]
                e.run(copies, [copies[i]])
                torch.testing.assert_close(copies[i], want, rtol=0, atol=0, equal_nan=True)
    assert tried


def data(*shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 3).to(dtype) if dtype.is_floating_point else torch.randint(1, 4, shape).to(dtype)


def test_names_of_a_program_never_reach_the_code() -> None:
    f = Fusion("import os")
    x = f.input((Sym("m"),), "f32", name="x; raise")
    f.output(hir.ops.mul(x, f.scalar("y)")))
    assert "raise" not in evaluator(f).source([numbered(2), 1])
    assert evaluator(f).run([numbered(2), 3])[0].tolist() == [0, 3]


def test_factories_are_made_on_the_arguments_device() -> None:
    e = evaluator(hir.trace(lambda x: torch.arange(3) + torch.full((3,), 2) + x.long(), hir.spec((3,), "f32")))
    assert e.run([torch.empty(3, device="meta")])[0].device.type == "meta"


def test_threads_share_an_evaluator() -> None:
    e = evaluator(hir.trace(lambda x, y: (x @ y, y), hir.spec((M, M), "f32"), hir.spec((M, M), "f32")))
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = numbered(4, 4) + seed
        y = numbered(4, 4) - seed
        want = x @ y
        for i in range(50):
            a, b = x.clone(), y.clone()
            if i % 2:
                e.run([a, b], [b, a])
                ok = torch.equal(b, want) and torch.equal(a, y)
            else:
                ok = torch.equal(e.run([a, b])[0], want)
            wrong.extend([] if ok else [seed])

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_a_fusion_from_text_of_another_torch_is_refused_by_name() -> None:
    f = Fusion("f")
    x = f.input((2,), "f32")
    f.output(apply(f, "aten.no_such_thing.default", [x])[0])
    with pytest.raises(InputError, match=r"no operation aten\.no_such_thing\.default"):
        evaluator(f)
