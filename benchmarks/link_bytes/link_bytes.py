"""Bounds of what CPU-assisted cold starts can gain on a link: computed from bytes and layer times.

The model is model.py. The layer times of the 7B shape are those of an H100 (gpu_suite.json: the profile
up to 256 tokens, linear between them; prompts of the base by layers from 512 on); the link rates are assumptions, by
name. On the SmolLM2 shape, layer times are proportional to tokens, and the link is as fast as the load : prefill ratio
says: the load of rank 64 on q, k, v over a warm prefill of 256 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.common.report import arguments, load, publish, report
from benchmarks.link_bytes.model import LayerBytes, Shape, Targets, best_group, first_token

LLAMA_2 = Shape("Llama 2 7B", 32, 4096, 4096, 11008)
SMOLLM2 = Shape("SmolLM2-135M", 30, 576, 192, 1536)
SHAPES = (LLAMA_2, Shape("Llama 3 8B", 32, 4096, 1024, 14336), SMOLLM2)
TARGETS: tuple[Targets, ...] = ("q,k,v", "all seven")
BORDER_RANKS = (8, 16, 32, 64, 128, 256)
LINKS = {"PCIe 3 x16": 12e9, "PCIe 4 x16": 25e9, "PCIe 5 x16": 50e9, "the papers'": 3.3e9}
"""Bytes/s that a copy gets, each way: assumptions, but for the papers'."""
RANKS, TOKENS = (32, 64, 128, 256), (16, 64, 128, 256, 512, 1024, 2048)
RATIOS, SETTINGS, SETTING_TOKENS = (0.68, 0.17), {"S1": 32, "S3": 64}, (64, 256)
"""The load : prefill ratios, the ranks of the settings on q, k, v, and their prompts' tokens."""
RATIO_RANK, RATIO_TOKENS = 64, 256
"""Rank and prompt length of the call by which a load : prefill ratio is defined."""


def border_rows() -> Iterator[dict[str, Any]]:
    """Yields the prompt length above which assistance moves more bytes to the device than the adapter has."""
    for shape in SHAPES:
        for targets in TARGETS:
            border = shape.border(targets)
            for rank in BORDER_RANKS:
                yield {"part": "border", "shape": shape.name, "targets": targets, "rank": rank, "tokens": rank * border}


def layer_seconds(suite: dict[str, Any]) -> dict[int, float]:
    """Returns the seconds of a layer of the 7B shape on the GPU of a gpu_suite report, by tokens."""
    (profile,) = (row["profile"] for row in suite["rows"] if "profile" in row)
    measured = dict(profile["layer"])
    longer = {
        row["tokens"]: row["ms"] / 1e3 / LLAMA_2.layers
        for row in suite["rows"]
        if row["part"] == "prefill" and "ms" in row
    }
    between = {tokens: float(np.interp(tokens, list(measured), list(measured.values()))) for tokens in TOKENS}
    return {tokens: longer.get(tokens, between[tokens]) for tokens in TOKENS}


def link_rows(seconds: dict[int, float], ranks: Sequence[int], lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The ideal gain on the 7B shape, by link, projections, rank and tokens."""
    for name, rate in LINKS.items():
        for targets in TARGETS:
            for rank in ranks:
                for tokens in lengths:
                    size = LLAMA_2.layer_bytes(targets, rank, tokens)
                    of = {"part": "links", "link": name, "targets": targets, "rank": rank, "tokens": tokens}
                    yield of | compared(LLAMA_2.layers, seconds[tokens], size, rate)


def setting_rows() -> Iterator[dict[str, Any]]:
    """The bound of FULL over CACHED, by load : prefill ratio, setting and tokens. A warm prefill of RATIO_TOKENS takes
    one second."""
    layers = SMOLLM2.layers
    adapter = layers * SMOLLM2.layer_bytes("q,k,v", RATIO_RANK, 1).weights
    for ratio in RATIOS:
        for setting, rank in SETTINGS.items():
            for tokens in SETTING_TOKENS:
                size = SMOLLM2.layer_bytes("q,k,v", rank, tokens)
                of = {"part": "settings", "ratio": ratio, "setting": setting, "rank": rank, "tokens": tokens}
                yield of | compared(layers, tokens / RATIO_TOKENS / layers, size, adapter / ratio)


def compared(layers: int, seconds: float, size: LayerBytes, rate: float) -> dict[str, float]:
    """Returns the pipeline, and the best of assistance and pipeline, over a warm prefill.

    Also the number of layers assisted, and the share of the pipeline's time that is saved.
    """
    warm, pipeline = layers * seconds, first_token(layers, seconds, size, rate, 0)
    best, group = best_group(layers, seconds, size, rate)
    return {
        "pipeline_over_cached": round(pipeline / warm, 4),
        "full_over_cached": round(best / warm, 4),
        "group": group,
        "gain": round(1 - best / pipeline, 4),
    }


def study(quick: bool, seed: int) -> dict[str, Any]:
    seconds = layer_seconds(load("gpu_suite"))
    links = list(link_rows(seconds, RANKS[:1] if quick else RANKS, TOKENS[1:2] if quick else TOKENS))
    settings = {
        "layer_ms": {str(tokens): round(each * 1e3, 4) for tokens, each in seconds.items()},
        "layer_times": "gpu_suite",
        "links": LINKS,
    }
    figures = {"most_gain": max(row["gain"] for row in links)}
    long = [row["gain"] for row in links if row["tokens"] >= 512]
    figures |= {"most_gain_from_512": max(long)} if long else {}
    rows = [*border_rows(), *links, *setting_rows()]
    for row in rows:
        if row["part"] == "settings":
            figures[f"full_over_cached_{row['setting']}_t{row['tokens']}_{row['ratio']}"] = row["full_over_cached"]
    return report("link_bytes", settings, seed, rows, figures)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    publish(study(options.quick, options.seed), options.json)


if __name__ == "__main__":
    main()
