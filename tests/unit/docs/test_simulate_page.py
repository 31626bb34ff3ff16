"""The page on simulation runs from top to bottom, and prints what it says it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.unit.docs.blocks import Session, blocks, check

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "simulate.md"


@pytest.mark.timeout(60)
def test_the_page_runs_and_shows_what_it_says() -> None:
    session = Session("docs/simulate.md")
    ran = [b for b in blocks(PAGE) if b.tag == "python run"]
    assert ran
    for b in ran:
        check(PAGE, b, session.run(b))
