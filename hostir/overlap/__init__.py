"""Overlapped operations, written as host programs."""
