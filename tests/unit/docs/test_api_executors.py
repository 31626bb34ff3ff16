"""Executors and dispatch as the public interface shows them: who takes a fusion, what compile and run promise, a third-party executor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hostir as hir
from hostir.dispatch import Executor, ExecutorDispatch, ExprEvalExecutor, FusionExecutorCache, HostIrExecutor, KernelExecutor, No


def data(*shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + 1000).reshape(shape).float()


def doubled(*, alias: bool = False) -> hir.Fusion:
    f = hir.Fusion()
    x = f.input((3, 4), torch.float32)
    f.output(hir.ops.add(x, x), alias=x if alias else None)
    return f


def gather_over(mesh: hir.Mesh) -> hir.Fusion:
    """One resharding: a shard becomes the whole."""
    f = hir.Fusion("gather")
    x = f.input((8, 2), torch.float32)
    y = hir.ops.set(x)
    f.output(y)
    x.shard(mesh, hir.Shard(0))
    y.shard(mesh, hir.Replicate())
    return f


def test_a_fusion_goes_to_the_first_executor_that_takes_it() -> None:
    ex = ExecutorDispatch.make(doubled(), ids=hir.Ids(fusion=0, concrete=0, runtime=0, group=0), device="cpu")
    assert isinstance(ex, ExprEvalExecutor)
    assert list(ex.refusals) == ["HostIrExecutor"]
    with hir.Program("p") as p:
        p.output(p.zeros((2,), "f32"))
    assert isinstance(ExecutorDispatch.make(p), HostIrExecutor)
    assert isinstance(ExecutorDispatch.make(gather_over(hir.Mesh(2))), HostIrExecutor)


def test_compile_then_run_on_lists_of_tensors() -> None:
    f = doubled()
    ex = ExecutorDispatch.make(f, device="cpu")
    assert not ex.is_compiled
    with pytest.raises(hir.NotCompiledError):
        ex.run([data(3, 4)])
    ex.compile(ex.fusion, args=None)
    assert ex.is_compiled
    x = data(3, 4)
    outs = ex.run([x])
    assert isinstance(outs, list)
    assert torch.equal(outs[0], 2 * x)
    given = torch.empty(3, 4)
    assert ex.run([x], outputs=[given])[0] is given
    assert torch.equal(given, 2 * x)
    with pytest.raises(hir.InputError):
        ex.run([x], outputs=[torch.empty(3, 4, dtype=torch.float64)])


def test_nothing_is_not_compiled() -> None:
    assert ExecutorDispatch.is_compiled(None) is False
    assert ExecutorDispatch.is_compiled(ExecutorDispatch.make(doubled(), device="cpu")) is False


def test_supports_is_true_or_a_reason() -> None:
    assert KernelExecutor.supports(hir.Fusion()) is True
    answer = HostIrExecutor.supports(doubled())
    assert not answer
    assert isinstance(answer, No)
    assert answer.why == "no operation moves data between ranks"
    assert not ExprEvalExecutor.supports(doubled(alias=True))


def test_no_executor_is_an_error_with_every_reason() -> None:
    class Picky(Executor):
        name = "Picky"

        @classmethod
        def supports(cls, fusion: Any) -> Any:
            return No("it is Monday")

        def _compile(self, fusion: Any, args: Any) -> None: ...
        def _run(self, args: Any, outputs: Any) -> Any: ...

    with pytest.raises(hir.UnsupportedError) as caught:
        ExecutorDispatch((HostIrExecutor, Picky)).make(doubled())
    assert caught.value.refusals == {"HostIrExecutor": "no operation moves data between ranks", "Picky": "it is Monday"}


def test_communication_mixed_with_computation_is_no_refusal() -> None:
    f = hir.Fusion("mixed")
    x = f.input((8, 2), torch.float32)
    y = hir.ops.set(x)
    f.output(hir.ops.add(y, y))
    mesh = hir.Mesh(2)
    x.shard(mesh, hir.Shard(0))
    y.shard(mesh, hir.Replicate())
    with pytest.raises(hir.MixedFusionError, match="mixes communication"):
        ExecutorDispatch.make(f)


def test_a_resharding_runs_on_local_shards() -> None:
    def rank_main(world: Any) -> None:
        mesh = world.mesh(("tp",))
        ex = ExecutorDispatch.make(gather_over(mesh))
        ex.compile(ex.fusion)
        whole = data(8, 2)
        assert torch.equal(ex.run([whole.chunk(world.size)[world.rank]])[0], whole)

    hir.launch.spawn(rank_main, 2, transport="threads", device="cpu")


def test_an_output_in_place_is_written_into_its_input_and_hidden() -> None:
    f = doubled(alias=True)
    with hir.Program("p") as p:
        x = p.input("x", (3, 4), torch.float32, inout=True)
        assert p.call(f, x) == ()
        p.output(x)
    x = data(3, 4)
    expected = 2 * x
    assert hir.compile(p)(x) is x
    assert torch.equal(x, expected)
    assert FusionExecutorCache(f).run(x) == []
    assert torch.equal(x, 2 * expected)


def test_a_fusion_with_a_symbolic_size_serves_every_size() -> None:
    m = hir.sym("m")
    f = hir.Fusion("rows")
    x = f.input((m, 4), torch.float32)
    f.output(hir.ops.sum(x, dims=[0]))
    cache = FusionExecutorCache(f)
    for rows in (3, 5, 3):
        x = data(rows, 4)
        outs = cache.run(x)
        assert isinstance(outs, list)
        assert torch.equal(outs[0], x.sum(0))
    assert (cache.stats.runtimes, cache.stats.reused, cache.stats.hits) == (1, 1, 1)


def test_a_third_party_executor_is_asked_in_its_place() -> None:
    ran: list[str] = []

    class MyExecutor(Executor):
        """Takes additions of a tensor to itself."""

        name = "MyExecutor"

        @classmethod
        def supports(cls, fusion: Any) -> Any:
            ops = [op.name for op in fusion.ops] if isinstance(fusion, hir.Fusion) else []
            return True if ops == ["add"] else No(f"{ops} is not one addition")

        def _compile(self, fusion: Any, args: Any) -> None: ...

        def _run(self, args: Any, outputs: Any) -> list[torch.Tensor]:
            ran.append(self.name)
            if outputs:
                outputs[0].copy_(args[0] + args[0])
                return list(outputs)
            return [args[0] + args[0]]

    mine = ExecutorDispatch.default().with_executor(MyExecutor, before="ExprEvalExecutor")
    assert [e.name for e in mine.executors] == ["HostIrExecutor", "MyExecutor", "ExprEvalExecutor", "KernelExecutor"]
    with hir.Program("p") as p:
        x = p.input("x", (3, 4), torch.float32)
        p.output(p.add(x, x), p.mul(x, x))
    run = hir.compile(p, dispatch=mine)
    x = data(3, 4)
    added, multiplied = run(x)
    assert torch.equal(added, x + x)
    assert torch.equal(multiplied, x * x)
    assert ran == ["MyExecutor"]
    assert run.segments() == {"add": "MyExecutor", "mul": "ExprEvalExecutor"}
    assert "is not one addition" in run.explain()
    with pytest.raises(hir.BuildError, match="there is no executor 'Kernel' to stand before"):
        mine.with_executor(MyExecutor, before="Kernel")
