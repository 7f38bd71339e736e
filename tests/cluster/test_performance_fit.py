"""Fits: known costs are found again in noise and among outliers; what can't be described is refused, with numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.performance_fit import (
    MAX_ERROR,
    MIN_R2,
    BadFit,
    BadSample,
    DecodeSample,
    PrefillSample,
    TransferSample,
    fit_decode,
    fit_paper_form,
    fit_prefill,
    fit_transfer,
)
from cluster.performance_model import RANK_TERMS, DecodeModel, PrefillModel, RankTerm, rank_terms

RANKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Step:
    contexts: tuple[int, ...]
    ranks: tuple[int, ...]
    """0: the base"""
    adapters: tuple[int, ...]


def steps(seed: int) -> list[Step]:
    draw = random.Random(seed)
    found = []
    for rows in (1, 2, 4, 8, 16, 32):
        for kind in ("base", "equal", "shared", "mixed", "half"):
            rank = draw.choice(RANKS)
            ranks = [
                {"base": 0, "equal": rank, "shared": rank, "mixed": draw.choice(RANKS), "half": rank * (i % 2)}[kind]
                for i in range(rows)
            ]
            adapters = [0 if kind == "shared" else i for i in range(rows)]
            found.append(Step(tuple(draw.randint(1, 1000) for _ in range(rows)), tuple(ranks), tuple(adapters)))
    return found


def sample_of(step: Step) -> DecodeSample:
    by_adapter = dict(zip(step.adapters, step.ranks, strict=True))
    rows = len(step.ranks)
    return DecodeSample(
        rows, sum(step.contexts), rows * max(step.ranks), sum(step.ranks), sum(by_adapter.values()), 1.0
    )


def true_seconds(model: DecodeModel, sample: DecodeSample) -> float:
    return model.seconds(sample.rows, sample.contexts, getattr(sample, model.rank_term))


def measured(
    model: DecodeModel, seed: int, noise: float, outliers: float = 0.0, repeats: int = 5
) -> list[DecodeSample]:
    draw = random.Random(seed)
    found = []
    for sample in map(sample_of, steps(seed)):
        for _ in range(repeats):
            seconds = true_seconds(model, sample) * (1 + noise * draw.uniform(-1, 1))
            if draw.random() < outliers:
                seconds *= draw.uniform(2, 10)
            found.append(replace(sample, seconds=seconds))
    return found


def errors(model: DecodeModel, found: DecodeModel, seed: int) -> list[float]:
    """Of forecasts for steps that were not measured."""
    samples = [sample_of(step) for step in steps(seed + 1)]
    return [abs(true_seconds(found, sample) / true_seconds(model, sample) - 1) for sample in samples]


decode_models = st.builds(
    lambda base, row, context, rank, term, flat: DecodeModel(base, row * base, context * base, rank * base, term, flat),
    st.floats(1e-4, 1.0), st.floats(0.01, 0.2), st.floats(0, 1e-4), st.floats(2e-4, 3e-3), st.sampled_from(RANK_TERMS),
    st.sampled_from([0, 1, 2, 4, 8]),
)  # fmt: skip
"""Costs in proportion to each other as on real devices, and sizes over four orders."""


@example(DecodeModel(1.0, 0.01171875, 0.0, 2e-4, "request_ranks", 8), 4765, 0.0)  # without its flat rows: max_rank
@given(decode_models, st.integers(0, 10_000), st.floats(0, 0.05))
def test_known_costs_of_decode_steps_are_found_in_noise(model: DecodeModel, seed: int, noise: float) -> None:
    fit = fit_decode(measured(model, seed, noise))
    assert float(np.median(errors(model, fit.model, seed))) <= noise + 1e-6
    assert fit.quality.r2 >= MIN_R2
    assert fit.quality.heldout_median_error <= 2 * noise + 1e-6
    assert fit.quality.samples == 30
    assert len(fit.quality.residuals) == 30
    costs = (fit.model.base, fit.model.per_row, fit.model.per_context, fit.model.per_rank)
    assert min(costs) >= 0


@pytest.mark.parametrize("term", RANK_TERMS)
def test_the_term_that_made_the_times_is_chosen(term: RankTerm) -> None:
    model = DecodeModel(0.03, 5e-4, 1e-7, 1e-5, term)
    fit = fit_decode(measured(model, 3, 0.02))
    assert fit.model.rank_term == term
    assert set(fit.heldout_by_term) == set(RANK_TERMS)
    assert min(fit.heldout_by_term, key=fit.heldout_by_term.__getitem__) == term
    assert fit.model.per_rank == pytest.approx(1e-5, rel=0.1)
    assert fit.model.base == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize(
    ("kernel", "terms", "other"),
    [("bgmv", {"max_rank"}, "request_ranks"), ("mbgmv", {"request_ranks", "adapter_ranks"}, "max_rank")],
)
def test_only_what_the_kernel_pays_for_is_tried(kernel: str, terms: set[str], other: RankTerm) -> None:
    """Also where another term fits better: here one that the kernel can't pay for made the times."""
    samples = measured(DecodeModel(0.03, 5e-4, 1e-7, 1e-5, other), 3, 0.02)
    assert fit_decode(samples, terms=rank_terms("cpu")).model.rank_term == other
    fit = fit_decode(samples, float("inf"), rank_terms(kernel))
    assert set(fit.heldout_by_term) == terms
    assert fit.model.rank_term in terms


