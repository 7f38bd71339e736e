"""Files that people have in the place of an adapter's, as the command line and the gateway alike recognise them."""

from __future__ import annotations

PICKLE_FILE = "adapter_model.bin"
"""File that PEFT wrote before safetensors."""
PICKLE_PROBLEM = "a pickle, which is never read, for it could run code: docs/guide/adapters.md says how to convert it"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""First bytes of the small text that Git has in the place of a file that Git LFS keeps."""
POINTER_PROBLEM = "a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
