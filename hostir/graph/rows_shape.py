"""The rows of operations that only move elements: views, joins, indexing, and tensors made from nothing."""

from __future__ import annotations

from typing import Final

from hostir.graph import rules_shape as rule
from hostir.graph.row import Row, row

VIEWS: Final[tuple[Row, ...]] = (
    row(
        "transpose", "x: tensor | dim0: dim, dim1: dim", rule.transpose, "torch.transpose(x, dim0, dim1)",
        overloads=("transpose.int(x=self, dim0=dim0, dim1=dim1)",), shard="permute", cost="view", flags="view",
    ),
    row(
        "permute", "x: tensor | dims: dims", rule.permute, "torch.permute(x, dims)",
        overloads=("permute.default(x=self, dims=dims)",), shard="permute", cost="view", flags="view",
    ),
    row(
        "reshape", "x: tensor | shape: new_sizes", rule.reshape, "torch.reshape(x, shape)",
        overloads=(
            "view.default(x=self, shape=result.shape)", "reshape.default(x=self, shape=result.shape)",
            "_unsafe_view.default(x=self, shape=result.shape)", "squeeze.default(x=self, shape=result.shape)",
            "_reshape_alias.default(x=self, shape=result.shape)",
        ), shard="reshape", cost="view", flags="view shape",
    ),
    row(
        "broadcast", "x: tensor | dims: new_dims", rule.broadcast_dims, "h.broadcast(x, dims)", shard="expand", cost="view", flags="view",
    ),
    row(
        "expand", "x: tensor | shape: new_sizes", rule.expand, "x.expand(shape)",
        overloads=("expand.default(implicit == False, x=self, shape=result.shape)",), shard="expand", cost="view", flags="view shape",
    ),
    row(
        "squeeze", "x: tensor | dims: dims", rule.squeeze, "torch.squeeze(x, dims)",
        overloads=("squeeze.dim(x=self, dims=dim)", "squeeze.dims(x=self, dims=dim)"), shard="expand", cost="view", flags="view shape",
    ),
    row(
        "unsqueeze", "x: tensor | dim: new_dim", rule.unsqueeze, "torch.unsqueeze(x, dim)",
        overloads=("unsqueeze.default(x=self, dim=dim)",), shard="expand", cost="view", flags="view",
    ),
    row(
        "slice", "x: tensor | dim: dim = 0, start: start = 0, stop: stop? = none, step: int = 1", rule.slice_dim,
        "h.slice(x, dim, start, stop, step)",
        overloads=("slice.Tensor(x=self, dim=dim, start=start, stop=end, step=step)",), shard="slice", cost="view", flags="view shape",
    ),
    row(
        "select", "x: tensor | dim: dim, index: index", rule.select, "torch.select(x, dim, index)",
        overloads=("select.int(x=self, dim=dim, index=index)",), shard="slice", cost="view", flags="view",
    ),
)  # fmt: skip

