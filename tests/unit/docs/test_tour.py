"""The tour runs from top to bottom, and prints what it says it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hostir.ir.parse import parse_program
from tests.unit.docs.blocks import Block, Session, blocks, check

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "tour.md"
BLOCKS: Final = [b for b in blocks(PAGE) if b.tag in ("python run", "python error")]


@pytest.fixture(scope="module")
def session() -> Session:
    """One namespace for the whole page."""
    return Session("tour.py")


def test_every_block_runs_after_those_before_it(session: Session) -> None:
    for block in BLOCKS:
        shown = session.run(block) if block.tag == "python run" else str(session.error(block))
        if block.expected is None:
            assert not shown, f"{block} prints, and the page does not say what"
        else:
            check(PAGE, block, shown)


def test_nothing_on_the_page_is_left_out() -> None:
    """Python is run, text follows something that prints it."""
    every = blocks(PAGE)
    assert {b.tag for b in every} == {"python run", "python error", "text"}
    assert sum(b.expected is not None for b in BLOCKS) == sum(b.tag == "text" for b in every)
    assert sum(b.tag == "python error" for b in every) == 3


def programs() -> Iterator[str]:
    for block in BLOCKS:
        yield from re.findall(r"^# hostir 1$.*?^}$(?!\nprogram|\nunit)", block.expected or "", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", list(programs()), ids=lambda t: re.findall(r"program @(\w+)", t)[0])
def test_programs_on_the_page_parse_back(text: str) -> None:
    assert str(parse_program(text)) == text


def test_a_block_that_does_not_do_what_the_page_says_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python run\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    (block,) = [b for b in blocks(page) if b.tag == "python run"]
    assert (block.heading, block.expected, block.line) == ("Title", "3", 3)
    monkeypatch.delenv("HOSTIR_ACCEPT", raising=False)
    with pytest.raises(AssertionError, match="HOSTIR_ACCEPT=1 rewrites it"):
        check(page, block, Session("page.py").run(block))
    monkeypatch.setenv("HOSTIR_ACCEPT", "1")
    check(page, block, Session("page.py").run(block))
    assert "```text\n2\n```" in page.read_text()
    assert isinstance(block, Block)
