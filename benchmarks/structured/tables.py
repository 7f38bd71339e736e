"""The tables of docs/guide/structured-output.md."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import caption
from benchmarks.common.rule import host, table, wrapped

COLUMNS = ("schemas", "refused", "agree", "stricter", "looser")


def json_schema_table(document: dict[str, Any]) -> str:
    rows = [(f"`{row['keyword']}`", *(str(row.get(name, 0)) for name in COLUMNS)) for row in document["rows"]]
    total = ("all", *(f"{document['figures'][name]:.0f}" for name in COLUMNS))
    return "\n".join(table(("file of the suite", *COLUMNS), [total, *rows]))


def cost_text(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    text = (
        f"Tokens/s of {settings['rows']} rows of SmolLM2 135M, {settings['constrained']} of them with a grammar, over "
        f"{settings['rows']} rows without: {figures['ratio']:.3f} (95 % interval {figures['ratio_lower']:.3f} to "
        f"{figures['ratio_upper']:.3f}, {settings['rounds']} alternated rounds, "
        f"{figures['ratio_worst']:.3f} in the worst). A mask takes "
        f"{figures['mask_us_50']:.0f} us in the median, {figures['mask_us_99']:.0f} us at p99 and "
        f"{figures['mask_us_100'] / 1e3:.1f} ms at most; to compile a schema for the first time takes "
        f"{figures['compile_ms_50']:.1f} ms in the median and {figures['compile_ms_100']:.0f} ms at most."
    )
    return f"**{host(document)}**\n\n{caption(document, '')}\n\n{wrapped(text)}"
