"""Messages between any two ranks, through memory that both can address.

A message goes through a slot of its sender for that receiver, two of them in turn; a larger one in several pieces. A count of pieces
sent, at the receiver, and one of pieces taken, at the sender, order the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from hostir.runtime.comms.fabric import ALIGNMENT, Heap, Turn
from hostir.runtime.comms.moves import share_memory
from hostir.runtime.comms.protocol import CommCall
from hostir.runtime.comms.symm_moves import FLAG_BYTES, Copy, num_bytes, place_of


class Mail:
    """Slots for messages between any two ranks of the world."""

    def __init__(self, heap: Heap, slot_bytes: int) -> None:
        ranks = tuple(range(heap.size))
        self.fabric = heap.fabric
        self.rank = heap.rank
        self.slot_bytes = slot_bytes
        self._size = heap.size
        self._header = -(-2 * heap.size * FLAG_BYTES // ALIGNMENT) * ALIGNMENT
        self.window = heap.take(ranks, self._header + 2 * heap.size * slot_bytes, "messages")
        self._sent = [0] * heap.size
        self._taken = [0] * heap.size
        self._turns: dict[tuple[int, int], Turn] = {}

    def counts(self) -> dict[tuple[str, tuple[int, ...], str], int]:
        """Pieces between this rank and each other one, by sender and receiver."""
        out: dict[tuple[str, tuple[int, ...], str], int] = {("mail", (self.rank, to), ""): number for to, number in enumerate(self._sent) if number}
        return out | {("mail", (source, self.rank), ""): number for source, number in enumerate(self._taken) if number}

    def turn(self, sender: int, receiver: int) -> None:
        """Messages between two ranks are in the order of the calls, on whatever streams."""
        if (sender, receiver) not in self._turns:
            self._turns[sender, receiver] = self.fabric.turn()
        self._turns[sender, receiver].take()

    def slot(self, sender: int, receiver: int, number: int, x: torch.Tensor) -> torch.Tensor:
        """Where piece ``number`` from ``sender`` to ``receiver`` lies, as a tensor like ``x``."""
        return self.window.at(sender, self._header + (2 * receiver + number % 2) * self.slot_bytes, x.shape, x.dtype)

    def next_out(self, to: int, where: Callable[[], str]) -> int:
        """The number of the next piece to ``to``, once its slot is free."""
        number = self._sent[to] + 1
        if number > 2:
            self.await_taken(to, number - 2, where)
        return number

    def sent(self, to: int, number: int) -> None:
        self._sent[to] = number
        self.fabric.write(self.window.address(to, self.rank * FLAG_BYTES), number)

    def await_taken(self, to: int, number: int, where: Callable[[], str]) -> None:
        self.fabric.wait(self.window.address(self.rank, (self._size + to) * FLAG_BYTES), number, where)

    def next_in(self, source: int, where: Callable[[], str]) -> int:
        """The number of the next piece from ``source``, once it has come."""
        number = self._taken[source] + 1
        self.fabric.wait(self.window.address(self.rank, source * FLAG_BYTES), number, where)
        return number

    def took(self, source: int, number: int) -> None:
        self._taken[source] = number
        self.fabric.write(self.window.address(source, (self._size + self.rank) * FLAG_BYTES), number)


def pieces(x: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """``x`` in pieces of at most ``limit`` bytes: itself where it fits, else parts of its elements in order (``x`` is contiguous then)."""
    size = num_bytes(x)
    if size == 0:
        return []
    if size <= limit:
        return [x]
    length = limit // x.element_size()
    return list(x.view(-1).split(length))


class Message:
    """One tensor to (``outgoing``) or from ``peer``, a world rank. ``beside`` are tensors that the same communication writes while this
    one is still being sent."""

    def __init__(
        self, mail: Mail, x: torch.Tensor, peer: int, where: Callable[[], str], *, outgoing: bool, beside: Sequence[torch.Tensor] = ()
    ) -> None:
        self.outgoing = outgoing
        self.peer = peer
        piece = mail.slot_bytes // x.element_size() * x.element_size()
        self.num_pieces = -(-num_bytes(x) // piece)
        self._mail = mail
        self._x = x
        self._where = where
        self._direct = self.num_pieces <= 1 or (x.is_contiguous() and not any(share_memory(x, t) for t in beside))
        self._parts = pieces(x, mail.slot_bytes) if self._direct else []
        self._landing = x
        self._copies: dict[tuple[int, int], Copy] = {}
        self._last = 0  # the number of its last piece

    def begin(self) -> None:
        self._mail.turn(*((self._mail.rank, self.peer) if self.outgoing else (self.peer, self._mail.rank)))
        if not self._direct:
            x = self._x
            self._landing = x.clone(memory_format=torch.contiguous_format) if self.outgoing else x.new_empty(x.shape)
            self._parts = pieces(self._landing, self._mail.slot_bytes)

    def move(self, index: int) -> None:
        """Send or receive piece ``index``."""
        mail, peer = self._mail, self.peer
        if self.outgoing:
            number = mail.next_out(peer, self._where)
            self._copy(index, number)()
            mail.sent(peer, number)
            self._last = number
        else:
            number = mail.next_in(peer, self._where)
            self._copy(index, number)()
            mail.took(peer, number)

    def _copy(self, index: int, number: int) -> Copy:
        key = (index, number % 2)
        if (found := self._copies.get(key)) is None:
            mine, mail = self._parts[index], self._mail
            if self.outgoing:
                found = mail.fabric.copier(mail.slot(mail.rank, self.peer, number, mine), mine)
            else:
                found = mail.fabric.copier(mine, mail.slot(self.peer, mail.rank, number, mine))
            self._copies[key] = found
        return found

    def finish(self) -> None:
        if not self._direct:
            if not self.outgoing:
                self._x.copy_(self._landing)
            self._parts, self._landing = [], self._x
            self._copies.clear()

    def meet(self) -> None:
        """Hold the stream until the other end has taken all that was sent."""
        if self.outgoing and self.num_pieces:
            self._mail.await_taken(self.peer, self._last, self._where)


def run_messages(messages: Sequence[Message], between: Callable[[], None] = lambda: None) -> None:
    """All together: in round i the i-th piece to each peer is sent, then the i-th one from each peer taken, so that no rank fills slots
    that nobody empties. ``between`` runs after the first pieces are on their way."""
    if len(messages) == 1 or (len(messages) == 2 and messages[0].outgoing != messages[1].outgoing):
        rounds = _rounds_of_two(messages)
    else:
        rounds = _rounds(messages)
    for m in messages:
        m.begin()
    for i in range(max(len(rounds), 1)):
        sends, receives = rounds[i] if rounds else ((), ())
        for m, index in sends:
            m.move(index)
        if i == 0:
            between()
        for m, index in receives:
            m.move(index)
    for m in messages:
        m.finish()


Turns: TypeAlias = Sequence[tuple[Message, int]]


def _rounds_of_two(messages: Sequence[Message]) -> list[tuple[Turns, Turns]]:
    """One message each way at most, the usual case."""
    most = max(m.num_pieces for m in messages)
    return [tuple([(m, i) for m in messages if m.outgoing == way and i < m.num_pieces] for way in (True, False)) for i in range(most)]  # type: ignore[misc]


def _rounds(messages: Sequence[Message]) -> list[tuple[Turns, Turns]]:
    lines: dict[tuple[bool, int], list[tuple[Message, int]]] = {}
    for m in messages:
        lines.setdefault((m.outgoing, m.peer), []).extend((m, i) for i in range(m.num_pieces))
    rounds: list[tuple[list[tuple[Message, int]], list[tuple[Message, int]]]] = []
    for (outgoing, _), line in lines.items():
        for i, turn in enumerate(line):
            if i == len(rounds):
                rounds.append(([], []))
            rounds[i][0 if outgoing else 1].append(turn)
    return rounds  # type: ignore[return-value]


def messages_of(mail: Mail, call: CommCall) -> list[Message]:
    """The messages that ``call`` (permute, send, recv, alltoallv) is made of, those to oneself apart."""
    here = call.team.index(mail.rank)
    where = place_of(call)

    def message(x: torch.Tensor, position: int | None, outgoing: bool) -> list[Message]:
        if position is None or position == here:
            return []
        beside = call.outs if outgoing else ()
        return [Message(mail, x, call.team[position], where, outgoing=outgoing, beside=beside)]

    if call.kind != "alltoallv":
        out = message(call.ins[0], call.to, True) if call.ins else []
        return out + (message(call.outs[0], call.source, False) if call.outs else [])
    assert call.send_counts is not None
    assert call.recv_counts is not None
    found: list[Message] = []
    for x, counts, outgoing in ((call.ins[0], call.send_counts, True), (call.outs[0], call.recv_counts, False)):
        at = 0
        for position, count in enumerate(counts):
            found += message(x.narrow(0, at, count), position, outgoing)
            at += count
    return found
