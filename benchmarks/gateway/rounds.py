"""Latency that the gateway adds, from the rounds of gateway.py. A round is two rows: a direct run, then the gateway's.

The headline counts all rounds. In *calm* rounds (`calm_*`) the host of the virtual machine took at most MAX_STOLEN of
the processors' time in either run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

MAX_STOLEN = 0.05
KINDS = ("ttft", "gap", "delay")
SHARES = (50, 99)

Round = tuple[dict[str, Any], dict[str, Any]]


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns medians over all rounds, the worst round of each (`*_max_ms`), and medians over the calm rounds."""
    rounds = list(pairs(rows))
    calm = [both for both in rounds if max(row["stolen_share"] for row in both) <= MAX_STOLEN]
    figures: dict[str, float] = {}
    for kind in KINDS:
        for share in SHARES:
            added = _added(rounds, kind, share)
            figures[f"{kind}_added_p{share}_ms"] = median(added)
            figures[f"{kind}_added_p{share}_max_ms"] = max(added)
            if calm:
                figures[f"calm_{kind}_added_p{share}_ms"] = median(_added(calm, kind, share))
    for share in SHARES:
        figures[f"added_p{share}_ms"] = max(figures[f"{kind}_added_p{share}_ms"] for kind in ("ttft", "gap"))
    return figures | {
        "rounds": len(rounds),
        "calm_rounds": len(calm),
        "errors": sum(row["errors"] for both in rounds for row in both),
    }


def pairs(rows: Sequence[dict[str, Any]]) -> Iterator[Round]:
    """Each round's direct run and gateway run. Raises ValueError if one lacks its counterpart."""
    for direct, through in zip(rows[::2], rows[1::2], strict=True):
        if (direct["server"], through["server"], through["round"]) != ("direct", "gateway", direct["round"]):
            raise ValueError(f"round {direct['round']} is not a direct run and then the gateway's")
        yield direct, through


def _added(rounds: Sequence[Round], kind: str, share: int) -> list[float]:
    key = f"{kind}_p{share}_ms"
    return [through[key] - direct[key] for direct, through in rounds]
