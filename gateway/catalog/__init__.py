"""Cached reads of the registry for calls: who the caller is (`callers`), and which version a name means (`functions`).

Records are cached until `name_watch` finds that they may have changed. This package does not depend on nodes.
"""
