"""Programs as text. The text is the identity of a program: it parses back to an equal one.

Names are hints in memory and become unique here, in order of appearance; defaults are not printed; units come first, those with
equal bodies once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, assert_never

from hostir.graph.show import show_fusion
from hostir.ir.kinds import COMMS, MODIFIERS
from hostir.ir.lex import VERSION
from hostir.ir.nodes import (
    MAIN,
    Alloc,
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
    every,
)
from hostir.types import Operand, Tree, Var, number_text, show_expr

HEADER: Final = f"# hostir {VERSION}"


class Names:
    """Unique names in order of appearance: a hint that is taken gets ``_1``, ``_2``, …"""

    def __init__(self) -> None:
        self._given: dict[object, str] = {}
        self._taken: set[str] = set()

    def __call__(self, x: object, hint: str) -> str:
        if (known := self._given.get(id(x))) is not None:
            return known
        name, n = hint, 0
        while name in self._taken:
            n += 1
            name = f"{hint}_{n}"
        self._taken.add(name)
        self._given[id(x)] = name
        return name


class Printer:
    """The text of statements of one program. Feed statements in order: names are given at first sight."""

    def __init__(self, units: Callable[[Unit], str]) -> None:
        self._values = Names()
        self._events = Names()
        self._unit = units

    def var(self, v: Var) -> str:
        return self._values(v, v.name)

    def expr(self, e: Tree) -> str:
        return show_expr(e, self.var)

    def buffer(self, b: Buffer) -> str:
        return f"%{self._values(b, b.name)}"

    def event(self, e: Event) -> str:
        return f"!{self._events(e, e.name)}"

    def stream(self, s: Stream) -> str:
        return s.name if s.index is None else f"{s.name}[{self.expr(s.index)}]"

    def param(self, p: Buffer | Var, inout: bool) -> str:
        if isinstance(p, Var):
            return f"%{self.var(p)}: {p.kind}"
        return f"{'inout ' if inout else ''}{self.buffer(p)}: {p.type.show(self.var)}"

    def buffers(self, bs: tuple[Buffer, ...]) -> str:
        return ", ".join(self.buffer(b) for b in bs)

    def view(self, op: ViewOp) -> str:
        match op:
            case Index(items):
                return f"[{', '.join(self._item(i) for i in items)}]"
            case Transpose():
                return ".T"
            case Reshape(dims):
                return f".reshape({', '.join(map(self.expr, dims))})"
            case Permute(order):
                return f".permute({', '.join(map(str, order))})"
            case Expand(dims):
                return f".expand({', '.join(map(self.expr, dims))})"
            case Peer(rank):
                return f".peer({self.expr(rank)})"
            case _:
                assert_never(op)

    def _item(self, item: Operand | Span | None) -> str:
        if item is None:
            return ":"
        if isinstance(item, Span):
            return f"{self.expr(item.start)} : {self.expr(item.stop)}"
        return self.expr(item)

    def _argument(self, a: Buffer | Operand | bool) -> str:
        return self.buffer(a) if isinstance(a, Buffer) else number_text(a) if isinstance(a, bool) else self.expr(a)

    def _counts(self, c: Counts) -> str:
        return self.buffer(c) if isinstance(c, Buffer) else f"[{', '.join(map(self.expr, c))}]"

    def _on(self, s: Stream) -> str:
        return "" if s.name == MAIN.name else f" on {self.stream(s)}"

    def _comm(self, c: Comm) -> str:
        parts = [self.buffers(c.ins)] if c.ins else []
        uses = COMMS[c.kind].uses
        for name in MODIFIERS:
            value = getattr(c, name)
            if name not in uses or value is None:
                continue
            if name == "op":
                parts += [] if value == "sum" else [str(value)]
            elif name in ("dim", "split", "cat"):
                parts += [] if value == 0 else [f"{name} {value}"]
            elif name in ("send", "recv"):
                parts.append(f"{name} {self._counts(value)}")
            else:
                parts.append(f"{'from' if name == 'source' else name} {self.expr(value)}")
        return f"{c.kind}({' '.join(parts)}){self._over(c.team)}"

    def _over(self, team: Team) -> str:
        if team is None:
            return ""
        if team and isinstance(team[0], int):
            return f" over [{', '.join(map(str, team))}]"
        return f" over {team[0]}" if len(team) == 1 else f" over ({', '.join(map(str, team))})"

    def _named(self, s: Call | Comm) -> str:
        return f"{self.event(s.event)} = " if s.event is not None else ""

    def lines(self, s: Stmt, *, in_group: bool = False) -> Iterator[str]:
        """The lines of one statement, inner blocks indented by two."""
        match s:
            case Alloc(out, init):
                how = "alloc" if init is None else "zeros" if repr(init) in ("0", "0.0") else f"full({number_text(init)})"
                yield f"{self.buffer(out)} = {how} {out.type.show(self.var)}"
            case Free(buffer):
                yield f"free {self.buffer(buffer)}"
            case View(out, source, op):
                text = f"view {self.buffer(source)}{self.view(op)}"
                yield f"{self.buffer(out)} = {text}"
            case Call():
                args = ", ".join(map(self._argument, s.args))
                arrow = f"{self.buffers(s.outs)} <- " if s.outs else ""
                awaits = f" awaits {self.buffer(s.awaits)}" if s.awaits is not None else ""
                yield f"{self._named(s)}{arrow}@{self._unit(s.unit)}({args}){self._on(s.stream)}{awaits}"
            case Comm():
                arrow = f"{self.buffers(s.outs)} <- " if s.outs else ""
                yield f"{self._named(s)}{arrow}{self._comm(s)}{'' if in_group else self._on(s.stream)}"
            case Group():
                yield f"group{self._on(s.stream)} {{"
                for c in s.body:
                    yield from ("  " + line for line in self.lines(c, in_group=True))
                yield "}"
            case Sync(what, to):
                yield f"sync {self.event(what) if isinstance(what, Event) else self.stream(what)} -> {self.stream(to)}"
            case For():
                head = f"for %{self.var(s.var)} in {self.expr(s.start)} .. {self.expr(s.stop)}"
                step = "" if isinstance(s.step, int) and s.step == 1 else f" step {self.expr(s.step)}"
                yield f"{head}{step} {{"
                yield from self.block(s.body)
                yield "}"
            case If():
                yield f"if {self.expr(s.cond)} {{"
                yield from self.block(s.then)
                if s.orelse:
                    yield "} else {"
                    yield from self.block(s.orelse)
                yield "}"
            case _:
                assert_never(s)

    def block(self, body: tuple[Stmt, ...]) -> Iterator[str]:
        for s in body:
            yield from ("  " + line for line in self.lines(s))


class UnitNames:
    """Names of the units of one program: equal bodies share one, different bodies never do."""

    def __init__(self) -> None:
        self._by_unit: dict[int, str] = {}
        self._by_body: dict[str, str] = {}
        self._taken: set[str] = set()
        self.order: list[tuple[str, Unit]] = []

    def __call__(self, unit: Unit) -> str:
        if (known := self._by_unit.get(id(unit))) is not None:
            return known
        body = show_fusion(unit.fusion, "_")
        if (name := self._by_body.get(body)) is None:
            name, n = unit.name, 0
            while name in self._taken:
                n += 1
                name = f"{unit.name}_{n}"
            self._taken.add(name)
            self._by_body[body] = name
            self.order.append((name, unit))
        self._by_unit[id(unit)] = name
        return name


def printer(p: Program) -> Printer:
    """A printer that has already named the parameters of ``p``."""
    out = Printer(UnitNames())
    for param in p.params:
        out.param(param, param in p.inout)
    return out


def show(p: Program) -> str:
    """The canonical text of a program."""
    names = UnitNames()
    for s in every(p.body):
        if isinstance(s, Call):
            names(s.unit)
    pr = Printer(names)
    params = ", ".join(pr.param(x, x in p.inout) for x in p.params)
    mesh = ", ".join(a.name if a.size is None else f"{a.name} = {a.size}" for a in p.axes)
    head = f"program @{p.name}({params})" + (f" mesh({mesh})" if mesh else "") + (" scheduled" if p.scheduled else "")
    lines = [HEADER, *(show_fusion(u.fusion, n) for n, u in names.order), head + " {", *pr.block(p.body)]
    if p.results:
        lines.append(f"  return {pr.buffers(p.results)}")
    return "\n".join([*lines, "}"])


def index_names(p: Program) -> dict[Var, str]:
    """The loop indices of ``p`` as ``show`` names them."""
    pr = printer(p)
    found: dict[Var, str] = {}
    for s in every(p.body):
        next(pr.lines(s))
        if isinstance(s, For):
            found[s.var] = pr.var(s.var)
    return found


def statement_text(p: Program, target: Stmt) -> str:
    """The first line of one statement as ``show`` prints it: for messages."""
    pr = printer(p)
    found = ""

    def visit(body: tuple[Stmt, ...]) -> bool:
        nonlocal found
        for s in body:
            lines = pr.lines(s) if not isinstance(s, (For, If, Group)) else None
            if lines is not None:
                text = next(lines)
                if s is target:
                    found = text
                    return True
            else:
                head = next(pr.lines(s))
                if s is target:
                    found = head
                    return True
                inner = (s.body,) if isinstance(s, (For, Group)) else (s.then, s.orelse) if isinstance(s, If) else ()
                if any(visit(b) for b in inner):
                    return True
        return False

    visit(p.body)
    return found
