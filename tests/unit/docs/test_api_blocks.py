"""The programs of the public interface on one rank: they run as they are written in the guides, and their text parses back."""

from __future__ import annotations

import inspect
from typing import Any, Final

import pytest
import torch

import hostir as hir


@hir.unit
def fma(a, b, c):
    return c + a.float() * b.float()


def host_sum(num_terms, n, dtype=torch.bfloat16):
    with hir.Program("host_sum") as p:
        a = p.input("a", (num_terms, n), dtype)
        b = p.input("b", (num_terms, n), dtype)
        c = p.zeros((n,), torch.float32, name="c")
        with p.loop(num_terms) as h:
            p.call(fma, a[h], b[h], c, out=c)  # c on both sides: aliased I/O, updated in place
        p.output(c)
    return p


def parses_back(p: Any) -> Any:
    assert hir.parse(str(p)) == p
    return p


def data(*shape: int, dtype: torch.dtype = torch.float32, first: int = 1000) -> torch.Tensor:
    """Element i is ``first + i``; in narrow floats -5 … 5."""
    n = torch.arange(torch.Size(shape).numel())
    values = (n * 7 + first) % 11 - 5 if dtype in (torch.bfloat16, torch.float16) else n + first
    return values.reshape(shape).to(dtype)


MODES: Final = ("checked", "compiled")


# --------------------------------------------------------------------------------------------- a sum along a host dimension


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("terms", [0, 1, 5, 13])
def test_a_sum_along_a_host_dimension(terms: int, mode: str) -> None:
    p = parses_back(host_sum(terms, 64))
    run = hir.compile(p, mode=mode)
    a, b = data(terms, 64, dtype=torch.bfloat16), data(terms, 64, dtype=torch.bfloat16, first=3)
    got = run(a, b)
    assert got.dtype == torch.float32
    assert torch.equal(got, (a.float() * b.float()).sum(0))
    assert hir.parse(str(run.program)) == run.program
    assert "@fma" in run.explain()
    assert "ExprEvalExecutor" in run.explain()


def test_the_sum_is_one_loop_with_the_accumulator_on_both_sides() -> None:
    text = str(host_sum(8, 16))
    assert (
        text[text.index("program") :]
        == """\
program @host_sum(%a: bf16[8, 16], %b: bf16[8, 16]) {
  %c = zeros f32[16]
  for %i in 0 .. 8 {
    %v = view %a[%i]
    %v_1 = view %b[%i]
    %c <- @fma(%v, %v_1, %c)
  }
  return %c
}"""
    )


def strided(t: torch.Tensor, how: str) -> torch.Tensor:
    """``t``'s values in another layout."""
    match how:
        case "every other column":
            wide = torch.full((t.shape[0], 2 * t.shape[1]), 99, dtype=t.dtype)
            wide[:, ::2] = t
            return wide[:, ::2]
        case "columns first":
            return t.T.contiguous().T
        case "in a wider tensor":
            wide = torch.full((t.shape[0] + 2, t.shape[1] + 3), 99, dtype=t.dtype)
            wide[1:-1, 1:-2] = t
            return wide[1:-1, 1:-2]
        case "one row for all":
            return t[:1].expand(t.shape)
    raise AssertionError(how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["every other column", "columns first", "in a wider tensor", "one row for all"])
def test_inputs_may_have_any_strides(how: str, mode: str) -> None:
    run = hir.compile(host_sum(5, 16), mode=mode)
    a, b = strided(data(5, 16, dtype=torch.bfloat16), how), data(5, 16, dtype=torch.bfloat16, first=3)
    assert torch.equal(run(a, b), (a.float() * b.float()).sum(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int32, torch.uint8])
def test_the_sum_takes_other_dtypes(dtype: torch.dtype) -> None:
    a, b = data(4, 8, dtype=torch.float16).to(dtype), data(4, 8, dtype=torch.float16, first=3).to(dtype)
    assert torch.equal(hir.compile(host_sum(4, 8, dtype))(a, b), (a.float() * b.float()).sum(0))


def test_a_unit_called_on_buffers_writes_the_same_statement() -> None:
    with hir.Program("p") as p:
        a, b = p.input("a", (8,), "bf16"), p.input("b", (8,), "bf16")
        c = p.zeros((8,), "f32", name="c")
        p.call(fma, a, b, c, out=c)
    with hir.Program("p") as q:
        a, b = q.input("a", (8,), "bf16"), q.input("b", (8,), "bf16")
        c = q.zeros((8,), "f32", name="c")
        fma(a, b, c, out=c)
    assert p == q


