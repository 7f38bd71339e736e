"""Tables of what the gateway adds, and of how the registry grows."""

from __future__ import annotations

from typing import Any

from benchmarks.report import origin


def gateway_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    left_out = figures.get("rounds_left_out")
    disturbed = f" ({left_out:.0f} more, in which the host took processors away, are left out)" if left_out else ""
    lines = [
        f"{settings['streams']} streams of {settings['rate']:.0f} tokens/s, {settings['workers']} gateway "
        f"{'workers that share a Redis' if settings['workers'] > 1 else 'worker'}, "
        f"median of {settings['rounds']} alternated rounds{disturbed}; client, gateway and stub node share the "
        f"cores. {origin(document)}",
        "",
        "| added by the gateway | p50 | p99 |",
        "|---|---|---|",
    ]
    for title, name in (("time to first token", "ttft"), ("gap between two tokens", "gap"), ("each token", "delay")):
        p50, p99 = figures[f"{name}_added_p50_ms"], figures[f"{name}_added_p99_ms"]
        lines.append(f"| {title} | {p50:.2f} ms | {p99:.2f} ms |")
    lines += [
        "",
        f"{figures['rps']:.0f} streamed calls of one token per second; {figures['idle_streams_held']:.0f} streams held "
        f"open for {settings['idle_seconds']:.0f} s between two tokens. {_probe(settings)}",
    ]
    return "\n".join(lines)


def scale_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    lines = [
        f"A directory, adapters of stories260K. {origin(document)}",
        "",
        "| functions | deploy | a page of 100 |",
        "|---|---|---|",
    ]
    for row in document["rows"]:
        if "functions" in row:
            lines.append(f"| {row['functions']} | {row['deploy_ms']:.1f} ms | {row['list_page_ms']:.1f} ms |")
    names = settings["names"]
    lines += [
        "",
        f"Resolving a name that is in the cache, among {names}: {figures[f'resolve_us_at_{names}']:.1f} us; one that "
        f"is read: {figures['resolve_read_us'] / 1e3:.2f} ms. {_probe(settings)}",
    ]
    return "\n".join([*lines, *(_bucket_lines(row) for row in document["rows"] if "s3_functions" in row)])


def _bucket_lines(row: dict[str, Any]) -> str:
    count = row["s3_functions"]
    return (
        f"\nOn S3 (moto's server) with {count} functions: a page of 100 takes {row['list_page_requests']} requests, "
        f"{row['list_page_ms']:.0f} ms; `registry gc` {row['gc_requests']} requests, {row['gc_s']:.0f} s, with "
        f"{row['gc_removed']} files to remove; `registry verify` {row['verify_requests']} requests, "
        f"{row['verify_s']:.0f} s."
    )


def placement_table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['settings']['requests']} requests, p50 (p99) in us. {origin(document)}",
        "",
        "| nodes | policy | the choice alone | placed, with reservation and explanation | a record taken in |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        values = [
            f"{row[f'{name}_p50_us']:.0f} ({row[f'{name}_p99_us']:.0f})" for name in ("scoring", "place", "publish")
        ]
        nodes = f"{row['nodes']}{', over Redis' if row.get('state') == 'redis' else ''}"
        lines.append(f"| {nodes} | {row['policy']} | {' | '.join(values)} |")
    lines += ["", _probe(document["settings"])]
    return "\n".join(lines)


def _probe(settings: dict[str, Any]) -> str:
    return f"Contention probe: {settings['probe_before_ms']:.2f} ms before, {settings['probe_after_ms']:.2f} ms after."
