"""Who calls which adapter, when, and how long prompt and answer are: the papers' settings, scaled to this host.

A rate in requests per second means nothing on another machine, so a setting names a utilisation: the share of the
host's capacity, measured with every adapter resident, that the calls ask for. Toppings reports a GPU utilisation of
46-56 % at 9 requests/s (S3); here 9 requests/s stand for 0.5, and other rates in proportion.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from math import log

import numpy as np

from benchmarks.report import ROOT
from benchmarks.trace import minute_counts

UTILISATION_PER_RPS = 0.5 / 9
MOST_ANSWER = 512
"""Tokens."""
LENGTHS_FILE = ROOT / "benchmarks" / "data" / "azure_llm_2023_conv_lengths.csv.gz"
MEETING_FILE = ROOT / "tests" / "data" / "qmsum" / "meeting.txt.gz"


@dataclass(frozen=True)
class Setting:
    """One row of Toppings' table 2, or a group of functions of the MAF trace."""

    name: str
    ranks: tuple[int, ...]
    """adapters' ranks, repeated in order"""
    adapters: int
    rps: float
    """as in the paper, on a 7B model"""
    lengths: str
    """chat, azure or meeting"""
    popularity: str
    """distinct: every call names an adapter that is not on the device; maf: as often as the trace's functions"""
    pool_share: float = 0.1
    """of all adapters' bytes, that the device holds: at first those that are called most"""
    answers: str = "short"
    """short: geometric; trace: as long as the Azure conversation trace's, cut at MOST_ANSWER"""

    @property
    def utilisation(self) -> float:
        return self.rps * UTILISATION_PER_RPS


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("S1", (32,), 200, 9, "chat", "distinct"),
        Setting("S2", (64,), 200, 6, "chat", "distinct"),
        Setting("S3", (64,), 200, 9, "chat", "distinct"),
        Setting("S3-azure", (64,), 200, 9, "azure", "distinct"),
        Setting("S3-long", (64,), 200, 9, "chat", "distinct", answers="trace"),
        Setting("S4", (256,), 50, 3, "meeting", "distinct"),
        Setting("MAF-128", (64,), 128, 1.5, "chat", "maf"),
        Setting("MAF-256", (64,), 256, 3.6, "chat", "maf"),
        Setting("MAF-256-25", (64,), 256, 3.6, "chat", "maf", pool_share=0.25),
        Setting("MAF-512", (64,), 512, 7.7, "chat", "maf"),
        Setting("MIX", (8, 16, 32, 64, 128), 256, 3.6, "chat", "maf"),
    )
}


@dataclass(frozen=True)
class Call:
    at: float
    """in units of the mean gap between calls: multiply by it"""
    adapter: int
    prompt_tokens: int
    output_tokens: int


def draw_calls(setting: Setting, n: int, rng: np.random.Generator, most_prompt: int, mean_output: int) -> list[Call]:
    """`n` calls, Poisson in time. Prompts are cut at `most_prompt` tokens; outputs are geometric, 1 at least.

    Of functions of the trace adapter 0 is called most, 1 next, and so on."""
    at = np.cumsum(rng.exponential(1.0, n))
    prompts = np.minimum(LENGTHS[setting.lengths](n, rng), most_prompt)
    longest = most_output(setting, mean_output)
    drawn = rng.choice(_trace(1), n) if setting.answers == "trace" else rng.geometric(1 / mean_output, n)
    outputs = np.minimum(drawn, longest)
    adapters = _adapters(setting, n, rng)
    return [Call(float(t), int(a), int(p), int(o)) for t, a, p, o in zip(at, adapters, prompts, outputs, strict=True)]


def most_output(setting: Setting, mean_output: int) -> int:
    return MOST_ANSWER if setting.answers == "trace" else 4 * mean_output


def _adapters(setting: Setting, n: int, rng: np.random.Generator) -> np.ndarray:
    if setting.popularity == "distinct":
        order = rng.permutation(setting.adapters)
        return np.resize(order, n)
    counts = minute_counts(without_top=10).sum(axis=1).astype(float)
    group = np.resize(rng.permutation(len(counts)), setting.adapters)  # more adapters than functions: some twice
    weight = np.sort(counts[group] + 1e-9)[::-1]
    return rng.choice(setting.adapters, n, p=weight / weight.sum())


def chat_lengths(n: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal with 90 % of prompts at most 256 tokens and 99 % at most 1,024."""
    low, high = 1.2815515655, 2.3263478740  # the normal quantiles of 0.9 and 0.99
    sigma = log(1024 / 256) / (high - low)
    mean = log(256) - low * sigma
    return np.maximum(1, np.rint(rng.lognormal(mean, sigma, n))).astype(np.int64)


def azure_lengths(n: int, rng: np.random.Generator) -> np.ndarray:
    """Prompts of the Azure conversation trace of 2023 (median 1,015 over the whole trace)."""
    return rng.choice(_trace(0), n)


def _trace(column: int) -> np.ndarray:
    """Tokens of the trace's prompts (0) or answers (1), by call."""
    with gzip.open(LENGTHS_FILE, "rt", newline="") as stream:
        return np.array([int(row[column]) for row in list(csv.reader(stream))[1:]])


def meeting_lengths(n: int, rng: np.random.Generator) -> np.ndarray:  # noqa: ARG001 - as the others
    """A whole meeting, longer than any cut."""
    return np.full(n, 1 << 30)


def meeting_text() -> str:
    """A meeting of QMSum, for which `meeting_lengths` stands."""
    with gzip.open(MEETING_FILE, "rt") as stream:
        return stream.read()


LENGTHS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "chat": chat_lengths,
    "azure": azure_lengths,
    "meeting": meeting_lengths,
}
