"""Profiles: what is read is what was measured here, or it is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.json_file import write_json
from node_agent.coldstart import measure
from node_agent.coldstart.measure import fit_cpu
from node_agent.coldstart.profile import (
    CpuLora,
    LinkCost,
    Profile,
    ProfileError,
    ProfileKey,
    read_profile,
)
from tests.node_agent.adapter_world import World

KEY = ProfileKey("fingerprint", "bfloat16", "cpu", 1, 1)
PROFILE = Profile(KEY, ((16, 1e-3), (64, 2e-3), (256, 6e-3)), CpuLora(1e-5, 1e-10, 1e-11), LinkCost(1e-4, 1e9))


def test_a_written_profile_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "profile.json"
    write_json(PROFILE, file)
    assert read_profile(file, KEY) == PROFILE
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 1}, "version 1"),
        ({"layer": ()}, "layer"),
        ({"layer": ((64, 1e-3), (16, 1e-3))}, "ascending"),
        ({"layer": ((16, 0.0),)}, "positive"),
        ({"link": LinkCost(0.0, 0.0)}, "link"),
        ({"cpu": CpuLora(-1.0, 0.0, 0.0)}, "cpu"),
        ({"key": msgspec.structs.replace(KEY, threads=2)}, "measured for"),
    ],
)
def test_a_profile_of_something_else_or_a_damaged_one_is_refused(
    tmp_path: Path, change: dict[str, object], word: str
) -> None:
    file = tmp_path / "profile.json"
    write_json(msgspec.structs.replace(PROFILE, **change), file)
    with pytest.raises(ProfileError, match=word):
        read_profile(file, KEY)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"key": 1}', b" " * (2 << 20)])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(text)
    with pytest.raises(ProfileError):
        read_profile(file, KEY)


@given(st.integers(1, 4096))
def test_layer_times_are_interpolated(tokens: int) -> None:
    found = PROFILE.layer_seconds(tokens)
    if tokens <= 16:
        assert found == 1e-3
    elif tokens >= 256:
        assert found == pytest.approx(6e-3 * tokens / 256)
    else:
        low, high = ((16, 1e-3), (64, 2e-3)) if tokens <= 64 else ((64, 2e-3), (256, 6e-3))
        share = (tokens - low[0]) / (high[0] - low[0])
        assert found == pytest.approx(low[1] + share * (high[1] - low[1]))


@given(st.integers(1, 1 << 20), st.floats(1e-6, 1.0))
def test_a_slice_fits_its_budget_unless_one_token_is_too_many(elements: int, budget: float) -> None:
    tokens = PROFILE.slice_tokens(elements, budget)
    assert tokens >= 1
    if tokens > 1:
        assert PROFILE.cpu_seconds(tokens, elements) <= budget * (1 + 1e-9)
    assert PROFILE.cpu_seconds(tokens + 2, elements) > budget


@pytest.mark.parametrize("per_product", [0.0, 5e-324])
def test_tokens_that_cost_nothing_make_one_slice(per_product: float) -> None:
    """A fit never gives a negative cost, but 0 where noise hid what a token adds."""
    free = msgspec.structs.replace(PROFILE, cpu=CpuLora(1e-5, 1e-10, per_product))
    assert free.slice_tokens(1000, 1.0) >= 1 << 20
    assert free.slice_tokens(1000, 1e-6) == 1
    assert free.slice_tokens(0, 1.0) == 1


def test_slices_are_measured_at_lengths_that_workers_take(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer one would be cut, and be fitted as if it had not been."""
    layout = SimpleNamespace(max_tokens=48)
    workers = SimpleNamespace(layout=layout, arm=lambda: None, disarm=lambda: None, link=None)
    true = msgspec.structs.replace(PROFILE, cpu=CpuLora(1e-5, 1e-9, 1e-10))
    store = world.store()
    slices: list[list[tuple[int, int, float]]] = []
    monkeypatch.setattr(measure, "fit_cpu", lambda samples: slices.append(samples) or fit_cpu(samples))
    monkeypatch.setattr(
        measure, "_slice_seconds", lambda _, base, slot, tokens, rounds: true.cpu_seconds(min(tokens, 48), 1000)
    )
    try:
        assert measure.measure_cpu(store, workers, measure.SHORT) is not None  # type: ignore[arg-type]
    finally:
        store.close()
    assert {tokens for tokens, _, _ in slices[0]} == {16, 48}


def test_without_workers_nothing_is_possible_on_the_cpu() -> None:
    alone = msgspec.structs.replace(PROFILE, cpu=None)
    assert alone.cpu_seconds(16, 100) == float("inf")
    assert alone.slice_tokens(100, 1.0) == 1


@given(
    st.floats(0, 1e-3), st.floats(0, 1e-8), st.floats(1e-12, 1e-9), st.floats(-0.02, 0.02), st.integers(0, 2**32 - 1)
)
def test_a_workers_costs_are_found_again(fixed: float, read: float, multiply: float, noise: float, seed: int) -> None:
    """Forecasts of the fitted costs are as far from the true ones as the measurements were."""
    true = msgspec.structs.replace(PROFILE, cpu=CpuLora(fixed, read, multiply))
    rng = np.random.default_rng(seed)
    samples = []
    for tokens in (8, 16, 64, 256):
        for elements in (1 << 12, 1 << 15, 1 << 18):
            seconds = true.cpu_seconds(tokens, elements) * (1 + noise * rng.uniform(-1, 1))
            samples.append((tokens, elements, seconds))
    found = msgspec.structs.replace(PROFILE, cpu=fit_cpu(samples))
    errors = [found.cpu_seconds(tokens, elements) / seconds - 1 for tokens, elements, seconds in samples]
    assert max(map(abs, errors)) <= 6 * abs(noise) + 1e-6
