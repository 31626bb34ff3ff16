"""The rows of operations that work element by element, operands broadcast and promoted by torch's rules."""

from __future__ import annotations

from typing import Any, Final

from hostir.graph.row import Row, row
from hostir.graph.rules import pointwise
from hostir.graph.rules_shape import cast, same_type


def _unary(name: str, promotion: str, triton: str, *, result: str = "same", overload: str = "", aten: str = "", out: str = "+", **rest: Any) -> Row:
    return row(
        name, "x: tensor", pointwise(promotion, result), aten or f"torch.{name}(x)",
        out=out, overloads=(overload or f"{name}.default(x=self)",), promotion=promotion, triton=triton, shard="pointwise",
        flags="pointwise" + (" composite" if rest.get("decompose") else ""), **rest,
    )  # fmt: skip


def _binary(name: str, promotion: str, triton: str, *, result: str = "same", overloads: tuple[str, ...] = (), aten: str = "", **rest: Any) -> Row:
    known = overloads or (f"{name}.Tensor(x=self, y=other)", f"{name}.Scalar(x=self, y=other)")
    return row(
        name, "x: value, y: value", pointwise(promotion, result), aten or f"torch.{name}(x, y)",
        out="+", overloads=known, promotion=promotion, triton=triton, shard="pointwise", flags="pointwise", **rest,
    )  # fmt: skip


def _compare(name: str, promotion: str, sign: str) -> Row:
    return _binary(name, promotion, f"x {sign} y", result="bool")


def _logical(name: str, triton: str) -> Row:
    return _binary(name, "any", triton, result="bool", overloads=(f"{name}.default(x=self, y=other)",), numbers="")


def _bits(name: str, sign: str, words: str) -> Row:
    overloads = (
        f"{name}.Tensor(x=self, y=other)",
        f"{name}.Scalar(x=self, y=other)",
        f"{words}.Tensor(x=self, y=other)",
        f"{words}.Scalar(x=self, y=other)",
    )
    return _binary(name, "integer", f"x {sign} y", overloads=overloads)


