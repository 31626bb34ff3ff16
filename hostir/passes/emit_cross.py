"""Moves between meshes (to be written)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostir.errors import BuildError
from hostir.passes.tree import Segment

if TYPE_CHECKING:
    from hostir.passes.emit import Emitter


def cross(em: Emitter, s: Segment) -> None:
    raise BuildError("a move to another mesh")