def test_a_call_without_out_returns_a_new_buffer() -> None:
    with hir.Program("p") as p:
        a, b = p.input("a", (8,), "bf16"), p.input("b", (8,), "bf16")
        first = p.call(fma, a, b, p.zeros((8,), "f32"))
        p.output(p.call(fma, a, b, first), first)
    x, y = data(8, dtype=torch.bfloat16), data(8, dtype=torch.bfloat16, first=3)
    twice, once = hir.compile(parses_back(p))(x, y)
    assert torch.equal(once, x.float() * y.float())
    assert torch.equal(twice, 2 * once)


# ------------------------------------------------------------------------------------------------ loops, branches, host numbers


@pytest.mark.parametrize("mode", MODES)
def test_loops_nest_and_take_start_stop_and_step(mode: str) -> None:
    with hir.Program("nested") as p:
        x = p.input("x", (6, 4), torch.int64)
        y = p.zeros((6, 4), torch.int64, name="y")
        with p.loop(1, 6, 2, name="i") as i, p.loop(i, name="j") as j:
            p.add(y[i], x[j], out=y[i])
        p.output(y)
    x = data(6, 4, dtype=torch.int64)
    expected = torch.zeros(6, 4, dtype=torch.int64)
    for i in range(1, 6, 2):
        for j in range(i):
            expected[i] += x[j]
    assert torch.equal(hir.compile(parses_back(p), mode=mode)(x), expected)


@pytest.mark.parametrize("mode", MODES)
def test_branches_take_what_their_condition_says(mode: str) -> None:
    with hir.Program("branches") as p:
        k = p.scalar("k")
        t = p.scalar("t", bool)
        y = p.zeros((5,), torch.int64, name="y")
        with p.loop(5) as i:
            with p.if_((i < k) & ~t | (i == 4)) as br:
                p.call(lambda x, i: x + i * 10, y[i], i, out=y[i])
            with br.else_():
                with p.if_(t):
                    p.add(y[i], -1, out=y[i])
                with p.else_():
                    p.add(y[i], -2, out=y[i])
        p.output(y)
    run = hir.compile(parses_back(p), mode=mode)
    for k in (-1, 2, 9):
        for t in (False, True):
            expected = [i * 10 if (i < k and not t) or i == 4 else -1 if t else -2 for i in range(5)]
            assert run(k, t).tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_loop_indices_expressions_and_scalars_are_arguments_of_units(mode: str) -> None:
    with hir.Program("numbers") as p:
        k = p.scalar("k")
        f = p.scalar("f", float)
        b = p.scalar("b", bool)
        x = p.input("x", (3, 2), torch.float64)
        y = p.empty((3, 2), torch.float64, name="y")
        with p.loop(3) as i:
            p.call(lambda x, i, e, f, c: x * i + e - f * c, x[i], i, hir.max(i * k, 1), f, 2, out=y[i])
        with p.if_(b):
            p.mul(y, -1, out=y)
        p.output(y)
    run = hir.compile(parses_back(p), mode=mode)
    x = data(3, 2, dtype=torch.float64)
    for k, f, b in ((2, 0.5, False), (0, -4.0, True)):
        rows = [x[i] * i + max(i * k, 1) - f * 2 for i in range(3)]
        assert torch.equal(run(k, f, b, x), torch.stack(rows) * (-1 if b else 1))


def test_a_number_given_as_a_constant_is_part_of_the_unit_and_a_host_number_is_not() -> None:
    with hir.Program("p") as p:
        x = p.input("x", (3,), "f32")
        p.call(lambda a, k: a * k, x, 3)
        p.call(lambda a, k: a * k, x, p.scalar("k"))
    units = [line for line in str(p).splitlines() if line.startswith("unit")]
    assert units == ["unit @unit(%a: f32[3]) {", "unit @unit_1(%a: f32[3], %k: int) {"]


# --------------------------------------------------------------------------------------------- in place, and inputs read first


