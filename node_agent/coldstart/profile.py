"""Profile of a node: the measured costs that the planner of cold starts uses."""

from __future__ import annotations

import logging
from bisect import bisect_left
from math import inf
from pathlib import Path

import msgspec

from cluster.json_file import write_json
from node_agent.coldstart.pass_times import PassSample

log = logging.getLogger("garnish.engine")

PROFILE_VERSION = 3
MAX_PROFILE_BYTES = 1 << 20
MAX_TOKENS = 1 << 50
"""Tokens of one slice if a token costs almost nothing: in effect no limit."""


class ProfileError(ValueError):
    """Raised when a stored profile can't be used. The message says why."""


class ProfileKey(msgspec.Struct, frozen=True):
    """Conditions under which a profile was measured. A profile with other conditions than the node's is not used."""

    base: str
    dtype: str
    device: str
    """name of the hardware"""
    threads: int
    workers: int
    simulated_bandwidth: float = 0.0
    simulated_latency: float = 0.0
    """simulated latency of the link to the device, in seconds; this and the simulated bandwidth are 0 for a real
    link"""
    simulated_repeats: int = 1
    """number of times that each worker computes each command; 1: no simulated slowdown"""
    runner: str = "transformers"


class CpuLora(msgspec.Struct, frozen=True):
    """Cost model of one worker in seconds: fixed + per_element * elements + per_product * tokens * elements.

    `elements` is the sum of rank * (d_in + d_out) over a projection group.
    """

    fixed: float
    per_element: float
    """seconds for reading one element of the weights"""
    per_product: float
    """seconds per token and element"""


class LinkCost(msgspec.Struct, frozen=True):
    """Cost of a link: a transfer of n bytes alone on it takes latency + n / bandwidth seconds."""

    latency: float
    bandwidth: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured costs of a node."""

    key: ProfileKey
    layer: tuple[tuple[int, float], ...]
    """(prompt tokens, seconds of one layer on the device), in ascending order of tokens"""
    cpu: CpuLora | None
    """costs of the CPU workers; None without workers"""
    link: LinkCost
    """link from host memory to the device"""
    handoff: LinkCost | None = None
    """cost of handoffs between a GPU and workers; None: workers share the device's memory"""
    passes: tuple[PassSample, ...] = ()
    """measured cold passes, for PassTimes"""
    version: int = PROFILE_VERSION

    def layer_seconds(self, tokens: int) -> float:
        """Returns the seconds of one layer on the device for a chunk of `tokens` tokens. It interpolates linearly
        between measured points, and scales in proportion beyond the last."""
        at = bisect_left(self.layer, (tokens, 0.0))
        if at == 0:
            return self.layer[0][1]
        if at == len(self.layer):
            max_tokens, seconds = self.layer[-1]
            return seconds * tokens / max_tokens
        (low, below), (high, above) = self.layer[at - 1], self.layer[at]
        return below + (above - below) * (tokens - low) / (high - low)

    def extra_seconds_apart(self, tokens: int, other_tokens: int) -> float:
        """Returns the extra seconds per layer of two separate passes, of `tokens` and `other_tokens` tokens, compared
        to one joint pass."""
        together = self.layer_seconds(tokens + other_tokens)
        return (
            max(0.0, self.layer_seconds(tokens) + self.layer_seconds(other_tokens) - together) if other_tokens else 0.0
        )

    def cpu_seconds(self, tokens: int, elements: int) -> float:
        """Returns the seconds in which one worker computes `tokens` tokens of a group with `elements` LoRA elements.
        Infinite without workers."""
        if self.cpu is None:
            return float("inf")
        return self.cpu.fixed + elements * (self.cpu.per_element + tokens * self.cpu.per_product)

    def crossing_seconds(self, handed: int, answered: int, sharing: int = 0) -> float:
        """Returns the seconds for sending `handed` bytes to the workers and `answered` bytes back, while `sharing`
        loads use the link. Returns 0 where workers share the device's memory."""
        if self.handoff is None:
            return 0.0
        return self.handoff.latency + handed / self.handoff.bandwidth + (1 + sharing) * answered / self.link.bandwidth

    def slice_tokens(self, elements: int, budget: float) -> int:
        """Returns the number of tokens that one worker computes in `budget` seconds, at least one (c in Toppings
        4.2)."""
        if self.cpu is None:
            return 1
        remaining_s = budget - self.cpu.fixed - elements * self.cpu.per_element
        if not elements or remaining_s <= 0:
            return 1
        per_token = elements * self.cpu.per_product  # 0 if the measurement saw no effect of the length
        return max(1, int(min(remaining_s / per_token, MAX_TOKENS))) if per_token else MAX_TOKENS


def read_profile(file: Path, key: ProfileKey) -> Profile:
    """Returns the stored profile with this key, whatever its number of workers: costs are per worker. Raises
    ProfileError when the file is damaged or has another key, OSError when it can't be read."""
    with file.open("rb") as stream:
        text = stream.read(MAX_PROFILE_BYTES + 1)
    if len(text) > MAX_PROFILE_BYTES:
        raise ProfileError(f"{file}: more than {MAX_PROFILE_BYTES} bytes")
    try:
        profile = msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:
        raise ProfileError(f"{file}: {error}") from None
    if profile.version != PROFILE_VERSION or msgspec.structs.replace(profile.key, workers=key.workers) != key:
        raise ProfileError(f"{file}: measured for {profile.key} (version {profile.version}), but this node is {key}")
    check(profile)
    return profile


def check(profile: Profile) -> None:
    """Raises ProfileError unless all values are plausible."""
    tokens = [n for n, _ in profile.layer]
    if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
        raise ProfileError("layer: token counts must be positive and ascending")
    if any(not 0 < seconds < 1e3 for _, seconds in profile.layer):
        raise ProfileError("layer: seconds must be positive")
    for name, link in (("link", profile.link), ("handoff", profile.handoff)):
        if link is not None and not (1 <= link.bandwidth < inf and 0 <= link.latency < 1e3):
            raise ProfileError(f"{name}: bandwidth must be at least 1 byte per second, and latency not negative")
    cpu = profile.cpu
    if cpu is None and profile.key.workers:
        raise ProfileError(f"cpu: none of the {profile.key.workers} workers answered while they were measured")
    if cpu is not None and not all(0 <= value < 1e3 for value in (cpu.fixed, cpu.per_element, cpu.per_product)):
        raise ProfileError("cpu: costs must not be negative")


class ProfileFile:
    """File in which a node keeps its profile for the next start; none without a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self, key: ProfileKey) -> Profile | None:
        """Returns the stored profile with this key. Returns None if there is none, or if it can't be used; the reason
        is logged."""
        if self._path is None or not self._path.exists():
            return None
        try:
            return read_profile(self._path, key)
        except (ProfileError, OSError) as error:
            log.warning("the profile is measured again", extra={"reason": str(error)})
            return None

    def write(self, profile: Profile) -> None:
        """Writes the profile. A failure is logged; the next start then measures again."""
        if self._path is None:
            return
        try:
            check(profile)  # a worker that does not answer now may answer later
            write_json(profile, self._path)
        except (ProfileError, OSError) as error:
            log.warning("the profile can't be stored", extra={"reason": str(error)})
