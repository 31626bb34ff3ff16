"""Streams of a program on a device: the caller's current one is main, named ones come from a pool and stay the same across runs.

On a CPU there is nothing to switch: every method gives no lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hostir.dispatch.inline import Namespace
from hostir.dispatch.interpreter import MAIN_LANE
from hostir.ir.walk import Lane


class Lanes:
    """Lines of generated code that move between streams. In them ``main`` is the stream that was current at entry."""

    def __init__(self, lanes: Sequence[Lane], device: torch.device) -> None:
        self.real = device.type == "cuda" and bool(lanes)
        self._device = device
        self.streams = {lane: torch.cuda.Stream(device) for lane in lanes} if self.real else {}
        self._events: dict[object, torch.cuda.Event] = {}
        self._main: torch.cuda.Stream | None = None

    def _keep_main(self, main: torch.cuda.Stream) -> torch.cuda.Stream:
        self._main = main
        return main

    def restore(self) -> None:
        """After an error inside a run: main waits for every stream and is current again."""
        if self._main is not None:
            for s in self.streams.values():
                self._main.wait_stream(s)
            torch.cuda.set_stream(self._main)

    def _stream(self, lane: Lane, names: Namespace) -> str:
        return "main" if lane == MAIN_LANE else names.constant(self.streams[lane])

    def _event(self, key: object, names: Namespace) -> str:
        return names.constant(self._events.setdefault(key, torch.cuda.Event()))

    def on(self, lane: Lane, names: Namespace) -> str:
        """The expression of a lane's stream, or nothing where there are none."""
        return self._stream(lane, names) if self.real else ""

    def enter(self, names: Namespace) -> list[str]:
        """Every stream waits for main."""
        if not self.real:
            return []
        current, event = names.constant(torch.cuda.current_stream), self._event("enter", names)
        keep = names.constant(self._keep_main)
        waits = [f"{names.constant(s)}.wait_event({event})" for s in self.streams.values()]
        return [f"main = {keep}({current}({names.constant(self._device)}))", f"{event}.record(main)", *waits]

    def leave(self, names: Namespace) -> list[str]:
        """main waits for every stream."""
        lines = []
        for lane, s in self.streams.items():
            event = self._event(("leave", lane), names)
            lines += [f"{event}.record({names.constant(s)})", f"main.wait_event({event})"]
        return lines

    def switch(self, now: Lane, to: Lane, names: Namespace) -> list[str]:
        if not self.real or now == to:
            return []
        return [f"{names.constant(torch.cuda.set_stream)}({self._stream(to, names)})"]

    def sync(self, source: Lane, to: Lane, names: Namespace) -> list[str]:
        if not self.real or source == to or any(lane != MAIN_LANE and lane not in self.streams for lane in (source, to)):
            return []
        event = self._event(("sync", source, to), names)
        return [f"{event}.record({self._stream(source, names)})", f"{self._stream(to, names)}.wait_event({event})"]

    def record(self, key: int, lane: Lane, names: Namespace) -> list[str]:
        return [f"{self._event(key, names)}.record({self._stream(lane, names)})"] if self.real else []

    def await_event(self, key: int, to: Lane, names: Namespace) -> list[str]:
        return [f"{self._stream(to, names)}.wait_event({self._event(key, names)})"] if self.real else []
