"""Fenced code blocks of a page, run in order, and what they print compared with the block that follows.

Tags: ``python run`` is executed, a ``text`` block right after it is what it printed; ``python error`` must raise, and the ``text`` block
after it is the error's message; ``hir`` is text of the language, canonical. HOSTIR_ACCEPT=1 rewrites the ``text`` blocks.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import hostir as hir

_FENCE: Final = re.compile(r"^```(?P<tag>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """``tag`` is what follows the opening fence; ``heading`` the nearest heading above; ``number`` counts blocks from 0."""

    tag: str
    text: str
    line: int
    heading: str
    number: int
    expected: str | None = None

    def __str__(self) -> str:
        return f"line {self.line}, {self.tag!r} under {self.heading!r}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page; those to be run with the text that follows them, if any."""
    content = page.read_text()
    headings = [(m.start(), m[1].strip()) for m in re.finditer(r"^#+ (.*)$", _without_blocks(content), re.MULTILINE)]
    fences = list(_FENCE.finditer(content))
    found = []
    for number, m in enumerate(fences):
        heading = next((h for at, h in reversed(headings) if at < m.start()), "")
        after = fences[number + 1] if number + 1 < len(fences) else None
        follows = after is not None and after["tag"] == "text" and not content[m.end() : after.start()].strip()
        expected = after["text"].rstrip("\n") if follows and after is not None else None
        found.append(Block(m["tag"].strip(), m["text"], content.count("\n", 0, m.start()) + 1, heading, number, expected))
    return found


def _without_blocks(content: str) -> str:
    """The page with blocks blanked out, same length: a comment in a block is no heading."""
    return _FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), content)


class Session:
    """A namespace in which blocks run one after another, and what they printed."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.names: dict[str, Any] = {"__name__": "page"}

    def run(self, block: Block) -> str:
        """Run a block; what it printed."""
        out = io.StringIO()
        # tracebacks and units show the block's lines
        linecache.cache[self.file] = (len(block.text), None, block.text.splitlines(keepends=True), self.file)
        with contextlib.redirect_stdout(out):
            exec(compile(block.text, self.file, "exec"), self.names)
        return out.getvalue().rstrip("\n")

    def error(self, block: Block) -> hir.HostIrError:
        """The error that a block raises."""
        try:
            self.run(block)
        except hir.HostIrError as e:
            return e
        raise AssertionError(f"{block} raises nothing")


def standalone(file: str = "example.py") -> Session:
    """A session that has torch and hir already."""
    session = Session(file)
    session.names |= {"torch": torch, "hir": hir}
    return session


def check(page: Path, block: Block, shown: str) -> None:
    """``shown`` is what the page says; HOSTIR_ACCEPT=1 makes it so."""
    shown = textwrap.dedent(shown).rstrip("\n")
    if block.expected == shown:
        return
    if os.environ.get("HOSTIR_ACCEPT"):
        accept(page, block, shown)
        return
    assert shown == block.expected, f"{page.name}, {block}: HOSTIR_ACCEPT=1 rewrites it"


def accept(page: Path, block: Block, shown: str) -> None:
    """Put ``shown`` into the text block after ``block``."""
    content = page.read_text()
    after = list(_FENCE.finditer(content))[block.number + 1]
    assert after["tag"] == "text", f"{block} has no text block after it"
    page.write_text(f"{content[: after.start('text')]}{shown}\n{content[after.end('text') :]}")


def tagged(page: Path, tag: str) -> Iterator[Block]:
    return (b for b in blocks(page) if b.tag == tag)