ROWS: Final[tuple[Row, ...]] = (
    # arithmetic
    _binary("add", "any", "x + y"),
    _binary(
        "sub", "no-bool", "x - y",
        overloads=(
            "sub.Tensor(x=self, y=other)", "sub.Scalar(x=self, y=other)", "rsub.Scalar(x=other, y=self)", "rsub.Tensor(x=other, y=self)",
        ),
    ),
    _binary("mul", "any", "x * y"),
    _binary("div", "float", "hd.div(x, y)"),
    _binary(
        "pow", "number", "hd.pow(x, y)", numbers="x y",
        overloads=(
            "pow.Tensor_Tensor(x=self, y=exponent)", "pow.Tensor_Scalar(x=self, y=exponent)", "pow.Scalar(x=self, y=exponent)",
        ),
    ),
    _binary(
        "floor_divide", "order number", "hd.floor_divide(x, y)",
        overloads=(
            "floor_divide.default(x=self, y=other)", "floor_divide.Scalar(x=self, y=other)",
            'div.Tensor_mode(rounding_mode == "floor", x=self, y=other)', 'div.Scalar_mode(rounding_mode == "floor", x=self, y=other)',
        ),
    ),
    _binary("remainder", "order", "hd.remainder(x, y)"),
    _binary("fmod", "order", "hd.fmod(x, y)"),
    _binary("atan2", "float", "hd.atan2(x, y)", numbers="", overloads=("atan2.default(x=self, y=other)",)),
    _binary("maximum", "order", "hd.maximum(x, y)", numbers="", overloads=("maximum.default(x=self, y=other)",)),
    _binary("minimum", "order", "hd.minimum(x, y)", numbers="", overloads=("minimum.default(x=self, y=other)",)),
    # comparison, logic, bits
    _compare("eq", "any", "=="),
    _compare("ne", "any", "!="),
    _compare("lt", "order", "<"),
    _compare("le", "order", "<="),
    _compare("gt", "order", ">"),
    _compare("ge", "order", ">="),
    _logical("logical_and", "(x != 0) & (y != 0)"),
    _logical("logical_or", "(x != 0) | (y != 0)"),
    _logical("logical_xor", "(x != 0) ^ (y != 0)"),
    _unary("logical_not", "any", "x == 0", result="bool"),
    _bits("bitwise_and", "&", "__and__"),
    _bits("bitwise_or", "|", "__or__"),
    _bits("bitwise_xor", "^", "__xor__"),
    _unary("bitwise_not", "integer", "hd.bitwise_not(x)"),
    _unary("isnan", "any", "x != x", result="bool", out=""),
    _unary("isfinite", "any", "hd.isfinite(x)", result="bool", out="", overload="isfinite.default(x=self)"),
    # one operand
    _unary("neg", "no-bool", "-x"),
    _unary("abs", "any", "hd.abs(x)", result="real"),
    _unary("sign", "order", "hd.sign(x)"),
    _unary("exp", "float", "hd.exp(x)"),
    _unary("exp2", "float", "tl.exp2(x)"),
    _unary("expm1", "float", "hd.expm1(x)"),
    _unary("log", "float", "hd.log(x)"),
    _unary("log2", "float", "tl.log2(x)"),
    _unary("log1p", "float", "hd.log1p(x)"),
    _unary("sqrt", "float", "hd.sqrt(x)"),
    _unary("rsqrt", "float", "tl.rsqrt(x)"),
    _unary("reciprocal", "float", "hd.div(1.0, x)"),
    _unary("sin", "float", "tl.sin(x)"),
    _unary("cos", "float", "tl.cos(x)"),
    _unary("tan", "float", "hd.tan(x)"),
    _unary("atan", "float", "hd.atan(x)"),
    _unary("erf", "float", "tl.erf(x)"),
    _unary("tanh", "float", "hd.tanh(x)"),
    _unary("sigmoid", "float", "hd.sigmoid(x)"),
    _unary("floor", "order", "hd.floor(x)"),
    _unary("ceil", "order", "hd.ceil(x)"),
    _unary("trunc", "order", "hd.trunc(x)"),
    _unary("round", "order", "hd.round(x)"),
    _unary("relu", "order no-bool", "hd.relu(x)", out="torch.clamp_min(x, 0, out=o)"),
    _unary("silu", "any", "x * hd.sigmoid(x)", aten="F.silu(x)", out="torch._C._nn.silu(x, out=o)", decompose="result = mul(x, sigmoid(x))"),
    row(
        "gelu", "x: tensor | approximate: str = 'none'", lambda x, approximate: pointwise("any")(x=x),
        "F.gelu(x, approximate=approximate)",  # its out= form writes wrong numbers into strided outputs (torch 2.13, CPU)
        overloads=("gelu.default(x=self, approximate=approximate)",),
        promotion="any", triton="hd.gelu(x, approximate)", shard="pointwise", flags="pointwise composite",
    ),
    # several operands
    row(
        "where", "cond: tensor, x: value, y: value", pointwise("any", skip=("cond",)), "torch.where(cond, x, y)", out="+", numbers="x y",
        overloads=(
            "where.self(cond=condition, x=self, y=other)", "where.ScalarSelf(cond=condition, x=self, y=other)",
            "where.ScalarOther(cond=condition, x=self, y=other)", "where.Scalar(cond=condition, x=self, y=other)",
            "masked_fill.Scalar(cond=mask, x=value, y=self)", "masked_fill.Tensor(cond=mask, x=value, y=self)",
        ),
        promotion="any", triton="tl.where(cond, x, y)", shard="pointwise", flags="pointwise",
    ),
    row(
        "clamp", "x: tensor | low: value?, high: value?", pointwise("order"), "torch.clamp(x, low, high)", out="+", numbers="low high",
        overloads=(
            "clamp.default(x=self, low=min, high=max)", "clamp.Tensor(x=self, low=min, high=max)", "clamp_min.default(x=self, low=min)",
            "clamp_min.Tensor(x=self, low=min)", "clamp_max.default(x=self, high=max)", "clamp_max.Tensor(x=self, high=max)",
            "hardtanh.default(x=self, low=min_val, high=max_val)",
        ),
        promotion="order", triton="hd.clamp(x, low, high)", shard="pointwise", flags="pointwise",
    ),
    row(
        "cast", "x: tensor | dtype: dtype", cast, "x.to(dtype, copy=True)", out="o.copy_(x)",
        overloads=("_to_copy.default(x=self, dtype=result.dtype)",), triton="hd.cast(x, dtype)", shard="pointwise", flags="pointwise",
    ),
    row(
        "set", "x: tensor", same_type, "x.clone()", out="o.copy_(x)",
        overloads=("clone.default(x=self)",), triton="x", shard="pointwise", cost="copy", flags="pointwise",
    ),
)  # fmt: skip
