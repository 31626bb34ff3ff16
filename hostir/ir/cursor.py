"""A cursor over tokens: lookahead, name resolution, types and host expressions, which units and programs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from hostir.errors import BuildError
from hostir.ir.lex import Text, Token
from hostir.types import (
    DTYPES,
    MEMORIES,
    Dim,
    Epoch,
    Expr,
    Operand,
    Predicate,
    Rank,
    Size,
    Sym,
    TensorType,
    Truth,
    Var,
    as_predicate,
    binary,
    compare,
    is_whole,
    maximum,
    minimum,
    show_expr,
)

_T = TypeVar("_T")
_COMPARE: Final = ("==", "!=", "<", "<=", ">", ">=")


class Cursor:
    """Tokens with one of lookahead, and expressions: what units and programs share."""

    def __init__(self, text: Text) -> None:
        self.text = text
        self.at = 0
        self.names: dict[str, Any] = {}

    @property
    def token(self) -> Token:
        return self.text.tokens[self.at]

    def fail(self, message: str, token: Token | None = None, **facts: object) -> NoReturn:
        raise self.text.error(token or self.token, message, **facts)

    def next(self) -> Token:
        t = self.token
        self.at += 1 if t.kind != "end" else 0
        return t

    def peek(self, text: str) -> bool:
        return self.token.text == text and self.token.kind in ("punct", "id")

    def accept(self, text: str) -> bool:
        if self.peek(text):
            self.next()
            return True
        return False

    def expect(self, text: str) -> Token:
        if not self.peek(text):
            self.fail(f"expected {text!r}, found {self.token.text!r}")
        return self.next()

    def kind(self, kind: str, what: str) -> Token:
        if self.token.kind != kind:
            self.fail(f"expected {what}, found {self.token.text!r}")
        return self.next()

    def listed(self, end: str, item: Callable[[], _T]) -> tuple[_T, ...]:
        """``item { "," item } end`` or just ``end``."""
        out: list[_T] = []
        if not self.peek(end):
            out.append(item())
            while self.accept(","):
                out.append(item())
        self.expect(end)
        return tuple(out)

    def declare(self, token: Token, value: object) -> None:
        if token.text in self.names:
            self.fail(f"the name {token.text} is taken: names are never reused or shadowed", token)
        self.names[token.text] = value

    def value(self, what: type[_T], label: str) -> _T:
        token = self.kind("value", f"a {label}")
        return self.resolve(token, what, label)

    def resolve(self, token: Token, what: type[_T], label: str) -> _T:
        found = self.names.get(token.text)
        if found is None:
            self.fail(f"{token.text} is not known here", token)
        if not isinstance(found, what):
            self.fail(f"{token.text} is not a {label}", token)
        return found

    def build(self, token: Token, make: Callable[[], _T]) -> _T:
        """``make()``; what it finds wrong is reported at ``token``."""
        try:
            return make()
        except BuildError as e:
            raise self.text.error(token, e.message, expected=e.expected, got=e.got, cure=e.cure) from None

    def whole(self, what: str) -> int:
        """A literal that is a dimension, a rank or a mesh size."""
        token = self.kind("number", what)
        if not token.text.isdigit():
            self.fail(f"expected {what}, found {token.text!r}", token)
        return int(token.text)

    # ---- types

    def type(self, *, memories: tuple[str, ...] = MEMORIES[1:]) -> TensorType:
        token = self.kind("id", "a dtype")
        if token.text not in DTYPES:
            self.fail(f"{token.text} is no dtype", token, expected=", ".join(DTYPES))
        self.expect("[")
        dims = self.listed("]", self.dim)
        memory = self.next().text if self.token.kind == "id" and self.token.text in memories else "global"
        return TensorType(DTYPES[token.text], dims, memory)  # type: ignore[arg-type]

    def dim(self) -> Dim:
        token = self.token
        e = self.expr()
        if isinstance(e, float) or not is_whole(e) or (isinstance(e, int) and e < 0):
            self.fail(f"{show_expr(e)} is not a size", token)
        return e

    # ---- expressions: | < & < ~ < comparison < + - < * // %

    def expr(self) -> Operand:
        token = self.token
        e = self.tree()
        if isinstance(e, Predicate):
            self.fail("expected a number, found a condition", token)
        return e

    def predicate(self) -> Predicate:
        token = self.token
        e = self.tree()
        return e if isinstance(e, Predicate) else self.build(token, lambda: as_predicate(e))

    def tree(self) -> Operand | Predicate:
        left = self._both()
        while self.peek("|"):
            token = self.next()
            left = self._condition(left, token) | self._condition(self._both(), token)
        return left

    def _condition(self, e: Operand | Predicate, token: Token) -> Predicate:
        return e if isinstance(e, Predicate) else self.build(token, lambda: as_predicate(e))

    def _both(self) -> Operand | Predicate:
        left = self._negated()
        while self.peek("&"):
            token = self.next()
            left = self._condition(left, token) & self._condition(self._negated(), token)
        return left

    def _negated(self) -> Operand | Predicate:
        if self.peek("~"):
            token = self.next()
            return ~self._condition(self._negated(), token)
        return self._comparison()

    def _comparison(self) -> Operand | Predicate:
        left = self._sum()
        if self.token.kind == "punct" and self.token.text in _COMPARE:
            token = self.next()
            right = self._sum()
            left = compare(token.text, self._number(left, token), self._number(right, token))
            if self.token.kind == "punct" and self.token.text in _COMPARE:
                self.fail("comparisons do not chain", cure="combine two with &")
        return left

    def _number(self, e: Operand | Predicate, token: Token) -> Operand:
        if isinstance(e, Predicate):
            self.fail("a condition cannot be used as a number", token)
        return e

    def _sum(self) -> Operand | Predicate:
        left = self._product()
        while self.token.kind == "punct" and self.token.text in ("+", "-"):
            token = self.next()
            left = self._binary(token, left, self._product())
        return left

    def _product(self) -> Operand | Predicate:
        left = self._primary()
        while True:
            token = self.token
            if token.kind == "punct" and token.text in ("*", "//", "%"):
                self.next()
                left = self._binary(token, left, self._primary())
            elif token.kind == "value" and self.at and self.text.tokens[self.at - 1].line == token.line:
                self.fail(
                    f"{token.text} follows a number directly: a % before a letter begins a name", token,
                    cure=f"for modulo write a space after it: % {token.text}",
                )  # fmt: skip
            else:
                return left

    def _binary(self, token: Token, left: Operand | Predicate, right: Operand | Predicate) -> Operand:
        a, b = self._number(left, token), self._number(right, token)
        return self.build(token, lambda: binary(token.text, a, b))

    def _primary(self) -> Operand | Predicate:
        token = self.next()
        if token.kind == "number":
            return int(token.text) if token.text.isdigit() else float(token.text)
        if token.kind == "value":
            v = self.resolve(token, Var, "host number")
            return Truth(v) if v.kind == "bool" else v
        if token.kind == "punct" and token.text == "(":
            inner = self.tree()
            self.expect(")")
            return inner
        if token.kind == "punct" and token.text == "-":
            e = self._number(self._primary(), token)
            return binary("-", 0, e) if isinstance(e, Expr) else -e
        if token.kind == "id":
            return self._word(token)
        self.fail(f"expected an expression, found {token.text!r}", token)

    def _word(self, token: Token) -> Operand | Predicate:
        match token.text:
            case "true" | "false":
                return Truth(token.text == "true")
            case "inf" | "nan":
                return float(token.text)
            case "epoch":
                return Epoch()
            case "rank" | "size" if self.peek("("):
                self.next()
                axis = self.kind("id", "a mesh axis").text
                self.expect(")")
                return Rank(axis) if token.text == "rank" else Size(axis)
            case "min" | "max" if self.peek("("):
                self.next()
                a = self.expr()
                self.expect(",")
                b = self.expr()
                self.expect(")")
                return minimum(a, b) if token.text == "min" else maximum(a, b)
            case _:
                return Sym(token.text)
