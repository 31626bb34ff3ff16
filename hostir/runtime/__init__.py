"""What a running program stands on: streams, buffers, communication between ranks, profiles. Nothing here knows how units run."""

from __future__ import annotations
