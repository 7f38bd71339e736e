"""Allocators, eviction and prefetch of adapters, replayed on traces."""
