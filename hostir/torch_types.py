"""Our dtypes and torch's, both ways. The only place where one is turned into the other."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from hostir.types import DTYPES, DType

_TO_TORCH: Final[Mapping[str, torch.dtype]] = MappingProxyType({d.name: getattr(torch, d.torch_name) for d in DTYPES.values()})
_FROM_TORCH: Final[Mapping[torch.dtype, DType]] = MappingProxyType({t: DTYPES[n] for n, t in _TO_TORCH.items()})


def to_torch(d: DType) -> torch.dtype:
    """``bf16`` -> ``torch.bfloat16``."""
    return _TO_TORCH[d.name]


def from_torch(t: torch.dtype) -> DType | None:
    """``torch.bfloat16`` -> ``bf16``; None for a dtype that programs do not know."""
    return _FROM_TORCH.get(t)
