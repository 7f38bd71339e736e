"""Quantities as people write them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from garnish.sizes import format_bytes, parse_bytes, parse_rate, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 kB", 1500), (4096, 4096), ("7", 7), ("3B", 3)],
)
def test_bytes(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("1GB/s", 1e9), ("200MB/s", 2e8), ("64KiB/s", 65536.0)])
def test_rates(text: object, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("15m", 900.0), ("250ms", 0.25), ("2h", 7200.0), (30, 30.0), (0.5, 0.5), ("1d", 86400.0)]
)
def test_durations(text: object, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate, parse_seconds])
@pytest.mark.parametrize(
    "value", ["", "0", "-4GiB", "4 gib", "lots", "1e9", "٣GiB", "9" * 40, 0, -1, float("inf"), True, None, [4]]
)
def test_anything_else_is_refused(parse: object, value: object) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse(value)  # type: ignore[operator]


@example(576460752305, ("MB", 10**6))
@given(st.integers(1, 2**40), st.sampled_from([("B", 1), ("KiB", 1 << 10), ("MB", 10**6)]))
def test_units_multiply(count: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{count}{unit[0]}") == count * unit[1]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2350080, "2.2 MiB"), (104857600, "100 MiB")),
        *((1048575, "1.0 MiB"), (4 << 30, "4.0 GiB"), (5000 << 40, "5000 TiB")),
    ],
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 2**60))
def test_what_is_shown_is_nearly_what_is_meant(count: int) -> None:
    if count:
        assert abs(parse_bytes(format_bytes(count)) - count) <= 0.05 * count
