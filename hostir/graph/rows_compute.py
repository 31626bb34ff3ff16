"""The rows of operations that compute across elements: reductions, scans, normalisations, matrix products, attention, losses."""

from __future__ import annotations

from typing import Final

from hostir.graph import rules_compute as rule
from hostir.graph.row import Row, row

# Functions of torch that stay one operation, with their parameters and what the row calls them.
_LAYER_NORM: Final = (
    "torch.nn.functional.layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5)"
    " -> (x=input, w=weight, b=bias, shape=normalized_shape, eps=eps)"
)
_RMS_NORM: Final = (
    "torch.nn.functional.rms_norm(input, normalized_shape, weight=None, eps=None) -> (x=input, w=weight, shape=normalized_shape, eps=eps)"
)
_CROSS_ENTROPY: Final = (
    "torch.nn.functional.cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, "
    "reduction='mean', label_smoothing=0.0)"
    " -> (x=input, target=target, w=weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)"
)
_MATMUL: Final = tuple(f"torch.{name}(input, other) -> (x=input, y=other)" for name in ("matmul", "Tensor.matmul", "Tensor.__matmul__"))
_ATTENTION: Final = (
    "torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
    "enable_gqa=False)"
    " -> (q=query, k=key, v=value, mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale, gqa=enable_gqa)"
)

REDUCTIONS: Final[tuple[Row, ...]] = (
    row(
        "sum", "x: tensor | dims: dims? = none, keepdim: bool = false, dtype: dtype? = none", rule.summed,
        "torch.sum(x, dims, keepdim, dtype=dtype)", out="+",
        overloads=("sum.default(x=self, dtype=dtype)", "sum.dim_IntList(x=self, dims=dim, keepdim=keepdim, dtype=dtype)"),
        triton="a + b", identity="0", shard="reduce", cost="reduce", flags="reduction",
    ),
    row(
        "mean", "x: tensor | dims: dims? = none, keepdim: bool = false, dtype: dtype? = none", rule.mean,
        "torch.mean(x, dims, keepdim, dtype=dtype)", out="+",
        overloads=("mean.default(x=self, dtype=dtype)", "mean.dim(x=self, dims=dim, keepdim=keepdim, dtype=dtype)"),
        triton="a + b", identity="0", shard="reduce", cost="reduce", flags="reduction composite",
    ),
    row(
        "amax", "x: tensor | dims: dims? = none, keepdim: bool = false", rule.extremum, "torch.amax(x, dims or (), keepdim)", out="+",
        overloads=("amax.default(x=self, dims=dim, keepdim=keepdim)", "max.default(x=self)"),
        triton="hd.maximum(a, b)", identity="lowest", shard="reduce", cost="reduce", flags="reduction",
    ),
    row(
        "amin", "x: tensor | dims: dims? = none, keepdim: bool = false", rule.extremum, "torch.amin(x, dims or (), keepdim)", out="+",
        overloads=("amin.default(x=self, dims=dim, keepdim=keepdim)", "min.default(x=self)"),
        triton="hd.minimum(a, b)", identity="highest", shard="reduce", cost="reduce", flags="reduction",
    ),
    row(
        "prod", "x: tensor | dims: dims? = none, keepdim: bool = false, dtype: dtype? = none", rule.summed, "h.prod(x, dims, keepdim, dtype)",
        overloads=("prod.default(x=self, dtype=dtype)", "prod.dim_int(x=self, dims=dim, keepdim=keepdim, dtype=dtype)"),
        triton="a * b", identity="1", shard="reduce", cost="reduce", flags="reduction",
    ),
    row(
        "var", "x: tensor | dims: dims? = none, keepdim: bool = false, correction: number = 1", rule.var,
        "torch.var(x, dims, correction=correction, keepdim=keepdim)", out="+",
        overloads=(
            "var.correction(correction == None, x=self, dims=dim, keepdim=keepdim)",
            "var.correction(x=self, dims=dim, keepdim=keepdim, correction=correction)",
        ),
        shard="reduce", cost="reduce", flags="reduction composite",
    ),
    row(
        "any", "x: tensor | dims: dims? = none, keepdim: bool = false", rule.truth, "h.any(x, dims, keepdim)",
        overloads=("any.default(x=self)", "any.dim(x=self, dims=dim, keepdim=keepdim)", "any.dims(x=self, dims=dim, keepdim=keepdim)"),
        triton="a | b", identity="0", shard="reduce", cost="reduce", flags="reduction",
    ),
    row(
        "all", "x: tensor | dims: dims? = none, keepdim: bool = false", rule.truth, "h.all(x, dims, keepdim)",
        overloads=("all.default(x=self)", "all.dim(x=self, dims=dim, keepdim=keepdim)", "all.dims(x=self, dims=dim, keepdim=keepdim)"),
        triton="a & b", identity="1", shard="reduce", cost="reduce", flags="reduction",
    ),
    row(
        "argmax", "x: tensor | dim: dim? = none, keepdim: bool = false", rule.position, "torch.argmax(x, dim, keepdim)",
        overloads=("argmax.default(x=self, dim=dim, keepdim=keepdim)",), shard="rowwise", cost="reduce", flags="reduction",
    ),
    row(
        "argmin", "x: tensor | dim: dim? = none, keepdim: bool = false", rule.position, "torch.argmin(x, dim, keepdim)",
        overloads=("argmin.default(x=self, dim=dim, keepdim=keepdim)",), shard="rowwise", cost="reduce", flags="reduction",
    ),
    row(
        "topk", "x: tensor | k: size, dim: dim = -1, largest: bool = true, sorted: bool = true", rule.topk,
        "torch.topk(x, k, dim, largest, sorted)", num_outs=2,
        overloads=("topk.default(x=self, k=k, dim=dim, largest=largest, sorted=sorted)",), shard="rowwise", cost="reduce", flags="library",
    ),
    row(
        "cumsum", "x: tensor | dim: dim, dtype: dtype? = none", rule.scan, "torch.cumsum(x, dim, dtype=dtype)", out="+",
        overloads=("cumsum.default(x=self, dim=dim, dtype=dtype)",), triton="a + b", identity="0", shard="rowwise", cost="reduce",
    ),
)  # fmt: skip

