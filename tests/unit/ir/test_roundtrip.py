"""Random programs: their text parses back to an equal program, and running either equals the same statements by hand on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hostir as hir
from tests.unit.ir.random_programs import SIDE, build, recipes, twin

SLOW = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def start(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(SIDE * SIDE, dtype=dtype).reshape(SIDE, SIDE) - 7


def check_text(p: Any) -> Any:
    """The text's program; both have one text, one hash, and are equal."""
    text = str(p)
    back = hir.parse(text)
    assert str(back) == text
    assert back == p
    assert hash(back) == hash(p)
    return back


def same(got: Any, expected: list[torch.Tensor]) -> None:
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True)


@SLOW
@given(recipes())
def test_text_parses_back_to_an_equal_program(recipe: Any) -> None:
    check_text(build(recipe))


@SLOW
@given(recipes(), st.integers(-3, 6), st.booleans())
def test_a_program_and_its_text_do_what_the_statements_say(recipe: Any, k: int, t: bool) -> None:
    p = build(recipe)
    expected = twin(recipe, start(recipe[0]), k, t)
    for program in (p, hir.parse(str(p))):
        x = start(recipe[0])
        got = hir.compile(program)(x, k, t)
        same(got, expected)
        assert got[0] is x


@settings(SLOW, max_examples=30)
@given(recipes(), st.integers(-3, 6), st.booleans())
def test_the_checked_interpreter_and_compiled_code_agree_bit_for_bit(recipe: Any, k: int, t: bool) -> None:
    p = build(recipe)
    got = [hir.compile(p, mode=mode)(start(recipe[0]), k, t) for mode in ("checked", "compiled")]
    same(got[0], list(got[1]))


@settings(SLOW, max_examples=30)
@given(recipes(), st.integers(-3, 6), st.booleans())
def test_a_strided_input_gives_the_same(recipe: Any, k: int, t: bool) -> None:
    """Every other column of a wider tensor. A view that such strides do not allow is refused."""
    expected = twin(recipe, start(recipe[0]), k, t)
    wide = torch.zeros(SIDE, 2 * SIDE, dtype=recipe[0])
    x = wide[:, ::2]
    x.copy_(start(recipe[0]))
    refusal = None
    try:
        got = hir.compile(build(recipe))(x, k, t)
    except hir.VerifyError as e:
        refusal = e.message
    if refusal is None:
        same(got, expected)
    else:
        assert refusal == "this reshape would move elements, so it is no view of the tensor that was passed"
    assert not wide[:, 1::2].any()


@settings(SLOW, max_examples=30)
@given(recipes())
def test_random_programs_are_right_on_their_only_rank(recipe: Any) -> None:
    assert hir.verify(build(recipe), scalars={"k": 3, "t": True}).ok


# ------------------------------------------------------------------------- statements that run on several ranks only: text alone

AXES = ("dp", "tp")
COMMS = ("allgather", "allreduce", "reduce_scatter", "reduce", "broadcast", "gather", "scatter", "alltoall", "alltoallv", "permute", "send", "recv")


@st.composite
def communications(draw: Any) -> Any:
    """What a communication statement of a program over mesh(dp = 2, tp = 2) says."""
    kind = draw(st.sampled_from(COMMS))
    over = draw(st.sampled_from([None, "dp", "tp", ("dp", "tp"), ("tp", "dp"), [0, 1], [3, 1, 2], [2]]))
    return kind, over, draw(st.sampled_from(["sum", "avg", "prod", "min", "max"])), draw(st.integers(0, 1)), draw(st.integers(0, 7))


