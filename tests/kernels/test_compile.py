"""Kernels compiled for GPUs without one: they compile for sm_80 and sm_90, spill nothing, fit in shared memory, and read 16 bytes at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hostir.errors import BuildError
from hostir.graph.fusion import Fusion
from hostir.graph.table import TABLE, apply, bound_of
from hostir.kernels.composites import COMPOSITES, REFUSALS
from hostir.kernels.layout import Layout
from hostir.kernels.lower import why_not
from hostir.kernels.plan import Shape, make
from hostir.kernels.tiling import Target
from hostir.torch_types import to_torch
from hostir.types import DTYPES
from tests.kernels.compiling import compiled, plan
from tests.unit.kernels.test_plan import traced

pytest.importorskip("triton.backends.nvidia")
SHARED = 232_448
BF16, F32 = torch.bfloat16, torch.float32


def meta(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other runs compiled proves nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


UNITS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "accumulate": (lambda c, a, b: c + a.float() * b.float(), (meta(1 << 20, dtype=F32), meta(1 << 20), meta(1 << 20))),
    "bias_gelu": (lambda x, b: F.gelu(x + b), (meta(8192, 8192), meta(8192))),
    "residual_bias_dropout_free": (lambda x, r, b: F.silu(x + b) * 0.5 + r, (meta(4096, 4096), meta(4096, 4096), meta(4096))),
    "transpose_add": (lambda a, b: a.t() + b, (meta(4096, 4096), meta(4096, 4096))),
    "permute": (lambda a: a.permute(0, 2, 1, 3) * 2, (meta(8, 128, 32, 64),)),
    "rotary": (lambda x, c, s: torch.cat([-x[..., 64:], x[..., :64]], -1) * s + x * c, (meta(8, 2048, 128), meta(2048, 128), meta(2048, 128))),
    "scalar": (lambda x: x + 1, (meta(),)),
    "softmax": (lambda x: F.softmax(x, -1), (meta(8192, 8192),)),
    "softmax_long": (lambda x: F.softmax(x, -1), (meta(512, 65536),)),
    "softmax_few": (lambda x: F.softmax(x, -1), (meta(4, 1 << 20),)),
    "softmax_across": (lambda x: F.softmax(x, 0), (meta(512, 8192),)),
    "log_softmax_f64": (lambda x: F.log_softmax(x, -1), (meta(1024, 4096, dtype=torch.float64),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4096,), w, b), (meta(8192, 4096), meta(4096), meta(4096))),
    "layer_norm_16k": (lambda x, w, b: F.layer_norm(x, (16384,), w, b), (meta(1024, 16384), meta(16384), meta(16384))),
    "layer_norm_small": (lambda x, w, b: F.layer_norm(x, (256,), w, b), (meta(65536, 256), meta(256), meta(256))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8192,), w), (meta(8192, 8192), meta(8192))),
    "sum_rows": (lambda x: x.sum(0), (meta(8192, 8192),)),
    "sum_cols": (lambda x: x.sum(1), (meta(8192, 8192),)),
    "sum_all": (lambda x: x.sum(), (meta(8192, 8192),)),
    "sum_partials": (lambda x: x.sum(0), (meta(8, 1 << 24),)),
    "sum_several_dims": (lambda x: x.sum((0, 2)), (meta(64, 256, 1024),)),
    "var_across": (lambda x: x.float().var(0), (meta(8192, 1024),)),
    "argmax": (lambda x: x.argmax(-1), (meta(8192, 32000),)),
    "amax_all": (lambda x: x.amax(), (meta(8192, 1024),)),
    "any_i8": (lambda x: (x > 3).any(1), (meta(4096, 4096, dtype=torch.int8),)),
    "mean_and_var": (lambda x: (x.mean(1), x.var(1), x.amax(1)), (meta(4096, 4096, dtype=F32),)),
}
VECTORS = set(UNITS) - {"scalar", "rotary"}  # units whose loads and stores of whole rows must be 16 bytes wide


OLDER = {"accumulate", "bias_gelu", "transpose_add", "softmax", "softmax_few", "layer_norm", "sum_rows", "sum_all", "argmax", "var_across"}


@pytest.mark.parametrize(("name", "arch"), [*((n, 90) for n in UNITS), *((n, 80) for n in UNITS if n in OLDER)])
def test_a_unit_compiles_without_spills(name: str, arch: int, tmp_path: Path) -> None:
    fn, args = UNITS[name]
    p = plan(fn, *args)
    for report in compiled(p, arch, tmp_path):
        assert report.spill_bytes == 0, report.name
        assert report.shared <= SHARED, report.name
    if name in VECTORS:
        assert ".v4.b32" in report.ptx or ".v2.b64" in report.ptx


@pytest.mark.parametrize("name", ["bias_gelu", "softmax", "sum_rows", "layer_norm", "argmax", "sum_all"])
def test_the_classes_of_changing_sizes_compile_too(name: str, tmp_path: Path) -> None:
    fn, args = UNITS[name]
    for report in compiled(plan(fn, *args, target=Target(False, tight=False)), 90, tmp_path):
        assert report.spill_bytes == 0, report.name


def test_wide_offsets_compile(tmp_path: Path) -> None:
    p = plan(lambda x, b: F.softmax(x + b, -1), meta(1 << 20, 4096), meta(4096))
    assert p.sources[0].wide
    assert all(r.spill_bytes == 0 for r in compiled(p, 90, tmp_path))


def test_an_element_that_several_threads_read_is_written_after_all_have(tmp_path: Path) -> None:
    f = traced(lambda c, x: (c + x.sum(1), x * c.unsqueeze(1)), (64,), (64, 256))
    c, x = Layout((64,), (1,)), Layout((64, 256), (256, 1))
    p = make(f, Shape((c, x), (c, None), same=frozenset({(0, 0)})), Target(False))
    assert not p.copies
    (report,) = compiled(p, 90, tmp_path)
    assert "tl.debug_barrier()" in p.sources[0].text
    assert report.ptx.count("bar.sync") >= 1
    assert "barrier" not in make(f, Shape((c, x), (None, None)), Target(False)).sources[0].text
    big = traced(lambda c, a: c + a, (1 << 20,), (1 << 20,))
    whole = Layout((1 << 20,), (1,))
    assert "barrier" not in make(big, Shape((whole, whole), (whole,), same=frozenset({(0, 0)})), Target(False)).sources[0].text


@pytest.mark.parametrize("kind", ["f64", "f32", "bf16", "i64", "i8", "u8", "bool"])
def test_every_row_compiles_in_every_dtype(kind: str, tmp_path: Path) -> None:
    """All expressions of one dtype in one kernel."""
    f = Fusion("rows")
    dtype = to_torch(DTYPES[kind])
    x, y, cond = f.input((64, 64), dtype), f.input((64, 64), dtype), f.input((64, 64), torch.bool)
    names = []
    for row in TABLE.values():
        if row.pointwise and row.triton and row.name not in COMPOSITES:
            args = [cond if p.name == "cond" else y if p.name == "y" else x for p in row.operands]
            try:
                f.output(apply(f, row.name, args, {"low": 0, "high": 2} if row.name == "clamp" else {})[0])
            except BuildError:
                continue  # torch refuses this dtype
            names.append(row.name)
            if REFUSALS.get(row.name, lambda *_, **__: None)(**bound_of(row.name, f.ops[-1].args, f.ops[-1].attrs)):
                f.ops.pop()
                f.results.pop()
    assert len(names) > 30
    assert why_not(f) is None
    p = plan(f, meta(64, 64, dtype=dtype), meta(64, 64, dtype=dtype), meta(64, 64, dtype=torch.bool))
    assert len(compiled(p, 90, tmp_path)) == 1


def test_what_was_compiled_is_read_from_disk(tmp_path: Path) -> None:
    p = plan(lambda x: x * 2 + 1, meta(4096))
    for _ in range(2):
        compiled(p, 90, tmp_path)
        assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 1
