"""Profile of a simulated node: a performance model, limits and memory.

Committed profiles are in `profiles/` and have names; any other is a file of the same form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from cluster.model_check import problem_of
from cluster.performance_model import MODEL_VERSION, PerformanceModel

FOLDER = Path(__file__).with_name("profiles")


class ProfileError(ValueError):
    """The profile can't be used; the message names the file and what is wrong."""


class NodeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of simulated node. Sizes are in bytes, times in seconds."""

    title: str
    source: Literal["measured", "papers", "assumed"]
    notes: str = ""
    performance: PerformanceModel
    one_pass: bool = True
    """decode rows and prompt chunks share one pass, which reads the base's weights once

    Otherwise prompts are computed first, while the decode rows wait.
    """
    max_rows: int = 32
    chunk_tokens: int = 512
    queue_limit: int = 256
    max_context: int = 4096
    block_tokens: int = 16
    kv_tokens: int
    adapter_memory: int | None
    """bytes; None has all adapters on the device from the start"""
    adapter_slots: int = 256
    host_memory: int | None = None
    """bytes; None has all adapters in host memory from the start"""
    bytes_per_rank: int
    """size of an adapter by its rank, if the trace does not state its size"""
    overhead: float = 0.0
    """time before a request's first token in the gateway, the network and the node's processes"""

    def __post_init__(self) -> None:
        if self.performance.version != MODEL_VERSION:
            raise ValueError(f"performance.version is {self.performance.version}; {MODEL_VERSION} is served")
        # Policies would go by an assumed model where the table of nodes does not believe this one.
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
    """Returns a committed profile by its name, or the one in a file. Raises ProfileError."""
    file = FOLDER / f"{name}.json" if name in profile_names() else Path(name)
    try:
        return msgspec.json.decode(file.read_bytes(), type=NodeProfile)
    except FileNotFoundError:
        names = ", ".join(profile_names())
        raise ProfileError(f"profile {name!r} is neither a file nor one of the committed ones ({names})") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ProfileError(f"profile {file}: {error}") from None