@pytest.mark.parametrize("flat", [0, 2, 4, 8, 16])
def test_rows_that_cost_nothing_are_found(flat: int) -> None:
    model = DecodeModel(0.02, 1.3e-3, 1e-7, 1e-5, "request_ranks", flat)
    fit = fit_decode(measured(model, 4, 0.02))
    assert (fit.model.flat_rows, fit.model.rank_term) == (flat, "request_ranks")
    assert fit.model.per_row == pytest.approx(1.3e-3, rel=0.1)
    assert fit.quality.r2 > 0.99


@pytest.mark.parametrize("seed", range(5))
def test_outliers_among_the_repeats_do_little(seed: int) -> None:
    """Each twentieth pass took two to ten times as long."""
    model = DecodeModel(0.03, 5e-4, 1e-7, 1e-5, "request_ranks")
    fit = fit_decode(measured(model, seed, 0.02, outliers=0.05))
    assert float(np.median(errors(model, fit.model, seed))) < 0.04


def test_a_disturbed_configuration_is_set_aside_and_counted() -> None:
    model = DecodeModel(0.03, 5e-4, 1e-7, 1e-5, "request_ranks")
    samples = measured(model, 1, 0.01, repeats=1)
    samples[4] = replace(samples[4], seconds=samples[4].seconds * 20)
    fit = fit_decode(samples)
    assert fit.quality.set_aside == 1
    assert max(errors(model, fit.model, 1)) < 0.05


def test_times_that_follow_nothing_are_refused_with_their_numbers() -> None:
    draw = random.Random(0)
    samples = [replace(sample_of(step), seconds=draw.uniform(0.01, 1.0)) for step in steps(0)]
    with pytest.raises(BadFit, match=r"decode: R\^2 is -?\d\.\d+ over 30 configurations; at least 0.9") as caught:
        fit_decode(samples)
    assert caught.value.r2 < MIN_R2
    assert caught.value.samples == 30


def test_steps_that_all_take_much_the_same_time_are_described_although_r2_is_low() -> None:
    draw = random.Random(0)
    samples = [replace(sample_of(step), seconds=0.02 * draw.uniform(0.97, 1.03)) for step in steps(0)]
    fit = fit_decode(samples)
    assert fit.quality.r2 < MIN_R2
    assert fit.quality.heldout_median_error < MAX_ERROR
    assert fit.model.base == pytest.approx(0.02, rel=0.03)


