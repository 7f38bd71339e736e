"""The table of how the registry grows, for docs/results/benchmarks.md."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import caption, probe_text
from benchmarks.common.rule import table, wrapped


def scale_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    rows = [
        (f"{row['functions']}", f"{row['deploy_ms']:.1f} ms", f"{row['list_page_ms']:.1f} ms")
        for row in document["rows"]
        if "functions" in row
    ]
    names = settings["names"]
    rest = (
        f"Resolving a name that is in the cache, among {names}: {figures[f'resolve_us_at_{names}']:.1f} us; one that "
        f"is read: {figures['resolve_read_us'] / 1e3:.2f} ms. {probe_text(settings)}"
    )
    return "\n".join([
        caption(document, "A directory, adapters of stories260K."),
        "",
        *table(("functions", "deploy", "a page of 100"), rows),
        "",
        wrapped(rest),
        *(_bucket_lines(row) for row in document["rows"] if "s3_functions" in row),
    ])  # fmt: skip


def _bucket_lines(row: dict[str, Any]) -> str:
    count = row["s3_functions"]
    return "\n" + wrapped(
        f"On S3 (moto's server) with {count} functions: a page of 100 takes {row['list_page_requests']} requests, "
        f"{row['list_page_ms']:.0f} ms; `registry gc` {row['gc_requests']} requests, {row['gc_s']:.0f} s, with "
        f"{row['gc_removed']} files to remove; `registry verify` {row['verify_requests']} requests, "
        f"{row['verify_s']:.0f} s."
    )