@pytest.mark.parametrize("mode", MODES)
def test_an_inout_input_is_updated_in_place_and_returned_as_itself(mode: str) -> None:
    with hir.Program("scale") as p:
        x = p.input("x", (4,), torch.float32, inout=True)
        p.mul(x, 3, out=x)
        p.output(x)
    parses_back(p)
    assert "inout %x" in str(p)
    x = data(4)
    expected = x * 3
    assert hir.compile(p, mode=mode)(x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_unit_that_mutates_its_argument_writes_into_the_buffer(mode: str) -> None:
    @hir.unit
    def shift(x, y):
        x.add_(y)
        return x.sum()

    with hir.Program("mutates") as p:
        x = p.input("x", (4,), torch.float32, inout=True)
        p.output(shift(x, p.input("y", (4,), torch.float32)))
    x, y = data(4), data(4, first=7)
    expected = x + y
    total = hir.compile(parses_back(p), mode=mode)(x, y)
    assert torch.equal(x, expected)
    assert torch.equal(total, expected.sum())


@pytest.mark.parametrize("mode", MODES)
def test_two_buffers_are_swapped(mode: str) -> None:
    with hir.Program("swap") as p:
        x, y = (p.input(name, (3,), torch.float32, inout=True) for name in "xy")
        p.call(lambda a, b: (a, b), x, y, out=(y, x))
    x, y = data(3), data(3, first=7)
    assert hir.compile(parses_back(p), mode=mode)(x, y) is None
    assert torch.equal(x, data(3, first=7))
    assert torch.equal(y, data(3))


@pytest.mark.parametrize("mode", MODES)
def test_a_product_is_written_over_its_own_operand(mode: str) -> None:
    with hir.Program("power") as p:
        y = p.input("y", (3, 3), torch.float32, inout=True)
        w = p.input("w", (3, 3), torch.float32)
        with p.loop(2):
            p.matmul(y, w, out=y)
    y, w = data(3, 3, first=1), data(3, 3, first=2)
    expected = y @ w @ w
    hir.compile(parses_back(p), mode=mode)(y, w)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_is_replaced_by_its_transpose(mode: str) -> None:
    with hir.Program("transpose") as p:
        x = p.input("x", (4, 4), torch.float32, inout=True)
        p.copy(x.T, out=x)
        p.call(lambda a: a + 1, x.T, out=x)
        p.output(x)
    x = data(4, 4)
    expected = x.clone() + 1
    assert torch.equal(hir.compile(parses_back(p), mode=mode)(x), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_is_written_into_a_row_of_what_it_sums(mode: str) -> None:
    with hir.Program("into_row") as p:
        x = p.input("x", (3, 4), torch.float32, inout=True)
        p.sum(x, 0, out=x[0])
    x = data(3, 4)
    expected = x.clone()
    expected[0] = x.sum(0)
    hir.compile(parses_back(p), mode=mode)(x)
    assert torch.equal(x, expected)


# --------------------------------------------------------------------------------------------------------------------- views


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("view", "twin"),
    [
        (lambda x, k: x[k], lambda x, k: x[k]),
        (lambda x, k: x[-1], lambda x, _: x[-1]),
        (lambda x, k: x[1:3, :2], lambda x, _: x[1:3, :2]),
        (lambda x, k: x[..., k], lambda x, k: x[..., k]),
        (lambda x, k: x[k, ..., 1:3], lambda x, k: x[k, ..., 1:3]),
        (lambda x, k: x[k : k + 2], lambda x, k: x[k : k + 2]),
        (lambda x, k: x[:, -3:-1], lambda x, _: x[:, -3:-1]),
        (lambda x, k: x.select(1, k + 1), lambda x, k: x.select(1, k + 1)),
        (lambda x, k: x.select(-1, 0), lambda x, _: x.select(-1, 0)),
        (lambda x, k: x.narrow(1, k, 3), lambda x, k: x.narrow(1, k, 3)),
        (lambda x, k: x.chunk(k, 2, dim=1), lambda x, k: x.chunk(2, dim=1)[k]),
        (lambda x, k: x.chunk(-1, 3, 1), lambda x, _: x.chunk(3, dim=1)[-1]),
        (lambda x, k: x.reshape(2, 2, 6), lambda x, _: x.reshape(2, 2, 6)),
        (lambda x, k: x.reshape(-1, 12), lambda x, _: x.reshape(-1, 12)),
        (lambda x, k: x.reshape((24,))[k * 6 : (k + 1) * 6], lambda x, k: x.reshape(24)[k * 6 : (k + 1) * 6]),
        (lambda x, k: x.permute(1, 0), lambda x, _: x.permute(1, 0)),
        (lambda x, k: x.T, lambda x, _: x.T),
        (lambda x, k: x.reshape(2, 2, 6).permute(2, 0, 1).T[k], lambda x, k: x.reshape(2, 2, 6).permute(2, 0, 1).permute(2, 1, 0)[k]),
        (lambda x, k: x[k].expand(3, 6), lambda x, k: x[k].expand(3, 6)),
        (lambda x, k: x[k : k + 1].expand(5, -1), lambda x, k: x[k : k + 1].expand(5, -1)),
        (lambda x, k: x, lambda x, _: x),
    ],
)
def test_views_mean_what_they_mean_in_torch(view: Any, twin: Any, mode: str) -> None:
    with hir.Program("view") as p:
        k = p.scalar("k")
        x = p.input("x", (4, 6), torch.float32)
        p.output(p.call(lambda a: a * 1, view(x, k)))
    run = hir.compile(parses_back(p), mode=mode)
    x = data(4, 6)
    for k in (0, 1):
        assert torch.equal(run(k, x), twin(x, k))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("t", "n"), [(10, 4), (9, 4), (3, 4), (8, 4), (1, 1), (5, 8)])
