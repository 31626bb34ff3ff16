"""Blocks, branches, streams and events of the builder: the part of ``Program`` that opens and closes ``with`` blocks.

A block collects statements; when it closes it becomes the body of a loop, branch or group of the block around it. A block that is
left by an exception makes the program dead: what stands in it is not what its author meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from hostir.build_comm import On
from hostir.errors import BuildError, caller_location
from hostir.ir import nodes
from hostir.ir.check import Checker
from hostir.ir.nodes import MAIN, Axis, Call, Comm, Event, For, Group, If, Stmt, Stream, Sync
from hostir.types import Operand, Var, as_predicate, operand

State = Literal["open", "sealed", "dead"]


def identifier(name: object) -> str:
    """``name``, if program text can have it as a name."""
    if not (isinstance(name, str) and name.isidentifier() and name.isascii()):
        raise BuildError(f"{name!r} is no name", expected="ASCII letters, digits and _, no digit first", loc=caller_location())
    return name


class Block:
    """Statements under construction, and the views made in them."""

    def __init__(self) -> None:
        self.body: list[Stmt] = []
        self.views: dict[object, nodes.Buffer] = {}


class Scope:
    """A ``with`` block inside a program: ``opened`` runs at entry and gives what ``as`` binds, ``closed`` runs at a clean exit."""

    def __init__(self, program: Structure, what: str, opened: Callable[[], Any], closed: Callable[[], None]) -> None:
        self.what = what
        self.loc = caller_location()
        self._program = program
        self._opened = opened
        self._closed = closed
        program._unentered.append(self)

    def __enter__(self) -> Any:
        self._program._need_open()
        if self not in self._program._unentered:
            raise BuildError(
                f"this {self.what} is a block already", cure="make a new one for each with", program=self._program.name, loc=caller_location()
            )
        self._program._unentered.remove(self)
        return self._opened()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._closed()
        else:
            self._program._state = "dead"


class Branch:
    """What ``with p.if_(…) as br`` binds: ``with br.else_():`` directly after it is the other branch."""

    def __init__(self, program: Structure, slot: int, block: Block) -> None:
        self._program = program
        self._slot = slot
        self._block = block

    def else_(self) -> Scope:
        return self._program._else(self._block, self._slot)


class Structure:
    """What ``Program`` inherits: loops, branches, groups, streams, syncs and events."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        self._state: State = "open"
        self._checker = Checker(axes)
        self._blocks = [Block()]
        self._streams: list[Stream] = [MAIN]
        self._in_group = False
        self._synced: set[Event] = set()
        self._kept: set[Event] = set()
        self._unentered: list[Scope] = []

    @property
    def name(self) -> str:
        raise NotImplementedError

    def _need_open(self) -> None:
        raise NotImplementedError

    def _add(self, s: Stmt) -> None:
        raise NotImplementedError

    def _check(self, s: Stmt) -> None:
        raise NotImplementedError

    @contextmanager
    def _located(self, statement: str | None = None) -> Iterator[None]:
        """Errors from inside say where in the user's program they happened."""
        try:
            yield
        except BuildError as e:
            raise e.with_context(program=self.name, statement=statement, loc=caller_location()) from None

    # ---- blocks

    def _inner(self, what: str, bindings: Sequence[object], given: Callable[[], Any], close: Callable[[Block], None]) -> Scope:
        def opened() -> Any:
            bound = given()
            self._checker.enter(*bindings)
            self._blocks.append(Block())
            return bound

        def closed() -> None:
            self._checker.leave()
            close(self._blocks.pop())

        return Scope(self, what, opened, closed)

    def loop(self, *bounds: Operand, name: str | None = None) -> Scope:
        """``loop(stop)``, ``loop(start, stop)`` or ``loop(start, stop, step)``; ``with p.loop(n) as i:``. Zero trips are fine."""
        self._need_open()
        loc = caller_location()
        if not 1 <= len(bounds) <= 3:
            raise BuildError(
                "a loop takes stop, or start and stop, or start, stop and step", got=f"{len(bounds)} numbers", program=self.name, loc=loc
            )  # fmt: skip
        with self._located("loop"):
            given = [operand(b) for b in bounds]
            var = Var(identifier(name or "i"))
        start, stop = (0, given[0]) if len(given) == 1 else (given[0], given[1])
        head = For(var, start, stop, given[2] if len(given) == 3 else 1, (), loc)
        self._check(head)
        return self._inner("loop", [var], lambda: var, lambda block: self._blocks[-1].body.append(replace(head, body=tuple(block.body))))

    def if_(self, condition: Any) -> Scope:
        """``with p.if_(cond) as br:``, then ``with br.else_():`` or ``with p.else_():`` directly after it."""
        self._need_open()
        with self._located("if_"):
            head = If(as_predicate(condition), (), (), caller_location())
        self._check(head)

        def branch() -> Branch:
            return Branch(self, len(self._blocks[-1].body), self._blocks[-1])

        return self._inner("if_", (), branch, lambda block: self._blocks[-1].body.append(replace(head, then=tuple(block.body))))

    def else_(self) -> Scope:
        """The other branch of the ``if_`` written just before."""
        return self._else(self._blocks[-1], len(self._blocks[-1].body) - 1)

    def _else(self, outer: Block, slot: int) -> Scope:
        self._need_open()
        found = outer.body[slot] if 0 <= slot < len(outer.body) else None
        if outer is not self._blocks[-1] or slot != len(outer.body) - 1 or not isinstance(found, If) or found.orelse:
            raise BuildError("else_ stands directly after its if_", program=self.name, loc=caller_location())
        branch = found

        def close(block: Block) -> None:
            outer.body[slot] = replace(branch, orelse=tuple(block.body))

        return self._inner("else_", (), lambda: None, close)

    def group(self, on: On = None) -> Scope:
        """Communications of one team that progress together: all are posted before any is waited for."""
        self._need_open()
        stream, loc = self._on(on), caller_location()

        def enter() -> None:
            self._in_group = True
            self._streams.append(stream)

        def close(block: Block) -> None:
            self._in_group = False
            self._streams.pop()
            body = tuple(replace(c, event=None) if isinstance(c, Comm) else c for c in block.body)
            self._add(Group(body, stream, loc))  # type: ignore[arg-type]

        return self._inner("group", (), enter, close)

    # ---- streams and order

    def _on(self, on: On) -> Stream:
        if on is None:
            return self._streams[-1]
        if self._in_group:
            raise BuildError("inside a group, communications run on the group's stream", program=self.name, loc=caller_location())
        return self._stream(on)

    def _stream(self, on: str | Stream) -> Stream:
        if not isinstance(on, (str, Stream)):
            raise BuildError("a stream is given by its name, or made by p.stream", got=repr(on), program=self.name, loc=caller_location())
        return self.stream(on) if isinstance(on, str) else on

    def on(self, stream: str | Stream) -> Scope:
        """The default stream of a block."""
        self._need_open()
        target = self._stream(stream)

        def leave() -> None:
            self._streams.pop()

        return Scope(self, "on", lambda: self._streams.append(target), leave)

    def stream(self, name: str, index: Operand | None = None) -> Stream:
        """A stream by name, optionally indexed: ``p.stream("s", i % 4)``. Same name and index = same stream."""
        if name == MAIN.name and index is None:
            return MAIN
        with self._located(f"stream {name}"):
            return Stream(identifier(name), None if index is None else operand(index))

    def sync(self, what: str | Stream | Event, stream: str | Stream = MAIN) -> None:
        """``stream`` waits for all that is queued on ``what``, or for the latest execution of the statement that gave the event."""
        self._need_open()
        source = what if isinstance(what, Event) else self._stream(what)
        self._add(Sync(source, self._stream(stream), caller_location()))
        if isinstance(what, Event):
            self._synced.add(what)

    def event(self) -> Event:
        """Name the call or communication written just before."""
        self._need_open()
        last = self._blocks[-1].body[-1] if self._blocks[-1].body else None
        if not isinstance(last, (Call, Comm)) or last.event is None:
            raise BuildError("event() names the call or communication written just before it", program=self.name, loc=caller_location())
        self._kept.add(last.event)
        return last.event
