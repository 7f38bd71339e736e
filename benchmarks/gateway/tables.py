"""Tables of what the gateway adds, and of how the registry grows."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common.report import captioned_table, probe_text
from benchmarks.gateway.rounds import MAX_STOLEN, figures_of

ADDED = {"ttft": "time to first token", "gap": "gap between two tokens", "delay": "each token"}


def gateway_table(document: dict[str, Any]) -> str:
    """Renders medians over all rounds, the worst round, and the calm rounds."""
    settings, figures = document["settings"], document["figures"]
    added = figures_of(document["rows"])
    servers = "workers that share a Redis" if settings["workers"] > 1 else "worker"
    text = (
        f"{settings['streams']} streams of {settings['rate']:.0f} tokens/s, {settings['workers']} gateway {servers}, "
        f"median of all {added['rounds']:.0f} alternated rounds (worst round); client, gateway and stub node share the "
        "cores."
    )
    rows = []
    for kind, title in ADDED.items():
        cells = [
            f"{added[f'{kind}_added_p{share}_ms']:.2f} ms ({added[f'{kind}_added_p{share}_max_ms']:.0f} ms)"
            for share in (50, 99)
        ]
        calm = (added.get(f"calm_{kind}_added_p{share}_ms") for share in (50, 99))
        rows.append((title, *cells, *("" if value is None else f"{value:.2f} ms" for value in calm)))
    rest = (
        f"*Calm* are the {added['calm_rounds']:.0f} rounds of which the host of the virtual machine took at most "
        f"{MAX_STOLEN:.0%} of the processors' time. {figures['rps']:.0f} streamed calls of one token per second; "
        f"{figures['idle_streams_held']:.0f} streams held open for {settings['idle_seconds']:.0f} s between two "
        f"tokens. {probe_text(settings)}"
    )
    head = ("added by the gateway", "p50", "p99", "p50, calm", "p99, calm")
    return captioned_table(document, text, head, rows, rest)


def random_keys_table(document: dict[str, Any]) -> str:
    """Medians over the rounds, and the worst of them."""
    settings = document["settings"]
    rows = []
    for case, title in (("nothing", "alone"), ("flood", "beside the flood")):
        mine = [row for row in document["rows"] if row["beside"] == case]
        cells = (
            f"{median(row[name] for row in mine):.0f} ms ({max(row[name] for row in mine):.0f} ms)"
            for name in ("ttft_p50_ms", "ttft_p99_ms")
        )
        rows.append((title, *cells, str(sum(row["errors"] for row in mine))))
    text = (
        f"{settings['streams']} callers with valid keys, {settings['tokens']} tokens a call, one gateway worker; at "
        f"least {document['figures']['flood_rps']:.0f} random keys per second. Median of {settings['rounds']} rounds "
        "(worst round); flood, callers, gateway and stub node share the cores."
    )
    head = ("time to first token", "p50", "p99", "failed")
    return captioned_table(document, text, head, rows, probe_text(settings))


PLANE = (
    ("redis_in_mb_s", "Redis receives", "MB/s", 0.5, "redis_in_mb_s_most"),
    ("record_cpu_share", "records, of a worker's time", "", 0.1, "record_cpu_share_most"),
    ("placement_cpu_p99_ms", "a placement's CPU time, p99", "ms", 1.0, "placement_cpu_most_ms"),
    ("wall_p99_ratio", "a call's p99 with records, over without", "x", 2.0, "wall_p99_ratio_most"),
    ("store_reads_s", "reads of the registry", "/s", 5.0, "store_reads_s_most"),
)
"""Figure, what it is, unit, aim, and the figure of its worst case."""


def control_plane_table(document: dict[str, Any]) -> str:
    """Medians over the rounds, and the worst of them."""
    settings, figures = document["settings"], document["figures"]
    rows = []
    for name, title, unit, aim, worst in PLANE:
        cells = (
            f"{figures[name + tree]:.2f} {unit} ({figures[worst + tree]:.2f})".replace("  ", " ")
            for tree in ("_before", "")
        )
        rows.append((title, *cells, f"{aim:g} {unit}".strip()))
    text = (
        f"{settings['nodes']} stub nodes with {settings['residents']} adapters each, {settings['workers']} gateway "
        f"workers, {settings['functions']} functions on moto's S3 server, {settings['calls_s']:.0f} calls per second; "
        f"everything shares the cores. Median of {settings['rounds']} rounds (worst); before: commit "
        f"{settings['before']}."
    )
    rest = (
        f"Failed calls: {figures['errors_before']:.0f} before, {figures['errors']:.0f} now; a call's p99 is "
        f"{figures['wall_p99_ms_before']:.0f} ms before, {figures['wall_p99_ms']:.0f} ms now. {probe_text(settings)}"
    )
    head = ("", "before", "now", "aim")
    return captioned_table(document, text, head, rows, rest)
