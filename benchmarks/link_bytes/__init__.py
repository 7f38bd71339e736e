"""Bounds of CPU-assisted cold starts, computed from bytes."""
