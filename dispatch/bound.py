"""Generated code, and the same code bound to the tensors of one caller.

Binding holds views of the caller's tensors without keeping the tensors alive: when one goes, so does the binding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from hostir.dispatch.flatten import Action, Ref


class Code:
    """A generated function, for one way of holding outputs (fresh ones are parameters, given ones are bound)."""

    def __init__(self, code: CodeType, text: str, constants: Mapping[str, Any], views: Mapping[str, Ref], steps: Mapping[int, Action]) -> None:
        self.code = code
        self.text = text
        self.constants = constants
        self.views = views
        self.steps = steps


class Bound:
    """The function for one set of tensors. It keeps views of the caller's tensors, and is dropped when the caller drops one."""

    __slots__ = ("__weakref__", "_checks", "function", "graphs", "seen")

    def __init__(self, tensors: Sequence[torch.Tensor], function: Callable[..., None], gone: Callable[[], None]) -> None:
        self._checks = [(weakref.ref(t, lambda _: gone()), t.data_ptr(), t.shape, t.stride()) for t in tensors]
        self.function = function
        self.graphs: dict[tuple[object, ...], torch.cuda.CUDAGraph] = {}
        self.seen: set[tuple[object, ...]] = set()

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors of this set, at the same addresses and in the same layout."""
        for (ref, address, shape, stride), t in zip(self._checks, tensors, strict=True):
            if ref() is not t or t.data_ptr() != address or t.shape != shape or t.stride() != stride:
                return False
        return True
