"""Cold starts in one engine on a CPU: every way of loading over the same calls, against adapters that are all resident.

The link between host memory and "device" is simulated: a rank-64 q,k,v adapter takes 0.68 of a warm prefill of 256
tokens to cross it, the papers' 30 ms to 44 ms. The engine has one core, a CPU worker the other. All adapters lie in
host memory; every variant gets the same calls (workloads.py), in rounds that alternate the variants. TTFT counts from
the time at which a call was due.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from adapters.base_model import load_base_model
from benchmarks.cold_rig import VARIANTS, Rig, Served, capacity, make_adapters, warm_prefill
from benchmarks.local_engine import LocalEngine
from benchmarks.report import ROOT, arguments, contention_probe, publish, report
from benchmarks.workloads import SETTINGS, Call, Setting, draw_calls
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores

LOAD_OVER_PREFILL = 0.68
MEAN_OUTPUT = 12
"""Tokens. The papers' answers are longer; a first token does not wait for them."""
MOST_PROMPT = {"chat": 1024, "azure": 2048}
POOL_SHARE = 0.1
"""Of all adapters' bytes, that the device holds."""
Measures = dict[str, list[float]]


def build(model: Path, root: Path, paths: Sequence[Path], device_bytes: int, link: LinkConfig | None) -> Rig:
    engine = LocalEngine(
        model, root, dtype="bfloat16", threads=1, adapter_memory=device_bytes, host_memory=2 << 30, kv_memory=256 << 20,
        cpu_workers=0 if link is None else 1, load_link=link, cold_start="wait" if link is None else "auto", max_cold=4,
    )  # fmt: skip
    return Rig(engine, [engine.deploy(path) for path in paths])


def measures(served: Sequence[Served]) -> dict[str, float]:
    """Means over calls: seconds, and the share of calls that found their adapter somewhere else than on the device."""
    return {
        "ttft": mean(one.sample.ttft for one in served),
        "tpt": mean(one.sample.tpt for one in served),
        "e2e": mean(one.sample.e2e for one in served),
        "exposed": mean(one.cold.exposed for one in served),
        "cold": mean(one.cold.state != "none" for one in served),
    }


def run_setting(setting: Setting, model: Path, root: Path, options: Any, link: LinkConfig) -> dict[str, Any]:
    """Every variant over the setting's calls, in rounds of `calls` each."""
    rounds, calls = (1, 4) if options.quick else (options.rounds, options.calls)
    rng = np.random.default_rng(options.seed)
    base = load_base_model(model)
    most = min(MOST_PROMPT[setting.lengths], base.max_context - 4 * MEAN_OUTPUT)
    drawn = [draw_calls(setting, calls, rng, most, MEAN_OUTPUT) for _ in range(rounds)]
    count = min(setting.adapters, rounds * calls)
    drawn = [_spread(part, i, count, setting) for i, part in enumerate(drawn)]
    ranks = [setting.ranks[i % len(setting.ranks)] for i in range(count)]
    paths = make_adapters(model, root / "adapters", ranks, options.seed)
    prompts = [
        [rng.integers(100, min(1000, base.vocab_size), call.prompt_tokens).tolist() for call in part] for part in drawn
    ]
    sizes = sum((path / "adapter_model.safetensors").stat().st_size for path in paths)
    cached = build(model, root / "cached", paths, 2 * sizes + (64 << 20), None)
    cached.fill_device()
    cold = build(model, root / "cold", paths, int(POOL_SHARE * sizes) + (32 << 20), link)
    gap = 1 / (setting.utilisation * capacity(cached, drawn[0], prompts[0]))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    plans: dict[str, int] = {}
    for part, texts in zip(drawn, prompts, strict=True):
        for rig in (cached, cold):  # what is computed for the first time takes longer: not at one variant's expense
            capacity(rig, part, texts)
        for name, way in VARIANTS.items():
            rig = cached if name == "cached" else cold
            rig.engine.engine.cold_start.way = way
            if rig is cold:
                rig.forget_device()
            served = rig.serve(part, texts, gap)
            found[name].append(measures(served))
            if name == "full":
                for one in served:
                    plans[one.cold.plan] = plans.get(one.cold.plan, 0) + 1
    for rig in (cached, cold):
        rig.engine.close()
    return {"setting": setting.name, "gap_s": gap, "adapters": count, "plans": plans, "rounds": found}


def _spread(calls: list[Call], index: int, count: int, setting: Setting) -> list[Call]:
    """Rounds of a setting whose calls all differ name different adapters, too."""
    if setting.popularity != "distinct":
        return [Call(c.at, c.adapter % count, c.prompt_tokens, c.output_tokens) for c in calls]
    at = index * len(calls)
    return [Call(c.at, (at + i) % count, c.prompt_tokens, c.output_tokens) for i, c in enumerate(calls)]


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """`{measure}_over_cached_{variant}_{setting}`: medians over rounds, and the largest round of TTFT."""
    found: dict[str, float] = {}
    base = row["rounds"]["cached"]
    for name in VARIANTS:
        for kind in ("ttft", "tpt", "e2e"):
            each = [one[kind] / ref[kind] for one, ref in zip(row["rounds"][name], base, strict=True)]
            found[f"{kind}_over_cached_{name}_{row['setting']}"] = median(each)
            if kind == "ttft":
                found[f"ttft_over_cached_{name}_{row['setting']}_max"] = max(each)
        found[f"exposed_ms_{name}_{row['setting']}"] = 1e3 * mean(one["exposed"] for one in row["rounds"][name])
    return found


def study(options: Any, root: Path) -> dict[str, Any]:
    model = Path(options.model).absolute()
    probe = contention_probe()
    one = make_adapters(model, root / "one", [64], options.seed)
    rig = build(model, root / "first", one, 128 << 20, None)
    rig.fill_device()
    prefill = warm_prefill(rig, 256)
    rig.engine.close()
    size = rig.adapters[0].bytes * torch.bfloat16.itemsize // torch.float32.itemsize
    link = LinkConfig(size / (LOAD_OVER_PREFILL * prefill))
    names = options.settings.split(",")
    rows = [run_setting(SETTINGS[name], model, root / name, options, link) for name in names]
    figures = {"probe_before_ms": probe, "probe_after_ms": contention_probe(), "warm_prefill_256_ms": prefill * 1e3}
    for row in rows:
        figures |= ratios(row)
    settings = {
        "model": model.name, "dtype": "bfloat16", "link_bytes_s": link.bandwidth, "engine_cores": 1, "worker_cores": 1,
        "pool_share": POOL_SHARE, "mean_output": MEAN_OUTPUT, "rounds": options.rounds, "calls": options.calls,
        "quick": options.quick,
    }  # fmt: skip
    return report("coldstart", settings, options.seed, rows, figures, simulated=True)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--settings", default="S1,S2,S3,MAF-256", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="in each round")
    options = parser.parse_args()
    if not spare_cores(1):
        parser.error("two cores are needed: one for the engine, one for a CPU worker")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        publish(study(options, Path(root)), options.json)


if __name__ == "__main__":
    main()
