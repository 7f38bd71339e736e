"""Timed runs of a measurement, and the performance model that is fitted to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeVar

import msgspec

from cluster.node_table import ASSUMED
from cluster.performance_fit import (
    BadFit,
    BadSample,
    DecodeFit,
    DecodeSample,
    PrefillFit,
    PrefillSample,
    TransferSample,
    fit_decode,
    fit_prefill,
    fit_transfer,
)
from cluster.performance_model import Transfer, counted_rank
from node_agent.performance.repeats import SweepTooSlow
from node_agent.vllm.measuring.cases import GrowingBatch, PromptPass

Fit = TypeVar("Fit", DecodeFit, PrefillFit)


@dataclass(frozen=True)
class DecodeRun:
    """Timed decode steps of one batch."""

    contexts: int
    """tokens in the cache before a step, summed over the rows"""
    ranks: tuple[int, ...]
    """rank of each row; 0 for the base model"""
    adapter_ranks: tuple[int, ...]
    """rank of each distinct adapter"""
    seconds: float
    """median of the steps"""

    def sample(self, padded_rank: int) -> DecodeSample:
        ranks = [counted_rank(rank, padded_rank) for rank in self.ranks]
        return DecodeSample(
            rows=len(ranks),
            contexts=self.contexts,
            max_rank=len(ranks) * max(ranks),
            request_ranks=sum(ranks),
            adapter_ranks=sum(counted_rank(rank, padded_rank) for rank in self.adapter_ranks),
            seconds=self.seconds,
        )


@dataclass(frozen=True)
class PrefillRun:
    """Timed pass over prompts."""

    chunks: tuple[tuple[int, int, int], ...]
    """begin, end and rank of each prompt's chunk"""
    seconds: float

    def sample(self, padded_rank: int) -> PrefillSample:
        return PrefillSample(
            tokens=sum(end - begin for begin, end, _ in self.chunks),
            squares=sum(end * end - begin * begin for begin, end, _ in self.chunks),
            token_ranks=sum((end - begin) * counted_rank(rank, padded_rank) for begin, end, rank in self.chunks),
            seconds=self.seconds,
        )


@dataclass
class Runs:
    """All runs of a measurement, by case."""

    decode: dict[tuple[GrowingBatch, int], list[DecodeRun]] = field(default_factory=dict)
    """by batch and number of rows"""
    prefill: dict[PromptPass, list[PrefillRun]] = field(default_factory=dict)
    loads: list[TransferSample] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.decode.values())) + sum(map(len, self.prefill.values()))


T = TypeVar("T", DecodeRun, PrefillRun)
Case = TypeVar("Case")


def counted(runs: Mapping[Case, list[T]], fastest: float) -> Iterable[list[T]]:
    """Returns the runs of each case that count: its `fastest` share, without the first unless it is the only one."""
    for of_case in runs.values():
        later = sorted(of_case[1:] or of_case, key=lambda run: run.seconds)
        yield later[: math.ceil(fastest * len(later))]


def fit_runs(runs: Runs, cases: int, max_rank: int, max_error: float, fastest: float) -> tuple[DecodeFit, PrefillFit]:
    """Returns the models fitted to the runs. Takes some tenths of a second.

    Each is fitted twice: with adapters' own ranks, and with every adapter counted as `max_rank` (`max_lora_rank`), to
    which vLLM's kernels pad. The one with the smaller held-out error is used. `cases`: number of planned cases. Raises
    BadFit or BadSample, and SweepTooSlow if fewer than half of the cases have runs.
    """
    if len(runs.decode) + len(runs.prefill) < cases / 2:
        raise SweepTooSlow(f"{len(runs.decode) + len(runs.prefill)} of {cases} cases used up the time limit")
    prompts = [run for of_case in counted(runs.prefill, fastest) for run in of_case]
    decode = decode_fits(same_contexts(runs, fastest), max_rank, max_error)
    prefill = prefill_fits(prompts, max_rank, max_error)
    return (
        _best(decode, lambda fit: min(fit.heldout_by_term.values())),
        _best(prefill, lambda fit: fit.quality.heldout_median_error),
    )


def same_contexts(runs: Runs, fastest: float) -> list[DecodeRun]:
    """Returns the runs of decode steps that count. Repeats of a case have their mean contexts, so that they are one
    configuration: batches grow by slightly different steps."""
    return [
        replace(run, contexts=round(fmean(each.contexts for each in of_case)))
        for of_case in counted(runs.decode, fastest)
        for run in of_case
    ]


def decode_fits(steps: Sequence[DecodeRun], max_rank: int, max_error: float) -> dict[int, DecodeFit | ValueError]:
    """Returns the fit, or why there is none, by `padded_rank`."""
    return _fits(lambda padded_rank: fit_decode([run.sample(padded_rank) for run in steps], max_error), max_rank)


def prefill_fits(prompts: Sequence[PrefillRun], max_rank: int, max_error: float) -> dict[int, PrefillFit | ValueError]:
    """Same as `decode_fits`, for passes over prompts."""
    return _fits(lambda padded_rank: fit_prefill([run.sample(padded_rank) for run in prompts], max_error), max_rank)


def _fits(fit: Callable[[int], Fit], max_rank: int) -> dict[int, Fit | ValueError]:
    fits: dict[int, Fit | ValueError] = {}
    for padded_rank in (max_rank, 0):
        try:
            result = fit(padded_rank)
            model = msgspec.structs.replace(result.model, padded_rank=padded_rank)
            fits[padded_rank] = msgspec.structs.replace(result, model=model)
        except (BadFit, BadSample) as error:
            fits[padded_rank] = error
    return fits


def fit_loads(loads: Sequence[TransferSample]) -> Transfer:
    """Returns the cost of a load from host memory into a slot. Where the time does not grow with the size, it is a
    latency."""
    try:
        return fit_transfer(loads)
    except (BadFit, BadSample):
        if not loads:
            return ASSUMED.to_device
        return Transfer(median(load.seconds for load in loads), ASSUMED.to_device.bandwidth)


def _best(fits: Mapping[int, Fit | ValueError], error_of: Callable[[Fit], float]) -> Fit:
    """Returns the fit with the smallest held-out error. Raises why there is none: a BadFit or a BadSample."""
    good, bad = list[Fit](), list[ValueError]()
    for fit in fits.values():
        if isinstance(fit, ValueError):
            bad.append(fit)
        else:
            good.append(fit)
    if not good:
        raise bad[0]
    return min(good, key=error_of)