@given(st.sampled_from([float("nan"), float("inf"), -1.0, 0.0]), st.integers(0, 29))
def test_times_that_are_none_are_refused(seconds: float, index: int) -> None:
    samples = [replace(sample_of(step), seconds=0.1) for step in steps(0)]
    samples[index] = replace(samples[index], seconds=seconds)
    with pytest.raises(BadSample, match=f"sample {index}: "):
        fit_decode(samples)


def test_counts_that_are_none_are_refused() -> None:
    prompts = [PrefillSample(i, i * i, 0, 0.1) for i in range(1, 20)]
    with pytest.raises(BadSample, match="sample 3"):
        fit_prefill([replace(p, squares=-1) if i == 3 else p for i, p in enumerate(prompts)])


def test_too_few_configurations_are_refused_however_often_they_were_measured() -> None:
    sample = replace(sample_of(steps(0)[0]), seconds=0.1)
    with pytest.raises(BadSample, match="1 configurations were measured; at least 12"):
        fit_decode([sample] * 100)


def prompts(seed: int) -> list[PrefillSample]:
    draw = random.Random(seed)
    found = []
    for tokens in (8, 16, 32, 64, 128, 256, 512):
        for parts in (1, 4):
            for rank in (0, 8, 64, 128):
                behind = draw.choice((0, 500)) if parts == 1 else 0
                each = tokens // parts
                squares = parts * ((behind + each) ** 2 - behind**2)
                found.append(PrefillSample(tokens, squares, tokens * rank, 1.0))
    return found


@given(
    st.floats(1e-4, 0.1), st.floats(0.01, 0.1), st.floats(0, 1e-5), st.floats(0, 1e-4), st.integers(0, 10_000),
    st.floats(0, 0.05),
)  # fmt: skip
def test_known_costs_of_prompts_are_found_in_noise(
    base: float, token: float, square: float, rank: float, seed: int, noise: float
) -> None:
    model = PrefillModel(base, token * base, square * base, rank * base)
    draw = random.Random(seed)
    samples = [
        replace(p, seconds=model.seconds(p.tokens, p.squares, p.token_ranks) * (1 + noise * draw.uniform(-1, 1)))
        for p in prompts(seed)
        for _ in range(5)
    ]
    fit = fit_prefill(samples)
    assert fit.quality.r2 >= MIN_R2
    off = [
        abs(fit.model.seconds(*of) / model.seconds(*of) - 1)
        for of in ((p.tokens, p.squares, p.token_ranks) for p in prompts(seed + 1))
    ]
    assert float(np.median(off)) <= noise + 1e-6


@given(st.floats(0, 0.1), st.floats(1e6, 1e11), st.integers(0, 10_000))
def test_a_link_is_found_again(latency: float, bandwidth: float, seed: int) -> None:
    draw = random.Random(seed)
    sizes = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28)
    samples = [
        TransferSample(n, (latency + n / bandwidth) * (1 + 0.01 * draw.uniform(-1, 1))) for n in sizes for _ in range(5)
    ]
    found = fit_transfer(samples)
    for n in sizes:
        assert found.seconds(n) == pytest.approx(latency + n / bandwidth, rel=0.03)


def test_a_link_on_which_size_does_not_matter_is_refused() -> None:
    with pytest.raises(BadFit, match="Larger transfers"):
        fit_transfer([TransferSample(n, 1.0 / n) for n in (1, 10, 100, 1000)])


def test_the_papers_form_is_a_plain_line() -> None:
    samples = []
    for rows in (4, 8, 16, 32):
        for rank in (8, 16, 32, 64):
            for ranks in ([rank] * rows, [rank if i % 2 else 8 for i in range(rows)]):
                most = rows * max(ranks)
                samples.append(DecodeSample(rows, 100, most, sum(ranks), sum(ranks), 0.02 + 3e-6 * most))
    found = fit_paper_form(samples, "bgmv")
    assert (found.slope, found.intercept, found.r2) == pytest.approx((3e-6, 0.02, 1.0))
    other = fit_paper_form(samples, "mbgmv")
    assert other.r2 < 0.999
    assert other.samples == found.samples == len(set(samples))
