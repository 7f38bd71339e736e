"""Measured performance models as files: strict JSON of bounded size, valid only for the conditions of the
measurement."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.json_file import write_json
from cluster.model_check import problem_of
from cluster.node_table import ASSUMED
from cluster.performance_fit import (
    MAX_ERROR,
    MAX_ERROR_IDLE,
    MIN_R2,
    DecodeFit,
    PaperForm,
    PrefillFit,
    describes,
)
from cluster.performance_model import MODEL_VERSION, ModelKey, PerformanceModel, Transfer

MAX_BYTES = 1 << 20
AGAIN = "run `garnish profile` on this host while it serves nothing"


class BadPerformanceFile(ValueError):
    """The file is damaged, or was measured under other conditions. The message says what to do."""


class PerformanceProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured performance model with the fits and conditions that it came from."""

    key: ModelKey
    decode: DecodeFit
    prefill: PrefillFit
    to_device: Transfer
    from_store: Transfer | None
    """Transfer from the object store, without a simulated link; None: there was nothing to read."""
    exposed_share: float
    paper: tuple[PaperForm, ...] = ()
    """Toppings' two-parameter forms on the paper's grid, if that was measured."""
    expected_link: float | None = None
    """Expected bandwidth of the device's PCIe link, in bytes per second, for comparison with `to_device`; None:
    unknown."""
    thorough: bool = False
    """True: measured by `garnish profile`. False: measured by the node itself while it was idle."""
    version: int = MODEL_VERSION

    @property
    def model(self) -> PerformanceModel:
        """Performance model of the profile. Without a measured store it has the store of ASSUMED."""
        return PerformanceModel(
            key=self.key,
            decode=self.decode.model,
            prefill=self.prefill.model,
            to_device=self.to_device,
            from_store=self.from_store or ASSUMED.from_store,
            exposed_share=self.exposed_share,
            version=self.version,
        )


def read_performance(file: Path, key: ModelKey | None) -> PerformanceProfile:
    """Returns the file's profile, which must have been measured under the conditions `key`. None accepts any conditions
    (for simulations). Raises BadPerformanceFile or OSError."""
    with file.open("rb") as stream:
        text = stream.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise BadPerformanceFile(f"{file}: more than {MAX_BYTES} bytes; {AGAIN}")
    try:
        profile = msgspec.json.decode(text, type=PerformanceProfile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadPerformanceFile(f"{file}: {error}; {AGAIN}") from None
    if profile.version != MODEL_VERSION:
        raise BadPerformanceFile(f"{file}: version {profile.version}, but this release uses {MODEL_VERSION}; {AGAIN}")
    if key is not None and profile.key != key:
        raise BadPerformanceFile(f"{file}: measured on {_differences(profile.key, key)}; {AGAIN}")
    problem = problem_of(profile.model) or _poor(profile)
    if problem:
        raise BadPerformanceFile(f"{file}: {problem}; {AGAIN}")
    return profile


def write_performance(profile: PerformanceProfile, file: Path) -> None:
    """Writes the profile to the file atomically. Raises OSError."""
    write_json(profile, file)


def _poor(profile: PerformanceProfile) -> str:
    max_error = MAX_ERROR if profile.thorough else MAX_ERROR_IDLE
    for name, quality in (("decode", profile.decode.quality), ("prefill", profile.prefill.quality)):
        if quality.r2 > 1 or quality.heldout_median_error < 0:
            measured = f"R^2 of {name} is {quality.r2}, its held-out error {quality.heldout_median_error}"
            return f"{measured}: nobody measured that"
        if not describes(quality.r2, quality.heldout_median_error, max_error):
            return (
                f"R^2 of {name} is {quality.r2} and its held-out error {quality.heldout_median_error}; at least "
                f"{MIN_R2:g}, or at most {max_error:g}, is wanted"
            )
    return ""


def _differences(stored: ModelKey, expected: ModelKey) -> str:
    fields = [name for name in ModelKey.__struct_fields__ if getattr(stored, name) != getattr(expected, name)]
    return ", ".join(f"{name} {getattr(stored, name)!r} (here: {getattr(expected, name)!r})" for name in fields)