ROWWISE: Final[tuple[Row, ...]] = (
    row(
        "softmax", "x: tensor | dim: dim, dtype: dtype? = none", rule.softmax, "torch.softmax(x, dim, dtype=dtype)",
        overloads=(
            "_softmax.default(half_to_float == False, x=self, dim=dim)",
            "_softmax.default(half_to_float == True, x=self, dim=dim, dtype=f32)",
        ),
        shard="rowwise", cost="reduce", flags="composite",
    ),
    row(
        "log_softmax", "x: tensor | dim: dim, dtype: dtype? = none", rule.softmax, "torch.log_softmax(x, dim, dtype=dtype)",
        overloads=(
            "_log_softmax.default(half_to_float == False, x=self, dim=dim)",
            "_log_softmax.default(half_to_float == True, x=self, dim=dim, dtype=f32)",
        ),
        shard="rowwise", cost="reduce", flags="composite",
    ),
    row(
        "layer_norm", "x: tensor, w: tensor? = none, b: tensor? = none | shape: sizes, eps: number = 1e-05", rule.layer_norm,
        "F.layer_norm(x, shape, w, b, eps)",
        functions=(_LAYER_NORM,),
        shard="normalise", cost="reduce", flags="composite",
    ),
    row(
        "rms_norm", "x: tensor, w: tensor? = none | shape: sizes, eps: number? = none", rule.rms_norm, "F.rms_norm(x, shape, w, eps)",
        functions=(_RMS_NORM,),
        shard="normalise", cost="reduce", flags="composite",
    ),
    row(
        "dropout", "x: tensor | p: number = 0.5", rule.like_first(floats=True), "F.dropout(x, p, True)",
        functions=("torch.nn.functional.dropout(input, p=0.5, training=True, inplace=False) -> (x=input, p=p)",),
        shard="pointwise", flags="random",
    ),
    row(
        "cross_entropy",
        "x: tensor, target: tensor, w: tensor? = none | reduction: str = 'mean', ignore_index: int = -100, label_smoothing: number = 0.0",
        rule.cross_entropy,
        "F.cross_entropy(x, target, w, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)",
        functions=(_CROSS_ENTROPY,),
        shard="cross_entropy", cost="reduce", flags="composite",
    ),
)  # fmt: skip

PRODUCTS: Final[tuple[Row, ...]] = (
    row(
        "mm", "x: tensor, y: tensor", rule.mm, "torch.mm(x, y)", out="+", overloads=("mm.default(x=self, y=mat2)",), functions=_MATMUL,
        shard="matmul", cost="matmul", flags="library",
    ),
    row(
        "bmm", "x: tensor, y: tensor", rule.bmm, "torch.bmm(x, y)", out="+", overloads=("bmm.default(x=self, y=mat2)",), functions=_MATMUL,
        shard="matmul", cost="matmul", flags="library",
    ),
    row(
        "matmul", "x: tensor, y: tensor", rule.matmul, "torch.matmul(x, y)", out="+", functions=_MATMUL, shard="matmul", cost="matmul", flags="library",
    ),
    row(
        "linear", "x: tensor, w: tensor, b: tensor? = none", rule.linear, "F.linear(x, w, b)", out="h.linear_out(x, w, b, o)",
        functions=("torch.nn.functional.linear(input, weight, bias=None) -> (x=input, w=weight, b=bias)",),
        shard="linear", cost="matmul", flags="library",
    ),
    row(
        "addmm", "c: tensor, x: tensor, y: tensor | beta: number = 1, alpha: number = 1", rule.addmm,
        "torch.addmm(c, x, y, beta=beta, alpha=alpha)", out="+",
        overloads=("addmm.default(c=self, x=mat1, y=mat2, beta=beta, alpha=alpha)",), shard="matmul", cost="matmul", flags="library",
    ),
    row(
        "baddbmm", "c: tensor, x: tensor, y: tensor | beta: number = 1, alpha: number = 1", rule.baddbmm,
        "torch.baddbmm(c, x, y, beta=beta, alpha=alpha)", out="+",
        overloads=("baddbmm.default(c=self, x=batch1, y=batch2, beta=beta, alpha=alpha)",), shard="matmul", cost="matmul", flags="library",
    ),
    row(
        "sdpa",
        "q: tensor, k: tensor, v: tensor, mask: tensor? = none | "
        "dropout: number = 0.0, causal: bool = false, scale: number? = none, gqa: bool = false",
        rule.sdpa, "F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)",
        functions=(_ATTENTION,),
        shard="attention", cost="attention", flags="library composite",
    ),
)  # fmt: skip
ROWS: Final[tuple[Row, ...]] = REDUCTIONS + ROWWISE + PRODUCTS