def test_chunks_cover_a_dimension_and_the_last_ones_may_be_short_or_empty(t: int, n: int, mode: str) -> None:
    with hir.Program("chunks") as p:
        x = p.input("x", (2, t), torch.float32)
        y = p.empty((2, t), torch.float32, name="y")
        with p.loop(n) as i:
            p.mul(x.chunk(i, n, dim=1), 2, out=y.chunk(i, n, dim=1))
        p.output(y)
    x = data(2, t)
    assert torch.equal(hir.compile(parses_back(p), mode=mode)(x), x * 2)


@pytest.mark.parametrize("mode", MODES)
def test_symbolic_sizes_are_bound_anew_by_each_run(mode: str) -> None:
    m, n = hir.sym("m"), hir.sym("n")
    with hir.Program("symbols") as p:
        x = p.input("x", (m, n), torch.float32)
        w = p.input("w", (n, m + 1), torch.float32)
        y = p.empty((m, m + 1), torch.float32, name="y")
        with p.loop(m) as i:
            p.matmul(x[i : i + 1], w, out=y[i : i + 1])
        p.output(y, x.reshape(n, m), y.chunk(1, 2))
    run = hir.compile(parses_back(p), mode=mode)
    for rows, columns in ((3, 4), (5, 2), (1, 1), (3, 4)):
        x, w = data(rows, columns, first=1), data(columns, rows + 1, first=2)
        y, flat, half = run(x, w)
        assert torch.equal(y, x @ w)
        assert torch.equal(flat, x.reshape(columns, rows))
        assert flat.data_ptr() == x.data_ptr()
        size = -(-rows // 2)
        assert torch.equal(half, y[size : 2 * size])


def test_an_output_may_be_a_view_an_input_and_the_same_buffer_twice() -> None:
    with hir.Program("outputs") as p:
        x = p.input("x", (4, 2), torch.float32)
        y = p.zeros((4, 2), torch.float32)
        y[0] = x[1]
        p.output(y, y[0], x, x.T, y)
    x = data(4, 2)
    y, row, same, turned, again = hir.compile(parses_back(p))(x)
    assert torch.equal(row, x[1])
    assert same is x
    assert turned.data_ptr() == x.data_ptr()
    assert again.data_ptr() == y.data_ptr()


# ------------------------------------------------------------------------------------------------------------ running a program


def test_run_returns_none_a_tensor_or_a_tuple_and_run_run_a_list() -> None:
    def program(*outs: int) -> Any:
        with hir.Program("p") as p:
            x = p.input("x", (2,), torch.float32)
            p.output(*(p.add(x, k) for k in outs))
        return hir.compile(p)

    x = data(2)
    assert program()(x) is None
    assert torch.equal(program(1)(x), x + 1)
    both = program(1, 2)(x)
    assert isinstance(both, tuple)
    assert torch.equal(both[1], x + 2)
    assert isinstance(program(1).run([x]), list)


def test_fresh_outputs_are_new_tensors_and_given_ones_are_written() -> None:
    run = hir.compile(host_sum(3, 4))
    a, b = data(3, 4, dtype=torch.bfloat16), data(3, 4, dtype=torch.bfloat16, first=3)
    first, second = run(a, b), run(a, b)
    assert first.data_ptr() != second.data_ptr()
    given = torch.empty(4)
    assert run(a, b, out=given) is given
    assert torch.equal(given, first)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.ones(3, 4),), "the program takes 2 arguments"),
        ((torch.ones(3, 4).bfloat16(), torch.ones(3, 4)), "argument 2 (%b) has another dtype"),
        ((torch.ones(3, 4).bfloat16(), torch.ones(3, 5).bfloat16()), "%b has another shape"),
        ((torch.ones(3, 4).bfloat16(), [1.0]), "argument 2 (%b) is no tensor"),
    ],
)
def test_wrong_arguments_are_refused_before_the_start(args: Any, message: str) -> None:
    with pytest.raises(hir.InputError) as caught:
        hir.compile(host_sum(3, 4))(*args)
    assert caught.value.message == message
    assert caught.value.program == "host_sum"


