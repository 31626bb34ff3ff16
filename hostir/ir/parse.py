"""Text to program: recursive descent over the grammar of docs/ir.md, one method for each rule.

Names resolve while parsing and every statement is checked as it is read, so that a mistake is reported with its line, column and a
caret. ``parse_program(str(p)) == p``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from hostir.errors import Location
from hostir.graph.fusion import Arg, Fusion, TensorView
from hostir.graph.table import apply
from hostir.ir.check import Checker
from hostir.ir.cursor import Cursor
from hostir.ir.kinds import COMMS, REDUCTIONS
from hostir.ir.lex import Text, Token
from hostir.ir.nodes import (
    MAIN,
    Alloc,
    Argument,
    Axis,
    Buffer,
    Call,
    Comm,
    Counts,
    Event,
    Expand,
    For,
    Free,
    Group,
    If,
    Index,
    Peer,
    Permute,
    Program,
    ProgramData,
    Reshape,
    Span,
    Stmt,
    Stream,
    Sync,
    Team,
    Transpose,
    Unit,
    View,
    ViewOp,
)
from hostir.ir.views import view_type
from hostir.types import DTYPES, Operand, Predicate, Truth, Var

_SCALARS: Final = ("int", "float", "bool")


class Parser(Cursor):
    """Units, then at most one program."""

    def __init__(self, text: Text) -> None:
        super().__init__(text)
        self.units: dict[str, Unit] = {}
        self.events: dict[str, Event] = {}
        self.awaited: dict[str, Token] = {}
        self.ending = self.token  # the program's `return`
        self.checker = Checker(())

    def file(self) -> tuple[dict[str, Unit], Program | None]:
        try:
            return self._file()
        except RecursionError:
            self.fail("the text is nested too deeply")

    def _file(self) -> tuple[dict[str, Unit], Program | None]:
        while self.peek("unit"):
            self.unit()
        p = self.program() if self.peek("program") else None
        if self.token.kind != "end":
            self.fail(f"expected a unit, a program or the end, found {self.token.text!r}")
        return self.units, p

    # ---- units

    def unit(self) -> None:
        self.expect("unit")
        name = self.kind("unit", "a unit's name, as @name")
        if name.text in self.units:
            self.fail(f"the unit {name.text} is there twice", name)
        outer, self.names = self.names, {}
        fusion = Fusion(name.text[1:])
        self.expect("(")
        self.listed(")", lambda: self._unit_param(fusion))
        self.unit_head(fusion)
        self.expect("{")
        while not self.peek("return"):
            self._operation(fusion)
        self.expect("return")
        while True:
            fusion.output(self.value(TensorView, "tensor"))
            if not self.accept(","):
                break
        self.expect("}")
        self.units[name.text] = Unit(name.text[1:], fusion)
        self.names = outer

    def _unit_param(self, fusion: Fusion) -> None:
        token = self.kind("value", "a parameter, as %name")
        self.expect(":")
        if self.token.text in _SCALARS and self.text.tokens[self.at + 1].text != "[":
            self.declare(token, fusion.scalar(token.text[1:], self.next().text))  # type: ignore[arg-type]
        else:
            t = self.type(memories=())
            self.declare(token, tv := fusion.input(t.dims, t.dtype, name=token.text[1:]))
            self.note(tv, late=True)

    def _operation(self, fusion: Fusion) -> None:
        targets = [self.kind("value", "a result, as %name, or `return`")]
        while self.accept(","):
            targets.append(self.kind("value", "a result, as %name"))
        self.expect("=")
        token = self.kind("id", "an operation")
        op = token.text
        while self.accept("."):
            op += "." + self.kind("id", "the rest of the operation's name").text
        self.expect("(")
        args: list[Arg] = []
        attrs: dict[str, Arg] = {}

        def item() -> None:
            if self.token.kind == "id" and self.text.tokens[self.at + 1].text == "=":
                name = self._attribute(attrs)
                attrs[name] = self._arg()
            elif attrs:
                self.fail("values stand before attributes")
            else:
                args.append(self._arg())

        self.listed(")", item)
        hints = [t.text[1:] for t in targets]
        loc = Location(self.text.file, token.line)
        outs = self.build(token, lambda: apply(fusion, op, args, attrs, hints=hints, num_outs=len(hints), loc=loc))
        if len(outs) != len(targets):
            self.fail(f"{op} has {len(outs)} results", token, got=len(targets))
        for t, out in zip(targets, outs, strict=True):
            self.declare(t, out)
            self.note(out)

    def unit_head(self, fusion: Fusion) -> None:
        """What may stand between a unit's parameters and its body: nothing here."""

    def note(self, tv: TensorView, *, late: bool = False) -> None:
        """What may stand after a tensor of a unit: nothing here. ``late``: after a parameter."""

    def _attribute(self, seen: dict[str, Arg]) -> str:
        token = self.next()
        if token.text in seen:
            self.fail(f"the attribute {token.text} is there twice", token)
        self.expect("=")
        return token.text

    def _arg(self) -> Arg:
        token = self.token
        if token.kind == "string":
            try:
                return str(json.loads(self.next().text))
            except json.JSONDecodeError:
                self.fail("this string has an escape that is none", token, expected=r"the escapes of JSON: \" \\ \n \u00e9 …")
        if token.kind == "value" and isinstance(self.names.get(token.text), TensorView):
            self.next()
            out: TensorView = self.names[token.text]
            return out
        if self.accept("["):
            return self.listed("]", self._arg)
        if token.kind == "id" and (token.text in DTYPES or token.text == "none") and self.text.tokens[self.at + 1].text != "(":
            self.next()
            return DTYPES.get(token.text)
        e = self.tree()
        if isinstance(e, Truth):
            return e.value
        if isinstance(e, Predicate):
            self.fail("a unit's arguments are numbers and tensors, not conditions", token)
        return e

    # ---- program

    def program(self) -> Program:
        self.expect("program")
        name = self.kind("unit", "the program's name, as @name").text[1:]
        self.expect("(")
        params: list[tuple[Token, Buffer | Var, bool]] = list(self.listed(")", self._param))
        axes: tuple[Axis, ...] = ()
        if self.accept("mesh"):
            self.expect("(")
            seen: set[str] = set()
            axes = self.listed(")", lambda: self._axis(seen))
        self.checker = Checker(axes)
        for token, param, inout in params:
            self.build(token, lambda p=param, i=inout: self.checker.param(p, inout=i))  # type: ignore[misc]
        scheduled = self.accept("scheduled")
        body, results = self._block(top=True)
        for event, token in self.awaited.items():
            if event not in self.names:
                self.fail(f"no statement is named {event}", token)
        self.build(self.ending, lambda: self.checker.finish(results))
        return Program(
            ProgramData(
                name, tuple(p for _, p, _ in params), frozenset(p for _, p, i in params if i and isinstance(p, Buffer)),
                axes, scheduled, body, results,
            )
        )  # fmt: skip

    def _param(self) -> tuple[Token, Buffer | Var, bool]:
        inout = self.accept("inout")
        token = self.kind("value", "a parameter, as %name")
        self.expect(":")
        param: Buffer | Var
        if self.token.text in _SCALARS and self.text.tokens[self.at + 1].text != "[":
            if inout:
                self.fail("a host number cannot be inout", token)
            param = Var(token.text[1:], "scalar", self.next().text)  # type: ignore[arg-type]
        else:
            param = Buffer(token.text[1:], self.type())
        self.declare(token, param)
        return token, param, inout

    def _axis(self, seen: set[str]) -> Axis:
        token = self.kind("id", "a mesh axis")
        if token.text in seen:
            self.fail(f"the mesh axis {token.text} is there twice", token)
        seen.add(token.text)
        if not self.accept("="):
            return Axis(token.text)
        size = self.kind("number", "a size")
        if not size.text.isdigit() or int(size.text) < 1:
            self.fail(f"{size.text} is not a mesh size", size)
        return Axis(token.text, int(size.text))

    def _block(self, *, top: bool = False) -> tuple[tuple[Stmt, ...], tuple[Buffer, ...]]:
        self.expect("{")
        body: list[Stmt] = []
        results: tuple[Buffer, ...] = ()
        while not self.peek("}"):
            if self.peek("return"):
                token = self.next()
                if not top:
                    self.fail("only the program itself returns", token)
                self.ending = token
                results = (self.value(Buffer, "buffer"),)
                while self.accept(","):
                    results += (self.value(Buffer, "buffer"),)
                break
            body.append(self._statement())
        self.expect("}")
        return tuple(body), results

    def _inner(self, *bindings: object) -> tuple[Stmt, ...]:
        self.checker.enter(*bindings)
        body, _ = self._block()
        self.checker.leave()
        return body

    def _statement(self) -> Stmt:
        token = self.token
        loc = Location(self.text.file, token.line)
        if token.kind == "id":
            match token.text:
                case "for":
                    return self._for(loc)
                case "if":
                    return self._if(loc)
                case "group":
                    return self._group(loc)
                case "sync":
                    return self._checked(token, self._sync(loc))
                case "free":
                    self.next()
                    return self._checked(token, Free(self.value(Buffer, "buffer"), loc))
        s = self._simple(loc)
        return self._checked(token, s)

    def _checked(self, token: Token, s: Stmt) -> Stmt:
        self.build(token, lambda: self.checker.statement(s))
        return s

    def _simple(self, loc: Location) -> Stmt:
        """Statements that bind or write: ``[!e =] [targets (= | <-)] …``."""
        first = self.token
        event = None
        if first.kind == "event":
            self.next()
            self.expect("=")
            event = self.events.setdefault(first.text, Event(first.text[1:]))
            if first.text in self.names:
                self.fail(f"the event {first.text} names two statements", first)
            self.names[first.text] = event
        targets: list[Token] = []
        if self.token.kind == "value":
            targets.append(self.next())
            while self.accept(","):
                targets.append(self.kind("value", "a buffer"))
            if self.peek("=") and event is None:
                self.next()
                if len(targets) != 1:
                    self.fail("one buffer is bound at a time", targets[1])
                return self._binding(targets[0], loc)
            self.expect("<-")
        outs = tuple(self.resolve(t, Buffer, "buffer") for t in targets)
        if self.token.kind == "unit":
            return self._call(outs, event, loc)
        if self.token.kind == "id" and self.token.text in COMMS:
            return self._comm(outs, event, loc)
        self.fail(f"expected a statement, found {self.token.text!r}")

    def _binding(self, target: Token, loc: Location) -> Stmt:
        word = self.kind("id", "alloc, zeros, full or view")
        name = target.text[1:]
        if word.text == "view":
            source = self.value(Buffer, "buffer")
            token = self.token
            op = self._view_op()
            t = self.build(token, lambda: view_type(source.type, op))
            out = Buffer(name, t, source, op)
            self.declare(target, out)
            return View(out, source, op, loc)
        init: float | int | bool | None = None
        if word.text == "zeros":
            init = 0
        elif word.text == "full":
            self.expect("(")
            token = self.token
            value = self._arg()
            if not isinstance(value, (int, float, bool)):
                self.fail("full takes a number", token)
            init = value
            self.expect(")")
        elif word.text != "alloc":
            self.fail(f"expected alloc, zeros, full or view, found {word.text!r}", word)
        out = Buffer(name, self.type())
        self.declare(target, out)
        return Alloc(out, init, loc)

    def _view_op(self) -> ViewOp:
        if self.accept("["):
            return Index(self.listed("]", self._item))
        self.expect(".")
        token = self.kind("id", "a view operation")
        if token.text == "T":
            return Transpose()
        self.expect("(")
        match token.text:
            case "reshape":
                return Reshape(self.listed(")", self.dim))
            case "expand":
                return Expand(self.listed(")", self.dim))
            case "permute":
                return Permute(self.listed(")", lambda: self.whole("a dimension")))
            case "peer":
                rank = self.expr()
                self.expect(")")
                return Peer(rank)
        self.fail(f"{token.text} is no view", token, expected="[…] .T .reshape .permute .expand .peer")

    def _item(self) -> Operand | Span | None:
        if self.accept(":"):
            return None
        start = self.expr()
        return Span(start, self.expr()) if self.accept(":") else start

    def _stream(self) -> Stream:
        name = self.kind("id", "a stream").text
        if self.accept("["):
            index = self.expr()
            self.expect("]")
            return Stream(name, index)
        return MAIN if name == MAIN.name else Stream(name)

    def _on(self) -> Stream:
        return self._stream() if self.accept("on") else MAIN

    def _call(self, outs: tuple[Buffer, ...], event: Event | None, loc: Location) -> Call:
        token = self.next()
        unit = self.units.get(token.text)
        if unit is None:
            self.fail(f"no unit {token.text}", token, expected=", ".join(self.units) or "a unit before the program")
        self.expect("(")
        args = self.listed(")", self._call_arg)
        stream = self._on()
        awaits = self.value(Buffer, "buffer") if self.accept("awaits") else None
        return Call(outs, unit, args, stream, event, awaits, loc)

    def _call_arg(self) -> Argument:
        if self.token.kind == "value" and isinstance(self.names.get(self.token.text), Buffer):
            return self.value(Buffer, "buffer")
        token = self.token
        e = self.tree()
        if isinstance(e, Truth):
            return e.value
        if isinstance(e, Predicate):
            self.fail("an argument is a buffer or a number, not a condition", token)
        return e

    def _comm(self, outs: tuple[Buffer, ...], event: Event | None, loc: Location) -> Comm:
        kind = self.next().text
        self.expect("(")
        ins: tuple[Buffer, ...] = ()
        if self.token.kind == "value":
            ins = (self.value(Buffer, "buffer"),)
        fields: dict[str, Any] = {}
        while not self.accept(")"):
            token = self.kind("id", "a modifier")
            name = "op" if token.text in REDUCTIONS else "source" if token.text == "from" else token.text
            if name in fields:
                self.fail(f"{'the reduction' if name == 'op' else token.text} is there twice", token)
            if name == "op":
                fields[name] = token.text
            elif name in ("dim", "split", "cat"):
                fields[name] = self.whole("a dimension")
            elif name in ("to", "source", "value") and token.text != "source":
                fields[name] = self.expr()
            elif name in ("send", "recv"):
                fields[name] = self._counts()
            else:
                self.fail(f"{token.text} is no modifier of {kind}", token, expected="an op, dim, split, cat, to, from, send, recv, value")
        team = self._over() if self.accept("over") else None
        return Comm(kind, outs, ins, team=team, stream=self._on(), event=event, loc=loc, **fields)

    def _counts(self) -> Counts:
        if self.accept("["):
            return self.listed("]", self.expr)
        return self.value(Buffer, "buffer")

    def _over(self) -> Team:
        if self.accept("["):
            return self.listed("]", lambda: self.whole("a rank"))
        if self.accept("("):
            return tuple(t.text for t in self.listed(")", lambda: self.kind("id", "a mesh axis")))
        return (self.kind("id", "a mesh axis").text,)

    def _sync(self, loc: Location) -> Sync:
        self.next()
        what: Stream | Event
        if self.token.kind == "event":
            name = self.token.text
            self.awaited.setdefault(name, self.next())
            what = self.events.setdefault(name, Event(name[1:]))
        else:
            what = self._stream()
        self.expect("->")
        return Sync(what, self._stream(), loc)

    def _group(self, loc: Location) -> Group:
        token = self.next()
        stream = self._on()
        body = self._inner()
        group = Group(
            tuple(replace(c, stream=stream) if isinstance(c, Comm) and c.stream is MAIN else c for c in body),  # type: ignore[misc]
            stream,
            loc,
        )
        self._checked(token, group)
        return group

    def _for(self, loc: Location) -> For:
        token = self.next()
        name = self.kind("value", "a loop index, as %name")
        var = Var(name.text[1:])
        self.expect("in")
        start = self.expr()
        self.expect("..")
        stop = self.expr()
        step = self.expr() if self.accept("step") else 1
        self._checked(token, For(var, start, stop, step, (), loc))
        self.declare(name, var)
        return For(var, start, stop, step, self._inner(var), loc)

    def _if(self, loc: Location) -> If:
        token = self.next()
        cond = self.predicate()
        self._checked(token, If(cond, (), (), loc))
        then = self._inner()
        orelse = self._inner() if self.accept("else") else ()
        return If(cond, then, orelse, loc)


def parse_file(text: str, file: str = "<text>") -> tuple[dict[str, Unit], Program | None]:
    """Units by name (``@name``) and the program, if the text has one. ParseError with line, column and caret."""
    return Parser(Text(text, file)).file()


def parse_program(text: str, file: str = "<text>") -> Program:
    """The program in ``text``. ParseError with line, column and caret."""
    source = Text(text, file)
    _, p = Parser(source).file()
    if p is None:
        raise source.error(source.tokens[-1], "the text has no program", cure="program @name(…) { … }")
    return p
