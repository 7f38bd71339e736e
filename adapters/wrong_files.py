"""Recognition of files that users upload by mistake instead of an adapter's, for the command line and the gateway."""

from __future__ import annotations

PICKLE_FILE = "adapter_model.bin"
"""Name of the weights file that PEFT wrote before it used safetensors."""
PICKLE_PROBLEM = "a pickle, which is never read, for it could run code: docs/guide/adapters.md says how to convert it"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""First bytes of the pointer file that Git has in place of a Git LFS file."""
POINTER_PROBLEM = "a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