# ------------------------------------------------------------------------------------------------------------- the whole list

METHODS: Final = {
    "input": "(name, shape, dtype, *, memory='global', inout=False)",
    "scalar": "(name, dtype=int)",
    "output": "(*buffers)",
    "empty": "(shape, dtype, *, memory='global', name=None)",
    "zeros": "(shape, dtype, *, memory='global', name=None)",
    "full": "(shape, value, dtype, *, memory='global', name=None)",
    "free": "(b)",
    "call": "(unit, *args, out=None, on=None, awaits=None)",
    "matmul": "(a, b, out=None, *, on=None)",
    "linear": "(x, weight, bias=None, out=None, *, on=None)",
    "add": "(a, b, out=None, *, on=None)",
    "sub": "(a, b, out=None, *, on=None)",
    "mul": "(a, b, out=None, *, on=None)",
    "div": "(a, b, out=None, *, on=None)",
    "sum": "(x, dim=None, keepdim=False, out=None, *, on=None)",
    "copy": "(x, out, *, on=None)",
    "allgather": "(x, out, *, dim=0, over=None, on=None)",
    "reduce_scatter": "(x, out, *, op='sum', dim=0, over=None, on=None)",
    "allreduce": "(x, out=None, *, op='sum', over=None, on=None)",
    "reduce": "(x, out, *, to, op='sum', over=None, on=None)",
    "broadcast": "(x, out, *, source, over=None, on=None)",
    "gather": "(x, out, *, to, dim=0, over=None, on=None)",
    "scatter": "(x, out, *, source, dim=0, over=None, on=None)",
    "alltoall": "(x, out, *, split_dim=0, cat_dim=0, over=None, on=None)",
    "alltoallv": "(x, out, *, send_counts, recv_counts, over=None, on=None)",
    "permute": "(x, out, *, to, source, over=None, on=None)",
    "send": "(x, *, to, over=None, on=None)",
    "recv": "(out, *, source, over=None, on=None)",
    "barrier": "(*, over=None, on=None)",
    "signal": "(flag, *, to, value, over=None, on=None)",
    "wait": "(flag, *, value, over=None, on=None)",
    "loop": "(*bounds, name=None)",
    "if_": "(condition)",
    "else_": "()",
    "group": "(on=None)",
    "on": "(stream)",
    "sync": "(what, stream='main')",
    "stream": "(name, index=None)",
    "event": "()",
    "rank": "(axis=None)",
    "size": "(axis=None)",
}


@pytest.mark.parametrize("name", METHODS)
def test_a_program_has_the_methods_that_the_guide_lists(name: str) -> None:
    signature = inspect.signature(getattr(hir.Program, name))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in list(signature.parameters.values())[1:]]
    text = str(inspect.Signature(plain)).replace("=<class 'int'>", "=int").replace("Stream(name='main', index=None)", "'main'")
    assert text == METHODS[name]


def test_sugar_is_torch() -> None:
    with hir.Program("sugar") as p:
        x = p.input("x", (3, 4), torch.float32)
        w = p.input("w", (2, 4), torch.float32)
        b = p.input("b", (2,), torch.float32)
        p.output(
            p.linear(x, w), p.linear(x, w, b), p.matmul(x, w.T), p.add(x, x), p.add(x, 2), p.sub(1, x), p.mul(x, -1), p.div(x, 4),
            p.sum(x), p.sum(x, 1), p.sum(x, (0, 1), True), p.sum(x, -1, keepdim=True),
        )  # fmt: skip
    x, w, b = data(3, 4, first=1), data(2, 4, first=2), data(2, first=3)
    expected = [
        x @ w.T, x @ w.T + b, x @ w.T, x + x, x + 2, 1 - x, -x, x / 4, x.sum(), x.sum(1), x.sum((0, 1), True), x.sum(-1, keepdim=True),
    ]  # fmt: skip
    for got, want in zip(hir.compile(parses_back(p))(x, w, b), expected, strict=True):
        assert torch.equal(got, want)
