"""Random programs whose ranks write and read each other's memory, right on every rank: rounds of pushes with flags, pulls between
barriers, and calls that wait for everybody's flag. A symmetric buffer is used again only after a barrier."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from tests.support.made import ROW, UNITS, Made

STREAMS: Final = ("main", "main", "copies", "t")


@dataclass
class PeerGenerator:
    rng: random.Random
    lines: list[str] = field(default_factory=list)
    names: int = 0
    views: int = 0
    used: set[str] = field(default_factory=set)
    flags: int = 0

    def make(self, rounds: int) -> Made:
        self.n = self.rng.randrange(1, 5)
        self.streams = self.rng.sample(STREAMS, self.rng.randrange(1, 4))
        self.buffers = [f"b{k}" for k in range(self.rng.randrange(1, 3))]
        for b in self.buffers:
            self.emit(f"%{b} = alloc i64[{ROW}] symmetric")
        self.emit("%m = full(1) i64[12]")
        body, self.lines = self.lines, []
        made: list[str] = []
        for _ in range(rounds):
            self.lines = []
            self.rng.choice([self.push, self.push, self.pull, self.awaited, self.local])()
            made += self.lines
        heads = [f"%f{k} = zeros i32[] symmetric" for k in range(self.flags)]
        heads += [f"%a{k} = alloc i64[{self.n}, {ROW}] symmetric\n%g{k} = zeros i32[{self.n}] symmetric" for k in range(self.names)]
        text = "\n".join([*body, *heads, "barrier()", *made])
        return Made(f"{UNITS}program @peers(%x: i64[{ROW}], inout %z: i64[{ROW}]) mesh(tp = {self.n}) {{\n{text}\nreturn %m\n}}", (("tp", self.n),))

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def on(self) -> str:
        stream = self.rng.choice(self.streams)
        return "" if stream == "main" else f" on {stream}"

    def local_buffer(self) -> str:
        return self.rng.choice(["%z", "%m"])

    def source(self) -> str:
        return self.rng.choice(["%x", "%z", "%m"])

    def peer(self) -> str:
        return f"(rank(tp) + {self.rng.randrange(self.n)}) % {self.n}"

    def fresh(self) -> str:
        """A symmetric buffer that nobody is at."""
        free = [b for b in self.buffers if b not in self.used]
        if not free:
            self.emit(f"barrier(){self.on()}")
            self.used.clear()
            free = self.buffers
        b = self.rng.choice(free)
        self.used.add(b)
        return b

    def view(self, item: str) -> str:
        self.views += 1
        out = f"%v{self.views}"
        self.emit(f"{out} = view {item}")
        return out

    def push(self) -> None:
        b, peer, value = self.fresh(), self.peer(), self.rng.randrange(1, 3)
        f, self.flags = f"%f{self.flags}", self.flags + 1
        p = self.view(f"%{b}.peer({peer})")
        on = self.on()
        self.emit(f"{p} <- copy({self.source()}){on}")
        self.emit(f"signal({f} to {peer} value {value}){self.rng.choice([on, self.on()])}")
        self.emit(f"wait({f} value {value}){self.on()}")
        out = self.local_buffer()
        self.emit(f"{out} <- @mix(%{b}, {self.source()}){self.on()}")

    def pull(self) -> None:
        b, peer = self.fresh(), self.peer()
        self.emit(f"%{b} <- copy({self.source()}){self.on()}")
        self.emit(f"barrier(){self.on()}")
        p = self.view(f"%{b}.peer({peer})")
        self.emit(f"{self.local_buffer()} <- copy({p}){self.on()}")

    def awaited(self) -> None:
        """Everybody pushes a row to everybody; one call waits for all of them."""
        k, self.names = self.names, self.names + 1
        i = f"%i{k}"
        on = self.on()
        self.emit(f"for {i} in 0 .. {self.n} {{")
        q = self.view(f"%a{k}.peer((rank(tp) + {i}) % {self.n})")
        row = self.view(f"{q}[rank(tp)]")
        self.emit(f"{row} <- copy({self.source()}){on}")
        flag = self.view(f"%g{k}[rank(tp)]")
        self.emit(f"signal({flag} to (rank(tp) + {i}) % {self.n} value 1){on}")
        self.emit("}")
        t = f"%w{k}"
        self.emit(f"{t} = alloc i64[{self.n}, {ROW}]")
        self.emit(f"{t} <- @table(%a{k}, %a{k}){self.on()} awaits %g{k}")
        at = self.view(f"{t}[{self.rng.randrange(self.n)}]")
        self.emit(f"{self.local_buffer()} <- @mix({at}, {self.source()}){self.on()}")

    def local(self) -> None:
        self.emit(f"{self.local_buffer()} <- @mix({self.source()}, {self.source()}){self.on()}")


def generate_peers(rng: random.Random, rounds: int | None = None) -> Made:
    """A right program, unscheduled."""
    return PeerGenerator(rng).make(rng.randrange(1, 6) if rounds is None else rounds)


def generated_peers(seed: int, rounds: int | None = None) -> Made:
    return generate_peers(random.Random(seed), rounds)
