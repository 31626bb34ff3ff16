"""The public interface on several ranks, as threads of this process: every communication, teams, groups, meshes, and how ranks fail.

Element i of rank r's data is 1000 (r + 1) + i. What a communication must give is computed here from all ranks' data with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

import hostir as hir

WORLDS: Final = (1, 2, 3, 4)
MODES: Final = ("checked", "compiled")


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + 1000 * (rank + 1)).reshape(shape).to(dtype)


def on_threads(fn: Callable[..., Any], num_ranks: int) -> list[Any]:
    return hir.launch.spawn(fn, num_ranks, transport="threads", device="cpu")


def parses_back(p: Any) -> Any:
    assert hir.parse(str(p)) == p
    return p


# ------------------------------------------------------------------------------------------------------ allgather + GEMM, ring


def ring_ag_gemm(mesh, m, k, n, dtype=torch.float32):
    d = mesh.size  # an int on a sized mesh; on hir.Mesh(("tp",)) the expression size(tp): one text for every world
    with hir.Program("ring_ag_gemm", mesh=mesh) as p:
        x = p.input("x", (m // d, k), dtype)
        w = p.input("w", (k, n), dtype)
        y = p.empty((d, m // d, n), dtype, name="y")
        buf = p.empty((d, m // d, k), dtype, name="buf")
        r = p.rank()
        p.copy(x, out=buf[0])
        with p.loop(d) as j:
            with p.if_(j < d - 1):
                p.permute(buf[j], out=buf[j + 1], to=(r + 1) % d, source=(r - 1) % d, on="comm")
            p.matmul(buf[j], w, out=y[(r - j) % d])
        p.output(y)
    return p


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("sized", [True, False])
def test_allgather_gemm_on_a_ring(num_ranks: int, sized: bool, mode: str) -> None:
    m, k, n = 12, 5, 3
    rows = (torch.arange(m * k) % 11 - 5).reshape(m, k).float()

    def rank_main(world: Any) -> torch.Tensor:
        mesh = world.mesh(("tp",))
        p = parses_back(ring_ag_gemm(mesh if sized else hir.Mesh(("tp",)), m, k, n))
        run = hir.compile(p, mode=mode)  # the world entered in this thread
        w = (torch.arange(k * n) % 7 - 3 + world.rank).reshape(k, n).float()
        y: torch.Tensor = run(rows.chunk(world.size)[world.rank], w)
        assert torch.equal(y.reshape(m, n), rows @ w)
        return y

    assert len(on_threads(rank_main, num_ranks)) == num_ranks


def test_one_text_serves_every_world() -> None:
    texts = on_threads(lambda world: str(ring_ag_gemm(hir.Mesh(("tp",)), 12 * world.size // world.size, 5, 3)), 3)
    assert len(set(texts)) == 1
    assert "size(tp)" in texts[0]


# ------------------------------------------------------------------------------------------------------- every communication


Many = Sequence[torch.Tensor]


def gathered(xs: Many, dim: int) -> torch.Tensor:
    return torch.cat(list(xs), dim)


def reduced(xs: Many, op: str) -> torch.Tensor:
    stack = torch.stack(list(xs))
    match op:
        case "sum":
            return stack.sum(0).to(stack.dtype)
        case "avg":
            return stack.sum(0) / len(xs)
        case "prod":
            return stack.prod(0).to(stack.dtype)
        case "min":
            return stack.amin(0)
        case "max":
            return stack.amax(0)
    raise AssertionError(op)


def alltoall(xs: Many, rank: int, split: int, cat: int) -> torch.Tensor:
    return torch.cat([x.chunk(len(xs), split)[rank] for x in xs], cat)


Write = Callable[[Any, Any, Any, int], object]
Expect = Callable[[Many, int], "torch.Tensor | None"]

# name: (shape of x in a world of d, shape of out, the statement, what rank r of the data xs must hold; None where out stays as it was)
KINDS: Final[dict[str, tuple[Callable[[int], tuple[int, ...]], Callable[[int], tuple[int, ...]], Write, Expect]]] = {
    "allgather": (lambda d: (2, 3), lambda d: (2 * d, 3), lambda p, x, y, d: p.allgather(x, y), lambda xs, r: gathered(xs, 0)),
    "allgather dim 1": (lambda d: (2, 3), lambda d: (2, 3 * d), lambda p, x, y, d: p.allgather(x, out=y, dim=1), lambda xs, r: gathered(xs, 1)),
    "allgather dim -1": (lambda d: (2, 3), lambda d: (2, 3 * d), lambda p, x, y, d: p.allgather(x, y, dim=-1), lambda xs, r: gathered(xs, 1)),
    "allgather of one element": (lambda d: (), lambda d: (d,), lambda p, x, y, d: p.allgather(x, y), lambda xs, r: torch.stack(list(xs))),
    "allgather of nothing": (lambda d: (0, 3), lambda d: (0, 3), lambda p, x, y, d: p.allgather(x, y), lambda xs, r: gathered(xs, 0)),
    "allreduce sum": (lambda d: (2, 3), lambda d: (2, 3), lambda p, x, y, d: p.allreduce(x, y), lambda xs, r: reduced(xs, "sum")),
    "allreduce avg": (lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.allreduce(x, y, op="avg"), lambda xs, r: reduced(xs, "avg")),
    "allreduce prod": (lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.allreduce(x, y, op="prod"), lambda xs, r: reduced(xs, "prod")),
    "allreduce min": (lambda d: (), lambda d: (), lambda p, x, y, d: p.allreduce(x, y, op="min"), lambda xs, r: reduced(xs, "min")),
    "allreduce max": (lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.allreduce(x, y, op="max"), lambda xs, r: reduced(xs, "max")),
    "allreduce in place": (lambda d: (4,), lambda d: (4,), lambda p, x, y, d: (p.copy(x, y), p.allreduce(y)), lambda xs, r: reduced(xs, "sum")),
    "reduce_scatter": (
        lambda d: (2 * d, 3), lambda d: (2, 3), lambda p, x, y, d: p.reduce_scatter(x, y), lambda xs, r: reduced(xs, "sum").chunk(len(xs))[r],
    ),
    "reduce_scatter max dim 1": (
        lambda d: (2, 2 * d), lambda d: (2, 2), lambda p, x, y, d: p.reduce_scatter(x, y, op="max", dim=1),
        lambda xs, r: reduced(xs, "max").chunk(len(xs), 1)[r],
    ),
    "reduce": (
        lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.reduce(x, y, to=d - 1), lambda xs, r: reduced(xs, "sum") if r == len(xs) - 1 else None,
    ),
    "reduce min to 0": (
        lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.reduce(x, y, to=0, op="min"), lambda xs, r: reduced(xs, "min") if r == 0 else None,
    ),
    "broadcast": (lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.broadcast(x, y, source=d - 1), lambda xs, r: xs[-1]),
    "gather": (
        lambda d: (2, 3), lambda d: (2 * d, 3), lambda p, x, y, d: p.gather(x, y, to=0), lambda xs, r: gathered(xs, 0) if r == 0 else None,
    ),
    "gather dim 1": (
        lambda d: (2, 3), lambda d: (2, 3 * d), lambda p, x, y, d: p.gather(x, y, to=d - 1, dim=1),
        lambda xs, r: gathered(xs, 1) if r == len(xs) - 1 else None,
    ),
    "scatter": (lambda d: (2 * d, 3), lambda d: (2, 3), lambda p, x, y, d: p.scatter(x, y, source=0), lambda xs, r: xs[0].chunk(len(xs))[r]),
    "scatter dim 1": (
        lambda d: (2, 2 * d), lambda d: (2, 2), lambda p, x, y, d: p.scatter(x, y, source=d - 1, dim=1), lambda xs, r: xs[-1].chunk(len(xs), 1)[r],
    ),
    "scatter to one element": (lambda d: (d,), lambda d: (), lambda p, x, y, d: p.scatter(x, y, source=0), lambda xs, r: xs[0][r]),
    "alltoall": (lambda d: (2 * d, 3), lambda d: (2 * d, 3), lambda p, x, y, d: p.alltoall(x, y), lambda xs, r: alltoall(xs, r, 0, 0)),
    "alltoall split 0 cat 1": (
        lambda d: (2 * d, 3), lambda d: (2, 3 * d), lambda p, x, y, d: p.alltoall(x, y, split_dim=0, cat_dim=1), lambda xs, r: alltoall(xs, r, 0, 1),
    ),
    "alltoall split 1 cat 0": (
        lambda d: (2, 3 * d), lambda d: (2 * d, 3), lambda p, x, y, d: p.alltoall(x, y, split_dim=-1), lambda xs, r: alltoall(xs, r, 1, 0),
    ),
    "alltoallv": (
        # member j gets j + 1 rows from everybody
        lambda d: (d * (d + 1) // 2, 2), lambda d: (d * d, 2),
        lambda p, x, y, d: p.alltoallv(
            x, y[0 : d * (p.rank() + 1)], send_counts=tuple(j + 1 for j in range(d)), recv_counts=(p.rank() + 1,) * d
        ),
        lambda xs, r: torch.cat(
            [x[r * (r + 1) // 2 : (r + 1) * (r + 2) // 2] for x in xs] + [torch.full(((len(xs) - r - 1) * len(xs), 2), -1.0)]
        ),
    ),
    "permute": (
        lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.permute(x, y, to=(p.rank() + 1) % d, source=(p.rank() - 1) % d),
        lambda xs, r: xs[(r - 1) % len(xs)],
    ),
    "permute backwards": (
        lambda d: (4,), lambda d: (4,), lambda p, x, y, d: p.permute(x, y, to=d - 1 - p.rank(), source=d - 1 - p.rank()), lambda xs, r: xs[-1 - r],
    ),
    "barrier": (lambda d: (4,), lambda d: (4,), lambda p, x, y, d: (p.barrier(), p.copy(x, y)), lambda xs, r: xs[r]),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_communication_gives_what_torch_gives(kind: str, num_ranks: int) -> None:
    shape, out_shape, write, expect = KINDS[kind]
    d = num_ranks
    xs = [data(r, *shape(d)) for r in range(d)]
    if "prod" in kind:
        xs = [x % 5 - 2 for x in xs]

    def rank_main(world: Any) -> None:
        for on in ("main", "comm"):
            for mode in MODES:
                with hir.Program("one", mesh=world.mesh(("tp",))) as p:
                    x = p.input("x", shape(d), torch.float32)
                    y = p.input("y", out_shape(d), torch.float32, inout=True)
                    with p.on(on):
                        write(p, x, y, d)
                    p.output(y)
                mine, given = xs[world.rank].clone(), torch.full(out_shape(d), -1.0)
                hir.compile(parses_back(p), mode=mode)(mine, given)
                expected = expect(xs, world.rank)
                assert torch.equal(given, torch.full(out_shape(d), -1.0) if expected is None else expected)
                assert torch.equal(mine, xs[world.rank])

    on_threads(rank_main, num_ranks)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_counts_may_come_from_a_buffer(num_ranks: int) -> None:
    """Row i of rank r goes to rank i mod d, as many as a buffer says."""
    d = num_ranks

    def rank_main(world: Any) -> None:
        with hir.Program("counts", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (2 * d, 2), torch.float32)
            n = p.input("n", (d,), torch.int64)
            y = p.zeros((2 * d, 2), torch.float32)
            p.alltoallv(x, y, send_counts=n, recv_counts=n)
            p.output(y)
        y = hir.compile(parses_back(p))(data(world.rank, 2 * d, 2), torch.full((d,), 2))
        assert torch.equal(y, alltoall([data(r, 2 * d, 2) for r in range(d)], world.rank, 0, 0))

    on_threads(rank_main, num_ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_communications_take_other_dtypes(dtype: torch.dtype) -> None:
    def rank_main(world: Any) -> None:
        with hir.Program("dtypes", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (4,), dtype)
            y, z = p.empty((8,), dtype), p.empty((4,), dtype)
            p.allgather(x, y)
            p.permute(x, z, to=1 - p.rank(), source=1 - p.rank())
            p.output(y, z)
        xs = [torch.arange(4).add(r).to(dtype) for r in range(2)]
        y, z = hir.compile(parses_back(p))(xs[world.rank])
        assert torch.equal(y, torch.cat(xs))
        assert torch.equal(z, xs[1 - world.rank])

    on_threads(rank_main, 2)


# ------------------------------------------------------------------------------------------------------------ groups and teams


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_a_group_of_send_and_recv_is_a_ring(num_ranks: int, mode: str) -> None:
    d = num_ranks

    def rank_main(world: Any) -> None:
        with hir.Program("ring", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (2, 3), torch.float32)
            y = p.empty((2, 3), torch.float32)
            r = p.rank()
            with p.group(on="comm"):
                p.send(x[0], to=(r + 1) % d)
                p.recv(y[0], source=(r - 1) % d)
                p.send(x[1], to=(r - 1) % d)
                p.recv(y[1], source=(r + 1) % d)
            p.output(y)
        y = hir.compile(parses_back(p), mode=mode)(data(world.rank, 2, 3))
        left, right = data((world.rank - 1) % d, 2, 3), data((world.rank + 1) % d, 2, 3)
        assert torch.equal(y, torch.stack([left[0], right[1]]))

    on_threads(rank_main, num_ranks)


def test_send_and_recv_pair_up_by_branches() -> None:
    def rank_main(world: Any) -> None:
        with hir.Program("pairs", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (3,), torch.float32)
            y = p.zeros((3,), torch.float32)
            r = p.rank()
            with p.if_(r % 2 == 0) as br:
                p.send(x, to=r + 1)
            with br.else_():
                p.recv(y, source=r - 1)
            p.output(y)
        y = hir.compile(parses_back(p))(data(world.rank, 3))
        assert torch.equal(y, data(world.rank - 1, 3) if world.rank % 2 else torch.zeros(3))

    on_threads(rank_main, 4)


def test_teams_run_along_the_axes_of_a_mesh() -> None:
    """On mesh(dp = 2, tp = 2): rank = 2 dp + tp."""

    def rank_main(world: Any) -> None:
        mesh = world.mesh(("dp", "tp"), (2, 2))
        with hir.Program("teams", mesh=mesh) as p:
            x = p.input("x", (1,), torch.float32)
            outs = []
            for over, size in ((None, 4), ("tp", 2), ("dp", 2), (("dp", "tp"), 4), (("tp", "dp"), 4), ([3, 1, 0, 2], 4)):
                y = p.empty((size,), torch.float32)
                p.allgather(x, y, over=over)
                outs.append(y)
            p.output(*outs)
        got = hir.compile(parses_back(p))(data(world.rank, 1))
        dp, tp = world.rank // 2, world.rank % 2
        for y, ranks in zip(got, ([0, 1, 2, 3], [2 * dp, 2 * dp + 1], [tp, 2 + tp], [0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 0, 2]), strict=True):
            assert y.tolist() == [1000.0 * (r + 1) for r in ranks]

    on_threads(rank_main, 4)


def test_a_rank_list_needs_no_mesh_and_leaves_the_others_out() -> None:
    def rank_main(world: Any) -> None:
        with hir.Program("listed", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (2,), torch.float32, inout=True)
            with p.if_((p.rank() == 0) | (p.rank() == 2)):
                p.allreduce(x, over=[0, 2])
            p.output(x)
        x = data(world.rank, 2)
        hir.compile(parses_back(p))(x)
        assert torch.equal(x, data(0, 2) + data(2, 2) if world.rank in (0, 2) else data(world.rank, 2))

    on_threads(rank_main, 3)


def test_ranks_and_sizes_are_expressions_or_numbers() -> None:
    with hir.Program("sized", mesh=hir.Mesh((2, 3), ("dp", "tp"))) as p:
        assert (str(p.rank("tp")), p.size("tp"), p.size()) == ("rank(tp)", 3, 6)
        assert str(p.rank()) == "rank(dp) * 3 + rank(tp)"
    with hir.Program("open", mesh=hir.Mesh(("dp", "tp"))) as p:
        assert (str(p.size("tp")), str(p.size())) == ("size(tp)", "size(dp) * size(tp)")
        assert str(p.rank()) == "rank(dp) * size(tp) + rank(tp)"


# --------------------------------------------------------------------------------------------------------------- order by hand


@pytest.mark.parametrize("mode", MODES)
def test_a_scheduled_program_is_taken_as_it_is_written(mode: str) -> None:
    def rank_main(world: Any) -> None:
        with hir.Program("by_hand", mesh=world.mesh(("tp",)), scheduled=True) as p:
            x = p.input("x", (4,), torch.float32)
            y, z = p.empty((4,), torch.float32), p.empty((4,), torch.float32)
            event = p.permute(x, y, to=1 - p.rank(), source=1 - p.rank(), on="comm")
            p.mul(x, 2, out=z)
            p.sync(event, "main")
            p.add(y, z, out=z)
            p.output(z)
        parses_back(p)
        assert "!e = %t <- permute" in str(p)
        assert "sync !e -> main" in str(p)
        z = hir.compile(p, mode=mode)(data(world.rank, 4))
        assert torch.equal(z, data(world.rank, 4) * 2 + data(1 - world.rank, 4))

    on_threads(rank_main, 2)


def test_the_last_statement_can_be_named() -> None:
    with hir.Program("named", mesh=hir.Mesh(("tp",))) as p:
        x = p.input("x", (4,), torch.float32, inout=True)
        p.add(x, 1, out=x, on="s")
        event = p.event()
        p.sync(event, "comm")
        with p.on("comm"):
            p.allreduce(x)
        p.sync("comm")
        p.sync(p.stream("s", p.rank() % 2), p.stream("main"))
    lines = [line.strip() for line in str(parses_back(p)).splitlines()[-6:-1]]
    assert lines == [
        "!e = %x <- @add(%x) on s",
        "sync !e -> comm",
        "%x <- allreduce(%x) on comm",
        "sync comm -> main",
        "sync s[rank(tp) % 2] -> main",
    ]


# ------------------------------------------------------------------------------------------------------------ meshes and worlds


def test_a_mesh_has_names_and_may_have_sizes() -> None:
    mesh = hir.Mesh((2, 4), ("dp", "tp"))
    assert (mesh.shape, mesh.names, mesh.size, str(mesh)) == ((2, 4), ("dp", "tp"), 8, "mesh(dp = 2, tp = 4)")
    assert (mesh["tp"].shape, mesh["tp"].names, mesh["tp"].size) == ((4,), ("tp",), 4)
    assert mesh["tp", "dp"].shape == (4, 2)
    assert hir.Mesh(4).names == ("tp",)
    unsized = hir.Mesh(("tp",))
    assert unsized.shape is None
    assert str(unsized.size) == "size(tp)"
    assert str(unsized["tp"]) == "mesh(tp)"


def test_a_world_gives_bound_meshes_and_the_sub_mesh_of_each_rank() -> None:
    def rank_main(world: Any) -> list[tuple[int, ...]]:
        mesh = world.mesh(("dp", "tp"), (2, 2))
        assert (world.size, mesh.world) == (4, world)
        assert mesh.coordinates(world.rank) == {"dp": world.rank // 2, "tp": world.rank % 2}
        with pytest.raises(hir.InputError, match="does not cover the world"):
            world.mesh(("tp",), (3,))
        with pytest.raises(hir.InputError, match="needs its shape"):
            world.mesh(("dp", "tp"))
        return [mesh["tp"].layout, mesh["dp"].layout]

    assert on_threads(rank_main, 4) == [[(0, 1), (0, 2)], [(0, 1), (1, 3)], [(2, 3), (0, 2)], [(2, 3), (1, 3)]]


def test_a_device_mesh_of_torch_becomes_a_mesh() -> None:
    theirs = SimpleNamespace(mesh=torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("dp", "tp"))
    mesh = hir.Mesh.from_torch(theirs)
    assert (mesh.shape, mesh.names, mesh.layout) == ((2, 2), ("dp", "tp"), (3, 1, 0, 2))
    assert mesh.team(0, ["tp"]) == (0, 2)


def test_a_compiled_program_needs_the_ranks_that_it_names() -> None:
    run = hir.compile(ring_ag_gemm(hir.Mesh((2,), ("tp",)), 4, 2, 2))
    with pytest.raises(hir.InputError, match="the program runs on 2 ranks") as caught:
        run(torch.ones(2, 2), torch.ones(2, 2))
    assert caught.value.cure is not None
    assert "hir.launch.spawn" in caught.value.cure


def test_another_mesh_than_the_programs_is_refused() -> None:
    p = ring_ag_gemm(hir.Mesh((2,), ("tp",)), 4, 2, 2)
    with pytest.raises(hir.InputError, match="the mesh has other axes than the program"):
        hir.compile(p, hir.Mesh((2,), ("dp",)))
    with pytest.raises(hir.InputError, match="mesh axis 'tp' has another size"):
        hir.compile(p, hir.Mesh((4,), ("tp",)))


# ----------------------------------------------------------------------------------------------------------------------- spawn


def test_spawn_runs_lambdas_and_closures_with_arguments_and_returns_the_results_in_rank_order() -> None:
    factor = 10
    assert hir.launch.spawn(lambda world, a, b: world.rank * factor + a - b, 3, transport="threads", args=(7, 2)) == [5, 15, 25]


def test_a_rank_that_raises_is_named_in_the_headline() -> None:
    def rank_main(world: Any) -> None:
        with hir.Program("stuck", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (4,), torch.float32, inout=True)
            p.allreduce(x)
        if world.rank == 2:
            raise ValueError("no luck")
        hir.compile(p)(data(world.rank, 4))

    with pytest.raises(hir.RankError) as caught:
        on_threads(rank_main, 4)
    error = caught.value
    assert str(error).splitlines()[0].startswith("rank 2: ValueError: no luck")
    assert error.rank == 2
    assert isinstance(error.__cause__, ValueError)
    assert 2 in error.ranks


def test_ranks_that_build_different_programs_are_told_the_first_difference() -> None:
    def rank_main(world: Any) -> None:
        with hir.Program("differs", mesh=world.mesh(("tp",))) as p:
            x = p.input("x", (4,), torch.float32, inout=True)
            p.mul(x, 1 + world.rank, out=x)  # baked in: use p.rank()
            p.allreduce(x)
        hir.compile(p)(data(world.rank, 4))

    with pytest.raises(hir.RankError) as caught:
        on_threads(rank_main, 2)
    assert isinstance(caught.value.__cause__, hir.RankMismatchError)
    assert "mul(%a, 1)" in str(caught.value)
    assert "mul(%a, 2)" in str(caught.value)
