"""Fits of a node's performance model to measured passes (cluster.performance_model has the formulas).

Costs are never negative. Errors are relative to the measured time, so that short passes are forecast as well as long
ones. Repeats of a configuration count as their median. Outliers have little weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from cluster.least_squares import nonnegative
from cluster.performance_model import RANK_TERMS, DecodeModel, PrefillModel, RankTerm, Transfer

MIN_R2 = 0.9
MAX_ERROR = 0.1
"""Median held-out error (relative) up to which a model is accepted whatever its R^2. R^2 is low when all steps take
about the same time."""
MAX_ERROR_IDLE = 0.25
"""Same limit as MAX_ERROR, for measurements that a node makes while idle. It is higher because the alternative is a
model of another machine."""
FOLDS = 5
MIN_SAMPLES = 12
"""Minimum number of measured configurations."""
MAX_SET_ASIDE = 0.05
"""Maximum fraction of configurations that R^2 may leave out as disturbed. `Quality.set_aside` has their number."""
FAR = 6.0
"""Number of robust standard deviations above which a configuration counts as disturbed."""
HUBER = 1.345
ROUNDS = 20
MIN_ERROR = 1e-9
"""Relative error below which differences are rounding."""
DECODE_FIELDS = ("rows", "contexts", *RANK_TERMS)
AGAIN = "Measure again while the host does nothing else."
LARGEST_ERROR = 0.5
"""Upper bound on a single held-out error (relative). Thus one disturbed pass decides neither the rank term nor
`DecodeModel.flat_rows`."""
FLAT_ROWS = (2, 4, 8, 16, 32, 64, 128)
"""Candidate values of `DecodeModel.flat_rows`, the number of rows that cost no more than one, in addition to 0. A
candidate is tried only if steps with more rows were measured."""
MIN_GAIN = 0.05
"""Fraction by which a candidate of FLAT_ROWS must reduce the held-out error of `flat_rows` = 0. Below it 0 is used,
since the gain may be chance."""


class BadSample(ValueError):
    """Impossible values in a measured sample, or too few configurations."""


class BadFit(ValueError):
    """The fitted model does not describe the measurements. `r2` is its R^2."""

    def __init__(self, what: str, r2: float, samples: int, reason: str) -> None:
        super().__init__(
            f"{what}: R^2 is {r2:.3f} over {samples} configurations; at least {MIN_R2:g} is wanted. {reason}"
        )
        self.what, self.r2, self.samples = what, r2, samples


class DecodeSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured decode step. `seconds` is its duration."""

    rows: int
    contexts: int
    """Context tokens, summed over the rows."""
    max_rank: int
    """Rows times the largest rank of the batch."""
    request_ranks: int
    """Adapter ranks, summed over the rows."""
    adapter_ranks: int
    """Ranks, summed over the distinct adapters."""
    seconds: float


class PrefillSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured prefill pass. `seconds` is its duration."""

    tokens: int
    squares: int
    """Sum of tokens * tokens over the prompts. A chunk from position b to e counts e * e - b * b."""
    token_ranks: int
    """Sum of tokens * rank over the prompts."""
    seconds: float


class TransferSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured transfer."""

    bytes: int
    seconds: float


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quality of a model's fit. `r2` is R^2 of the times in seconds, not of relative errors."""

    r2: float
    heldout_median_error: float
    """Median relative error, with each configuration forecast by a model fitted without it."""
    samples: int
    """Number of configurations."""
    set_aside: int
    """Number of disturbed configurations that `r2` leaves out."""
    residuals: tuple[tuple[float, float], ...]
    """Pairs (measured, forecast) of all configurations, in seconds."""


class DecodeFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted decode model and its quality."""

    model: DecodeModel
    quality: Quality
    heldout_by_term: dict[RankTerm, float]
    """Mean relative held-out error of each candidate rank term. The term with the smallest one was chosen."""


class PrefillFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted prefill model and its quality."""

    model: PrefillModel
    quality: Quality


class PaperForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fit of t = slope * term + intercept (Toppings, equation 2), by ordinary least squares. Times are in seconds."""

    kernel: Literal["bgmv", "mbgmv"]
    slope: float
    intercept: float
    r2: float
    samples: int


def decode_forecast(model: DecodeModel, sample: DecodeSample) -> float:
    """Returns the forecast duration (seconds) of the sample's step. The sample's measured duration is not used."""
    ranks: int = getattr(sample, model.rank_term)
    return model.seconds(sample.rows, sample.contexts, ranks)


def fit_decode(
    samples: Sequence[DecodeSample], max_error: float = MAX_ERROR, terms: Sequence[RankTerm] = RANK_TERMS
) -> DecodeFit:
    """Returns a decode model fitted to the samples. `terms` are the candidate rank terms of the measured kernel
    (`rank_terms`). Raises BadSample, or BadFit when no candidate describes the steps."""
    rows, seconds = _checked(samples, DECODE_FIELDS)

    def columns(term: RankTerm, flat: int) -> np.ndarray:
        beyond = np.maximum(rows[:, 0] - flat, 0)
        return np.column_stack([np.ones(len(rows)), beyond, rows[:, 1], rows[:, 2 + RANK_TERMS.index(term)]])

    def by_term(flat: int) -> dict[RankTerm, np.ndarray]:
        return {term: _heldout(columns(term, flat), seconds) for term in terms}

    tried = {flat: by_term(flat) for flat in (0, *FLAT_ROWS) if not flat or flat < rows[:, 0].max()}
    smallest = {flat: min(map(_mean_error, heldout.values())) for flat, heldout in tried.items()}
    flat = min(smallest, key=smallest.__getitem__)
    if smallest[flat] >= (1 - MIN_GAIN) * smallest[0]:
        flat = 0
    heldout = tried[flat]
    means = {term: _mean_error(errors) for term, errors in heldout.items()}
    term = min(terms, key=means.__getitem__)
    costs, quality = _fit("decode", columns(term, flat), seconds, heldout[term], max_error)
    base, per_row, per_context, per_rank = costs
    return DecodeFit(DecodeModel(base, per_row, per_context, per_rank, term, flat), quality, means)


def fit_prefill(samples: Sequence[PrefillSample], max_error: float = MAX_ERROR) -> PrefillFit:
    """Returns a prefill model fitted to the samples. Raises BadSample or BadFit."""
    rows, seconds = _checked(samples, ("tokens", "squares", "token_ranks"))
    columns = np.column_stack([np.ones(len(rows)), rows])
    costs, quality = _fit("prefill", columns, seconds, _heldout(columns, seconds), max_error)
    base, per_token, per_token2, per_token_rank = costs
    return PrefillFit(PrefillModel(base, per_token, per_token2, per_token_rank), quality)


def fit_transfer(samples: Sequence[TransferSample]) -> Transfer:
    """Returns latency (seconds) and bandwidth (bytes/s) fitted to transfers that had the link to themselves. Raises
    BadSample, or BadFit when time does not grow with size."""
    rows, seconds = _checked(samples, ("bytes",), min_samples=2)
    columns = np.column_stack([np.ones(len(rows)), rows])
    latency, per_byte = _robust(columns, seconds)
    if not per_byte > 0:
        raise BadFit("transfer", _r2(seconds, columns @ (latency, per_byte)), len(rows), "Larger transfers are needed.")
    return Transfer(latency, 1 / per_byte)


def fit_paper_form(samples: Sequence[DecodeSample], kernel: Literal["bgmv", "mbgmv"]) -> PaperForm:
    """Returns the paper's form for the kernel, fitted to decode steps. It is accepted whatever its R^2, since it serves
    for comparison only. Raises BadSample."""
    rows, seconds = _checked(samples, DECODE_FIELDS)
    term = rows[:, DECODE_FIELDS.index("max_rank" if kernel == "bgmv" else "request_ranks")]
    columns = np.column_stack([np.ones(len(rows)), term])
    intercept, slope = nonnegative(columns, seconds).tolist()
    return PaperForm(kernel, slope, intercept, _r2(seconds, columns @ (intercept, slope)), len(rows))


def _checked(
    samples: Sequence[msgspec.Struct], fields: tuple[str, ...], min_samples: int = MIN_SAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct configurations f64[n, fields], sorted, and their times in seconds f64[n]. The time of
    repeats is their median. Raises BadSample for impossible values or too few configurations."""
    by_configuration: dict[tuple[float, ...], list[float]] = {}
    for index, sample in enumerate(samples):
        row = tuple(float(getattr(sample, field)) for field in fields)
        seconds = float(sample.seconds)  # type: ignore[attr-defined]
        if not (np.isfinite(row).all() and min(row) >= 0 and 0 < seconds < np.inf):
            raise BadSample(f"sample {index}: {sample}: counts must not be negative, seconds positive, all finite")
        by_configuration.setdefault(row, []).append(seconds)
    if len(by_configuration) < min_samples:
        raise BadSample(f"{len(by_configuration)} configurations were measured; at least {min_samples} are needed")
    rows = sorted(by_configuration)
    return np.array(rows), np.array([np.median(by_configuration[row]) for row in rows])


