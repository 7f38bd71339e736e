"""Keys of adapters' original files in the registry."""

from __future__ import annotations


def blob_key(sha256: str) -> str:
    """Returns the object key of an original file."""
    return f"blobs/sha256/{sha256}"
