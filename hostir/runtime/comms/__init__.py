"""One protocol for communication, several transports: threads as ranks, and processes over torch.distributed."""

from __future__ import annotations