MOVES: Final[tuple[Row, ...]] = (
    row(
        "cat", "xs: tensors | dim: dim = 0", rule.cat, "torch.cat(xs, dim)", out="+",
        overloads=("cat.default(xs=tensors, dim=dim)",), shard="cat", cost="copy",
    ),
    row(
        "stack", "xs: tensors | dim: new_dim = 0", rule.stack, "torch.stack(xs, dim)", out="+",
        overloads=("stack.default(xs=tensors, dim=dim)",), shard="cat", cost="copy", flags="composite",
    ),
    row(
        "pad", "x: tensor | pads: sizes, value: number = 0", rule.pad, "F.pad(x, pads, value=value)",
        functions=(
            "torch.nn.functional.pad(input, pad, mode='constant', value=0) -> (x=input, pads=pad, value=value)",
            "torch._C._nn.pad(input, pad, mode='constant', value=0) -> (x=input, pads=pad, value=value)",
            "torch.constant_pad_nd(input, pad, value=0) -> (x=input, pads=pad, value=value)",
        ),
        overloads=("constant_pad_nd.default(x=self, pads=pad, value=value)",), shard="slice", cost="copy",
    ),
    row(
        "flip", "x: tensor | dims: dims", rule.flip, "torch.flip(x, dims)",
        overloads=("flip.default(x=self, dims=dims)",), shard="slice", cost="copy",
    ),
    row(
        "slice_scatter", "x: tensor, y: tensor | dim: dim = 0, start: start = 0, stop: stop? = none, step: int = 1", rule.slice_scatter,
        "torch.slice_scatter(x, y, dim, start, stop, step)",
        overloads=("slice_scatter.default(x=self, y=src, dim=dim, start=start, stop=end, step=step)",), shard="slice", cost="copy",
    ),
    row(
        "select_scatter", "x: tensor, y: tensor | dim: dim, index: index", rule.select_scatter, "torch.select_scatter(x, y, dim, index)",
        overloads=("select_scatter.default(x=self, y=src, dim=dim, index=index)",), shard="slice", cost="copy",
    ),
    row(
        "tril", "x: tensor | diagonal: int = 0", rule.triangle, "torch.tril(x, diagonal)", out="+",
        overloads=("tril.default(x=self, diagonal=diagonal)",), cost="copy",
    ),
    row(
        "triu", "x: tensor | diagonal: int = 0", rule.triangle, "torch.triu(x, diagonal)", out="+",
        overloads=("triu.default(x=self, diagonal=diagonal)",), cost="copy",
    ),
    # indexing
    row(
        "gather", "x: tensor, index: tensor | dim: dim", rule.gather, "torch.gather(x, dim, index)", out="+",
        overloads=("gather.default(x=self, index=index, dim=dim)",), shard="gather", cost="gather",
    ),
    row(
        "index_select", "x: tensor, index: tensor | dim: dim", rule.index_select, "torch.index_select(x, dim, index)", out="+",
        overloads=("index_select.default(x=self, index=index, dim=dim)",), shard="index_select", cost="gather",
    ),
    row(
        "embedding", "w: tensor, index: tensor | padding: int = -1", rule.embedding, "torch.embedding(w, index, padding)",
        overloads=("embedding.default(w=weight, index=indices, padding=padding_idx)",), shard="embedding", cost="gather",
    ),
    row(
        "scatter_add", "x: tensor, index: tensor, y: tensor | dim: dim", rule.scatter_add, "torch.scatter_add(x, dim, index, y)", out="+",
        overloads=("scatter_add.default(x=self, index=index, y=src, dim=dim)",), shard="gather", cost="gather",
    ),
    # from nothing
    row(
        "full", "| shape: sizes, value: number, dtype: dtype? = none", rule.full, "torch.full(shape, value, dtype=dtype, device=device)",
        out="o.fill_(value)",
        overloads=(
            "full.default(shape=result.shape, value=fill_value, dtype=result.dtype)",
            "zeros.default(shape=result.shape, value=0, dtype=result.dtype)",
            "ones.default(shape=result.shape, value=1, dtype=result.dtype)",
            "empty.memory_format(shape=result.shape, value=0, dtype=result.dtype)",
            "empty_strided.default(shape=result.shape, value=0, dtype=result.dtype)",
            "full_like.default(shape=result.shape, value=fill_value, dtype=result.dtype, _=self)",
            "zeros_like.default(shape=result.shape, value=0, dtype=result.dtype, _=self)",
            "ones_like.default(shape=result.shape, value=1, dtype=result.dtype, _=self)",
            "empty_like.default(shape=result.shape, value=0, dtype=result.dtype, _=self)",
            "new_full.default(shape=result.shape, value=fill_value, dtype=result.dtype, _=self)",
            "new_zeros.default(shape=result.shape, value=0, dtype=result.dtype, _=self)",
            "new_ones.default(shape=result.shape, value=1, dtype=result.dtype, _=self)",
            "new_empty.default(shape=result.shape, value=0, dtype=result.dtype, _=self)",
            "new_empty_strided.default(shape=result.shape, value=0, dtype=result.dtype, _=self)",
            "scalar_tensor.default(shape=result.shape, value=s, dtype=result.dtype)",
            "fill.Scalar(shape=result.shape, value=value, dtype=result.dtype, _=self)",
            "zero.default(shape=result.shape, value=0, dtype=result.dtype, _=self)",
        ), triton="value", shard="source", cost="source", flags="pointwise",
    ),
    row(
        "iota", "| start: size = 0, stop: size, step: int = 1, dtype: dtype = i64", rule.iota,
        "torch.arange(start, stop, step, dtype=dtype, device=device)", out="torch.arange(start, stop, step, out=o)",
        overloads=(
            "arange.default(stop=end, dtype=result.dtype)", "arange.start(start=start, stop=end, dtype=result.dtype)",
            "arange.start_step(start=start, stop=end, step=step, dtype=result.dtype)",
        ), shard="source", cost="source",
    ),
    row(
        "rand", "| shape: sizes, dtype: dtype = f32", rule.rand, "torch.rand(shape, dtype=dtype, device=device)", out="torch.rand(shape, out=o)",
        overloads=("rand.default(shape=result.shape, dtype=result.dtype)", "rand_like.default(shape=result.shape, dtype=result.dtype, _=self)"),
        shard="source", cost="source", flags="random",
    ),
    row(
        "randn", "| shape: sizes, dtype: dtype = f32", rule.rand, "torch.randn(shape, dtype=dtype, device=device)", out="torch.randn(shape, out=o)",
        overloads=("randn.default(shape=result.shape, dtype=result.dtype)", "randn_like.default(shape=result.shape, dtype=result.dtype, _=self)"),
        shard="source", cost="source", flags="random",
    ),
)  # fmt: skip
ROWS: Final[tuple[Row, ...]] = VIEWS + MOVES
