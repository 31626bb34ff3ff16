"""Triton: code generated from a unit, the schedulers that decide how, tuning, and the cache on disk. Nothing else imports triton."""

from __future__ import annotations

if __name__ != "hostir.kernels":
    raise ImportError(f"this package is imported as hostir.kernels, not as {__name__}: a second copy would have its own classes")
