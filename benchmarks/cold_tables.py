"""The table of remote_store.py's report, for docs/design/cold-start.md."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import caption
from benchmarks.rule import table, wrapped

STORE_RATIOS = {
    "ttft_over_bound": "TTFT over bound",
    "cold_over_bound": "E2E over bound",
    "cold_over_plain": "E2E over bound with a plain client's fetch",
    "cold_over_warm": "E2E over warm, short fetches",
}
WAY_NAMES = {"auto": "`auto` (the default)", "wait": "`wait`: load, then compute"}


def remote_store_table(document: dict[str, Any]) -> str:
    """Of remote_store.py: what a cold call takes, by way, median and worst."""
    settings, figures = document["settings"], document["figures"]
    text = (
        f"{settings['model']}, {settings['adapters']} adapters of ranks "
        f"{', '.join(map(str, settings['ranks']))}, {settings['tokens']} prompt and output tokens, one call at a time "
        f"over HTTP; {settings['rate'] / 1e6:g} MB/s and {1e3 * settings['delay']:g} ms a request to the store. Median "
        "over the adapters, the worst in brackets."
    )
    measured = {name: title for name, title in STORE_RATIOS.items() if f"{name}_auto" in figures}
    cells = []
    for way in settings["ways"]:
        ratios = [f"{figures[f'{name}_{way}']:.2f} ({figures[f'{name}_{way}_max']:.2f})" for name in measured]
        cells.append((WAY_NAMES[way], *ratios))
    head = ("`node.cold_start`", *measured.values())
    rows = [row for row in document["rows"] if row["way"] == "auto"]
    after = [(row["cold_e2e_s"] - row["cold_ttft_s"]) / (row["warm_e2e_s"] - row["warm_ttft_s"]) for row in rows]
    notes = (
        f"With `auto`, the time after the first token is {median(after):.2f} times that of the warm call (worst "
        f"{max(after):.2f}). Contention probe: {settings['probe_before_ms']:.2f} ms before, "
        f"{settings['probe_after_ms']:.2f} ms after."
    )
    if "plain_over_fetch_auto" in figures:
        notes += (
            f" A plain client's GET of the same bytes just before each call takes "
            f"{figures['plain_over_fetch_auto']:.2f} times what rate and delay allow (worst "
            f"{figures['plain_over_fetch_auto_max']:.2f}): store, network and client share the host's cores."
        )
    return "\n".join([caption(document, text), "", *table(head, cells), "", wrapped(notes)])