def _fit(
    what: str, columns: np.ndarray, seconds: np.ndarray, heldout: np.ndarray, max_error: float
) -> tuple[list[float], Quality]:
    costs = _robust(columns, seconds)
    forecast = columns @ costs
    undisturbed = ~_disturbed(forecast / seconds - 1)
    r2, error = _r2(seconds[undisturbed], forecast[undisturbed]), float(np.median(heldout))
    if not describes(r2, error, max_error):
        raise BadFit(what, r2, len(seconds), f"The held-out error is {error:.1%}; {max_error:.0%} would do. {AGAIN}")
    pairs = tuple(zip(seconds.tolist(), forecast.tolist(), strict=True))
    return costs, Quality(r2, error, len(seconds), int((~undisturbed).sum()), pairs)


def describes(r2: float, heldout_median_error: float, max_error: float = MAX_ERROR) -> bool:
    """Returns whether a model whose fit has these values may be used."""
    return r2 >= MIN_R2 or heldout_median_error <= max_error


def _mean_error(errors: np.ndarray) -> float:
    return float(np.minimum(errors, LARGEST_ERROR).mean())


def _robust(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Returns the costs that minimise the Huber loss of relative errors: large errors count linearly, not squared."""
    weights = 1 / seconds
    costs = nonnegative(columns * weights[:, None], seconds * weights)
    for _ in range(ROUNDS):
        errors = np.abs(columns @ costs / seconds - 1)
        bound = HUBER * max(_spread(errors), MIN_ERROR)
        weights = np.sqrt(bound / np.maximum(errors, bound)) / seconds
        before, costs = costs, nonnegative(columns * weights[:, None], seconds * weights)
        if np.allclose(columns @ before, columns @ costs, rtol=1e-6):
            break
    return [float(cost) for cost in costs]


def _heldout(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the relative error of each configuration, f64[n], forecast by a fit to the other folds."""
    order = np.random.default_rng(0).permutation(len(seconds))
    errors = np.zeros(len(seconds))
    for fold in range(FOLDS):
        out = order[fold::FOLDS]
        rest = np.setdiff1d(order, out)
        errors[out] = np.abs(columns[out] @ _robust(columns[rest], seconds[rest]) / seconds[out] - 1)
    return errors


def _disturbed(errors: np.ndarray) -> np.ndarray:
    """Returns bool[n]: whether each configuration is disturbed. At most MAX_SET_ASIDE of them are, those with the
    largest errors."""
    size = np.abs(errors)
    far = size > FAR * max(_spread(size), MIN_ERROR)
    count = int(MAX_SET_ASIDE * len(errors))
    worst = np.zeros(len(errors), bool)
    worst[np.argsort(-size)[:count]] = True
    return np.asarray(far & worst)


def _spread(sizes: np.ndarray) -> float:
    """Returns a robust standard deviation from absolute errors, which outliers do not affect."""
    return 1.4826 * float(np.median(sizes))


def _r2(seconds: np.ndarray, forecast: np.ndarray) -> float:
    total_squares = float(((seconds - seconds.mean()) ** 2).sum())
    return 1 - float(((seconds - forecast) ** 2).sum()) / total_squares if total_squares > 0 else -np.inf
