"""First token and tokens/s over HTTP of this version and an earlier one (`--before`, a commit).

    python -m benchmarks.serve.versions --json benchmarks/results/versions.json

Both run at once, each a `garnish up` with default settings and the same two adapters; one after the other is called
while the other has no calls. A round has, for each version, one call alone and then CALLERS calls at once, sampled,
with drawn prompts. Client and services share the host's cores.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Hashable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.coldstart.paired import paired_ratio
from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample
from benchmarks.common.load import OpenAiServer, closed_loop, open_session, plan
from benchmarks.common.report import ROOT, ContentionProbe, arguments, publish, report
from benchmarks.gateway.control_plane import trees

BEFORE = "8213bc2e"
CALLERS = 8
WARM_CALLS = 16
FIGURES = ("ttft_1_s", "tok_s_1", "ttft_8_s", "tok_s_8")
NAMES = ("pirate", "support")


async def measure(services: dict[str, HttpService], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each version and round; the version that comes first changes with each round."""
    rows = []
    async with AsyncExitStack() as stack:
        servers = {}
        for version, service in services.items():
            session = await stack.enter_async_context(open_session(service.key))
            servers[version] = OpenAiServer(session, service.url, settings["tokens"], settings["temperature"])
            await calls(servers[version], WARM_CALLS, CALLERS, settings, seed=-1)
        for number in range(settings["rounds"]):
            for version in list(servers) if number % 2 else reversed(list(servers)):
                rows.append(
                    {"round": number, "version": version, **await one_round(servers[version], settings, number)}
                )
    return rows


async def one_round(server: OpenAiServer, settings: dict[str, Any], number: int) -> dict[str, float]:
    alone = await calls(server, 1, 1, settings, 2 * number)
    together = await calls(server, CALLERS, CALLERS, settings, 2 * number + 1)
    return {
        "ttft_1_s": alone[0].ttft,
        "tok_s_1": rate(alone),
        "ttft_8_s": median(sample.ttft for sample in together),
        "tok_s_8": rate(together),
    }


async def calls(server: OpenAiServer, count: int, callers: int, settings: dict[str, Any], seed: int) -> list[Sample]:
    """Samples of calls to the adapters in turn. Raises RuntimeError where one fails."""
    planned = plan(["a0", "a1"], count, settings["prompt_tokens"], settings["seed"] + seed)
    samples = await closed_loop(server, planned, callers)
    if errors := [sample.error for sample in samples if sample.error]:
        raise RuntimeError(f"{len(errors)} of {count} calls failed: {errors[0]}")
    return samples


def rate(samples: list[Sample]) -> float:
    """Output tokens of all calls per second, from the first sent to the last ended."""
    seconds = max(sample.end for sample in samples) - min(sample.sent for sample in samples)
    return sum(sample.output_tokens for sample in samples) / seconds


def figures_of(rows: list[dict[str, Any]], seed: int) -> dict[str, float]:
    """Returns each version's median and worst round, and the median ratio of the versions with its 95 % interval."""
    figures: dict[str, float] = {}
    for name in FIGURES:
        by_version: dict[str, dict[Hashable, float]] = {"before": {}, "after": {}}
        for row in rows:
            by_version[row["version"]][row["round"]] = row[name]
        worst = max if name.startswith("ttft") else min
        for version, values in by_version.items():
            if values:
                figures |= {f"{name}_{version}": median(values.values())}
                figures |= {f"{name}_{version}_worst": worst(values.values())}
        ratio = paired_ratio(by_version["after"], by_version["before"], seed)
        if ratio is not None:
            figures |= {f"{name}_ratio": ratio.median}
            figures |= {f"{name}_ratio_lower": ratio.median_lower, f"{name}_ratio_upper": ratio.median_upper}
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--before", default=BEFORE, help="commit of the earlier version; empty: none")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    options = parser.parse_args()
    settings: dict[str, Any] = {"rounds": options.rounds, "tokens": 32, "prompt_tokens": 48, "temperature": 0.8}
    if options.quick:
        settings |= {"rounds": 1, "tokens": 4}
    settings |= {"before": options.before, "seed": options.seed}
    folder = ROOT / "examples" / "adapters" / options.model.name
    functions = "".join(f"  a{i}: {{tenant: bench, adapter: {folder / name}}}\n" for i, name in enumerate(NAMES))
    file = f"service: bench\nbase_model: {options.model.resolve()}\ntenants: {{bench: {{}}}}\nfunctions:\n{functions}"
    probe = ContentionProbe()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        start = partial(HttpService, options.model.resolve(), [], dtype="auto", threads=0, file=file)
        services = {
            version: stack.enter_context(start(root=Path(root) / version, tree=tree))
            for version, tree in stack.enter_context(trees(options.before)).items()
        }
        rows = asyncio.run(measure(services, settings))
    settings |= probe.values()
    publish(report("versions", settings, options.seed, rows, figures_of(rows, options.seed)), options.json)


if __name__ == "__main__":
    main()
