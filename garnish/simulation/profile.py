"""Profile of a simulated node: a performance model, limits and memory sizes.

Committed profiles are in `profiles/` and have names. Any other profile is a file of the same format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from cluster.model_check import problem_of
from cluster.performance_model import MODEL_VERSION, PerformanceModel

FOLDER = Path(__file__).with_name("profiles")


class ProfileError(ValueError):
    """The profile can't be used. The message names the file and the problem."""


class NodeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of simulated node. Sizes are in bytes, times in seconds."""

    title: str
    source: Literal["measured", "papers", "assumed"]
    notes: str = ""
    performance: PerformanceModel
    one_pass: bool = True
    """True if decode rows and prompt chunks share one pass, which reads the base model's weights once

    Otherwise prompts are computed first, while the decode rows wait.
    """
    max_rows: int = 32
    chunk_tokens: int = 512
    queue_limit: int = 256
    max_context: int = 4096
    block_tokens: int = 16
    kv_tokens: int
    adapter_memory: int | None
    """device memory for adapters in bytes; with None all adapters are on the device from the start"""
    adapter_slots: int = 256
    host_memory: int | None = None
    """host memory for adapters in bytes; with None all adapters are in host memory from the start"""
    bytes_per_rank: int
    overhead: float = 0.0
    """seconds before a request's first token that are spent in the gateway, the network and the node's processes"""

    def __post_init__(self) -> None:
        if self.performance.version != MODEL_VERSION:
            raise ValueError(f"performance.version is {self.performance.version}; {MODEL_VERSION} is served")
        # The table of nodes rejects such a model; policies would then use an assumed model instead.
        problem = problem_of(self.performance)
        if problem is not None:
            raise ValueError(f"performance.{problem}")
        decode, prefill = self.performance.decode, self.performance.prefill
        if decode.base <= 0 or prefill.base + prefill.per_token <= 0:
            raise ValueError("a decode step and a prompt token must take time: decode.base and prefill must be above 0")
        for name in ("max_rows", "chunk_tokens", "queue_limit", "max_context", "block_tokens", "kv_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def profile_names() -> list[str]:
    """Returns the names of the committed profiles."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_profile(name: str) -> NodeProfile:
    """Returns the committed profile `name`, or the profile in the file `name`. Raises ProfileError."""
    file = FOLDER / f"{name}.json" if name in profile_names() else Path(name)
    try:
        return msgspec.json.decode(file.read_bytes(), type=NodeProfile)
    except FileNotFoundError:
        names = ", ".join(profile_names())
        raise ProfileError(f"profile {name!r} is neither a file nor one of the committed ones ({names})") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ProfileError(f"profile {file}: {error}") from None