def state(p: Any, what: Any, big: Any, small: Any, counts: Any, stream: Any, i: Any) -> Any:
    """Write one communication, over buffers whose first two sizes are open; returns its event."""
    kind, over, op, dim, root = what
    team = 4 if over is None or isinstance(over, tuple) else len(over) if isinstance(over, list) else 2
    peer = root % team if root < 4 else (i + root) % team
    keys: dict[str, Any] = {"over": over} if stream is None else {"over": over, "on": stream}
    match kind:
        case "allgather":
            return p.allgather(small, out=p.empty((team * small.shape[0], *small.shape[1:]), small.dtype), **keys)
        case "gather":
            return p.gather(small, out=p.empty((team * small.shape[0], *small.shape[1:]), small.dtype), to=peer, **keys)
        case "allreduce":
            return p.allreduce(small, out=None if root % 2 else p.empty(small.shape, small.dtype), op=op, **keys)
        case "reduce":
            return p.reduce(small, out=p.empty(small.shape, small.dtype), to=peer, op=op, **keys)
        case "broadcast":
            return p.broadcast(small, out=small, source=peer, **keys)
        case "reduce_scatter" | "scatter":
            shape = tuple(n // team if d == dim else n for d, n in enumerate(big.shape))
            out = p.empty(shape, big.dtype)
            return p.scatter(big, out, source=peer, dim=dim, **keys) if kind == "scatter" else p.reduce_scatter(big, out, op=op, dim=dim, **keys)
        case "alltoall":
            shape = list(big.shape)
            shape[dim] = shape[dim] // team
            shape[1 - dim] = shape[1 - dim] * team
            return p.alltoall(big, out=p.empty(shape, big.dtype), split_dim=dim, cat_dim=1 - dim, **keys)
        case "alltoallv":
            given = (counts, counts) if root % 2 else ((i,) * team, tuple(range(team)))
            return p.alltoallv(big, out=p.empty(big.shape, big.dtype), send_counts=given[0], recv_counts=given[1], **keys)
        case "permute":
            return p.permute(small, out=p.empty(small.shape, small.dtype), to=peer, source=(i - 1) % team, **keys)
        case "send":
            return p.send(small, to=peer, **keys)
    return p.recv(small, source=peer, **keys)


@SLOW
@given(st.lists(st.tuples(communications(), st.integers(0, 5)), min_size=1, max_size=5), st.booleans())
def test_communications_streams_events_and_groups_survive_text(parts: Any, scheduled: bool) -> None:
    with hir.Program("moves", mesh=hir.Mesh((2, 2), AXES), scheduled=scheduled) as p:
        m = hir.sym("m")
        big = p.input("big", (12, 12), torch.float32)  # every team divides it
        small = p.input("small", (m, 2), torch.bfloat16, inout=True)
        counts = p.input("counts", (m,), torch.int64)
        flag = p.empty((), torch.int32, memory="symmetric", name="flag")
        with p.loop(1, m, 2) as i:
            for what, extra in parts:
                stream = None if extra == 0 else p.stream("s", (i + extra) % 3) if extra == 1 else "comm"
                event = state(p, what, big, small, counts, stream, i)
                if extra in (1, 3):
                    p.sync(event, "main")
                if extra == 2:
                    p.sync("comm", p.stream("s", i))
                if extra == 4:
                    p.signal(flag, to=p.rank(), value=i)
                    p.wait(flag, value=i + 1)
                if extra == 5:
                    with p.group(on="comm"):
                        p.send(small, to=(i + 1) % 4)
                        p.recv(small[0:2], source=hir.max(i - 1, 0) % 4) if what[4] % 2 else p.send(small[1:2], to=0)
        p.barrier()
        p.free(flag)
        p.output(small)
    check_text(p)


@pytest.mark.parametrize("mesh", [None, hir.Mesh(("tp",)), hir.Mesh((4,), ("tp",)), hir.Mesh((2, 3), ("dp", "tp"))])
def test_the_head_of_a_program_survives_text(mesh: Any) -> None:
    with hir.Program("head", mesh=mesh, scheduled=True) as p:
        p.input("x", (hir.sym("m"), 4), torch.bfloat16, inout=True)
        p.input("y", (hir.sym("m") + 1, 2 * hir.sym("m")), torch.float8_e4m3fn)
        p.input("w", (3,), torch.bool, memory="host")
        p.scalar("k")
        p.scalar("f", float)
        p.scalar("t", bool)
    check_text(p)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 1, -1, True, False, 2.5, 1e-05, 1e30, float("inf"), float("-inf"), float("nan")])
def test_fills_survive_text_with_every_bit(value: float) -> None:
    with hir.Program("fill") as p:
        p.output(p.full((2,), value, torch.float64))
    back = check_text(p)
    expected = torch.full((2,), float(value), dtype=torch.float64).view(torch.int64)
    for program in (p, back):
        assert torch.equal(hir.compile(program)().view(torch.int64), expected)


def test_strings_in_units_survive_text() -> None:
    from hostir.graph.table import apply

    f = hir.Fusion("odd")
    x = f.input((2,), torch.float32, name="x")
    f.output(apply(f, "aten.odd.default", (x, 'a "quoted" \\ back\nslash é', ("b", "c\\\\")), types=[x.type])[0])
    with hir.Program("strings") as p:
        p.call(f, p.input("x", (2,), torch.float32))
    check_text(p)


def test_names_that_meet_are_told_apart_in_order_of_appearance() -> None:
    with hir.Program("names") as p:
        x = p.input("i", (3, 2), torch.float32)
        y = p.zeros((2,), torch.float32, name="i")
        z = p.zeros((2,), torch.float32, name="i_1")
        with p.loop(3) as a, p.loop(2):
            p.add(x[a], y, out=y)
            p.add(x[a], z, out=z)
        p.output(y, z)
    text = str(check_text(p))
    for name in ("program @names(%i: f32[3, 2])", "%i_1 = zeros", "%i_1_1 = zeros", "for %i_2 in", "for %i_3 in", "return %i_1, %i_1_1"):
        assert name in text


def test_equal_units_are_printed_once_and_different_ones_apart() -> None:
    with hir.Program("units") as p:
        x = p.input("x", (4,), torch.float32)
        y = p.input("y", (4,), torch.float64)
        p.call(lambda a: a + 1, x)
        p.call(lambda a: a + 1, x)
        p.call(lambda a: a + 1, y)
        p.call(lambda a: a + 2, x)
    text = str(check_text(p))
    assert [line.split("(")[0] for line in text.splitlines() if line.startswith("unit")] == ["unit @unit", "unit @unit_1", "unit @unit_2"]
    assert [line.split("<- ")[1].split("(")[0] for line in text.splitlines() if "<-" in line] == ["@unit", "@unit", "@unit_1", "@unit_2"]
