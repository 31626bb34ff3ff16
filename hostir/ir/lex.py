"""Tokens of program text. ``%`` directly before a letter or ``_`` is always a name; modulo is written with a space after it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hostir.errors import ParseError

VERSION: Final = 1
_HEADER: Final = re.compile(r"\#\ hostir\ (\d+)\s*$", re.ASCII | re.MULTILINE | re.VERBOSE)
_PATTERN: Final = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<value>%[A-Za-z_]\w*)
      | (?P<unit>@[A-Za-z_]\w*)
      | (?P<event>![A-Za-z_]\w*)
      | (?P<number>(\d+\.\d+|\d+\.(?![.\w])|\.\d+|\d+)([eE][+-]?\d+)?)
      | (?P<id>[A-Za-z_]\w*)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<punct><-|->|\.\.|//|==|!=|<=|>=|[-+*%<>=(){}\[\],:.&|~])
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # value unit event number id string punct end
    text: str
    line: int
    column: int


class Text:
    """Source text with its tokens; makes errors that show the place. A first line ``# hostir N`` says which version of the language
    it is written in."""

    def __init__(self, text: str, file: str = "<text>") -> None:
        self.file = file
        self.lines = text.split("\n")
        self.tokens: list[Token] = []
        header = _HEADER.match(text)
        if header is not None and int(header[1]) != VERSION:
            raise self.error(Token("punct", "#", 1, 1), f"this text is of version {header[1]}, and this hostir reads version {VERSION}")
        line, start, at = 1, 0, 0
        while at < len(text):
            found = _PATTERN.match(text, at)
            if found is None:
                raise self.error(Token("punct", text[at], line, at - start + 1), f"unexpected character {text[at]!r}")
            kind = found.lastgroup
            assert kind is not None
            if kind == "newline":
                line, start = line + 1, found.end()
            elif kind != "space":
                self.tokens.append(Token(kind, found.group(), line, at - start + 1))
            at = found.end()
        last = self.lines[-1]
        self.tokens.append(Token("end", "end of text", len(self.lines), len(last) + 1))

    def error(self, token: Token, message: str, **facts: object) -> ParseError:
        return ParseError(message, line=token.line, column=token.column, text=self.lines[token.line - 1], file=self.file, **facts)
