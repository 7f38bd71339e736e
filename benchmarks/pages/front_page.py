"""The regions of README that state figures, under the rule of benchmarks/common/rule.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from benchmarks.common.rule import WIDTH, Spread, host, spread, wrapped
from benchmarks.engine.tables import FIRST_TOKEN_AIM, PREFILL_AIM, dtypes
from benchmarks.fairness.tables import flood_ratio
from benchmarks.faults.tables import refused_share
from benchmarks.gateway.rounds import figures_of
from benchmarks.scheduling.policy_cases import bed_cases, case_lines, simulated_cases, verdict

Reports = Mapping[str, dict[str, Any]]
"""Study -> its committed report."""

ENGINE, SERVE = ("engine", "engine_avx2"), ("serve", "serve_avx2")
"""The same study on the best level of a host, and held to AVX2."""
MANY = ("many_1000_20", "many_1000", "many_1000_80", "many_1000_0.25x", "many_1000_4x")
"""A thousand adapters at three loads, and at the middle one with other rates of network and link."""


def status(reports: Reports) -> str:
    """The box on top: what has never run, and what is served."""
    gpus = {name: report["machine"]["gpu"] for name, report in reports.items() if report["machine"]["gpu"]}
    hosts = sorted({report["machine"]["cpu"] for report in reports.values() if not report["machine"]["gpu"]})
    models = {report["settings"].get("model") for report in reports.values()} - {None}
    service = "gpu_service" in gpus
    lacking = "several GPU hosts" if service else "a whole service on a GPU" if gpus else "a GPU"
    never = f"**Never run:** a real AWS account, {lacking}"
    ran = "engines and a whole service" if service else "engines alone"
    names = ", ".join(sorted(set(gpus.values())))
    on_gpu = f" **On a GPU** ({names}): [{ran}](docs/results/gpu.md)." if gpus else ""
    text = (
        f"{never}. Both are written and tested without them ([kernels](docs/design/kernels.md), "
        f"[node pools](docs/operate/node-pools.md)).{on_gpu} **Served:** bases of the Llama, Mistral, Qwen2 and Qwen3 "
        "architectures by the project's own engine, and others by [vLLM](docs/operate/engines.md). "
        f"**Measured:** {', '.join(sorted(models))} and random weights, on {', '.join(hosts)}."
    )
    return "\n".join(f"> {line}" for line in wrapped(text, width=WIDTH - 2).splitlines())


def benefits(reports: Reports) -> str:
    """Six bullets of one line."""
    exact, fair = reports["exactness"]["figures"], reports["fairness"]["figures"]
    mixed = peft_ratios(reports)
    gpu = spread(gpu_cold_ratios(reports["gpu_service"]), lower_is_better=True)
    bursts = spread(gpu_burst_ratios(reports["gpu_suite_cold"]), lower_is_better=True)
    ties = f", ties: {exact['ties']}" if exact["ties"] else ""
    return "\n".join([
        "- **[Deploy like a function](docs/guide/quickstart.md)**: versions, aliases, canaries, rollback",
        "- **[Any mix of ranks](docs/results/benchmarks.md#serving)** in one batch: "
        f"{mixed.median:.1f}x PEFT's tokens/s ({mixed.worst:.1f}x)",
        f"- **[Cold over warm](docs/design/cold-start.md) first tokens**, H100: {gpu.median:.2f} ({gpu.worst:.2f}), in "
        f"bursts {bursts.median:.2f} ({bursts.worst:.2f})",
        f"- **[The tokens of PEFT](docs/results/benchmarks.md)**: {exact['tokens']:,} compared in fp32 and fp16, "
        f"{exact['mismatches']} differ{ties}",
        f"- **[Fair shares](docs/guide/tenants.md)** within {fair['share_error']:.2%} of the weights; "
        "SLO classes, limits",
        "- **[From a laptop to pools](docs/operate/node-pools.md)**: plan, apply and scale nodes by their load",
    ])  # fmt: skip


def figures(reports: Reports) -> str:
    """A bullet for each claim, with its page and its report."""
    bullets = [
        *(_engine(reports[name], name) for name in ENGINE if name in reports),
        *(_serving(reports[name], name) for name in SERVE if name in reports),
        _on_gpu(reports["gpu_service"], reports["gpu_suite_cold"]),
        _many([reports[name] for name in MANY]),
        _exact(reports["exactness"]),
        _fair(reports["fairness"]),
        _faults(reports["chaos"], reports["chaos_minute"]),
        _gateway(reports["gateway"]),
        _simulated([reports["scheduling"], reports["scheduling_measured"]]),
    ]
    cases = bed_cases(reports["testbed"]["rows"])
    lines = [wrapped(f"- {bullet}", "  ") for bullet in [*bullets, _routed(reports["testbed"], verdict(cases))]]
    return "\n".join([*lines, "", *case_lines(cases)])


def peft_ratios(reports: Reports) -> Spread:
    """Tokens/s of eight adapters in one batch over those of PEFT's mixed batch: all studies, models and levels."""
    ratios = [reports[name]["figures"]["over_peft_mixed_8"] for name in ENGINE if name in reports]
    for report in (reports[name] for name in SERVE if name in reports):
        ratios += [report["figures"][f"over_peft_{model}"] for model in report["settings"]["models"]]
    return spread(ratios, lower_is_better=False)


def gpu_cold_ratios(report: dict[str, Any]) -> list[float]:
    """First tokens of calls whose adapter is in host memory, over those whose adapter is on the GPU: all lengths."""
    return [report["figures"][f"cold_over_warm_w{words}"] for words in report["settings"]["lengths"]]


def gpu_burst_ratios(report: dict[str, Any]) -> list[float]:
    """First tokens of cold calls that come together, at the link's own rate, over warm ones': all bursts, by `pipeline`
    and by `full`."""
    rows = [row for row in report["rows"] if row["part"] == "loads" and "full_ms" in row and row["gb_s"] is None]
    return [row[f"{mode}_ms"] / row["cached_ms"] for row in rows for mode in ("pipeline", "full")]


def _source(text: str, page: str, *names: str) -> str:
    """The claim with its page and its reports."""
    reports = ", ".join(f"[{name}.json](benchmarks/results/{name}.json)" for name in names)
    return f"{text} [Page]({page}), {reports}."


def _engine(report: dict[str, Any], name: str) -> str:
    of, settings = report["figures"], report["settings"]
    parts = ", ".join(
        f"{title} {of[f'over_peft_{key}']:.2f} ({of[f'over_peft_{key}_min']:.2f})"
        for title, key in (
            ("base alone", "base_1"), ("base, eight requests", "base_8"), ("one adapter", "mixed_1"),
            ("eight adapters", "mixed_8"),
        )
    )  # fmt: skip
    text = (
        f"**Engine** over `generate` of transformers and PEFT, tokens/s with equal threads, worst round in brackets: "
        f"{parts}. {_first_tokens(of)}{settings['model']}, {dtypes(settings)}, {host(report)}."
    )
    return _source(text, "docs/results/benchmarks.md#the-engine-against-peft", name)


def _first_tokens(of: dict[str, float]) -> str:
    """Renders decode steps and first tokens over their aims' references; "" for a report without them."""
    if "step_over_peft_base_1" not in of:
        return ""
    steps, firsts = (
        " and ".join(f"{of[name]:.2f} ({of[f'{name}_{worst}']:.2f})" for name in names)
        for names, worst in (
            (("step_over_peft_base_1", "step_over_peft_base_8"), "min"),
            (("prefill_512_over_products", "http_first_token_37_over_products"), "max"),
        )
    )
    return (
        f"Decode steps of 1 and 8 rows: {steps} times as fast as transformers'. 512 prompt tokens in process, and the "
        f"first token of a chat of 37 over HTTP, in times of torch's fp32 products of their shapes (aims "
        f"{PREFILL_AIM} and {FIRST_TOKEN_AIM}): {firsts}. "
    )


def _serving(report: dict[str, Any], name: str) -> str:
    of, models = report["figures"], report["settings"]["models"]
    parts = "; ".join(
        f"{title}: base {of[f'over_peft_static_base_{key}']:.2f} ({of[f'over_peft_static_base_min_{key}']:.2f}), "
        f"eight adapters {of[f'over_peft_{key}']:.2f} ({of[f'over_peft_min_{key}']:.2f})"
        for key, title in models.items()
    )
    where = f"{dtypes(report['settings'])}, {host(report)}"
    text = f"**Two models**, the same with eight requests at once: {parts}. {where}."
    return _source(text, "docs/results/benchmarks.md#serving", name)


def _on_gpu(report: dict[str, Any], suite: dict[str, Any]) -> str:
    of, settings = report["figures"], report["settings"]
    cold = spread(gpu_cold_ratios(report), lower_is_better=True)
    bursts = gpu_burst_ratios(suite)
    roomy, tight = (of[f"tok_s_{room}_adapters"] / of[f"tok_s_{room}_base"] for room in ("roomy", "tight"))
    text = (
        f"**Served from a GPU**, over HTTP: {settings['callers']} callers of {settings['adapters']} adapters of rank "
        f"{settings['rank']} get {of['tok_s_roomy_adapters']:,.0f} tokens/s, {roomy:.2f} of what the base alone gives "
        f"them; with room for a third of the adapters on the device, {tight:.2f} of it. The first token of a call "
        f"whose adapter is in host memory over a warm call's, one call at a time on a GPU that is idle else, without "
        f"CPU workers: {cold.median:.2f} (worst of {cold.count} lengths {cold.worst:.2f}). Calls that come together, "
        f"4 to 32, by `pipeline` and by `full` with 14 CPU workers, in the engine alone: {min(bursts):.2f} to "
        f"{max(bursts):.2f}. A base of the {settings['shape']} shape with drawn weights, {settings['dtype']}, "
        f"{report['machine']['gpu']}; once."
    )
    return _source(text, "docs/results/gpu.md#a-whole-service", "gpu_service", "gpu_suite_cold")


def _many(reports: list[dict[str, Any]]) -> str:
    ttft = spread((report["figures"]["ttft_p95_over_ondemand"] for report in reports), lower_is_better=True)
    goodput = spread((report["figures"]["goodput_over_ondemand"] for report in reports), lower_is_better=False)
    hosts = " and ".join(sorted(set(map(host, reports))))
    text = (
        "**A thousand adapters**, room for a tenth of them on the device and a third on the host, called over HTTP as "
        "a trace calls functions, the defaults over loading on demand: first tokens at the 95th percentile "
        f"{ttft.median:.2f} (worst of {ttft.count} settings {ttft.worst:.2f}), calls in time {goodput.median:.2f} "
        f"(worst {goodput.worst:.2f}). One round each, a simulated link, {hosts}."
    )
    return _source(text, "docs/results/benchmarks.md#many-adapters", *MANY)


def _exact(report: dict[str, Any]) -> str:
    of = report["figures"]
    text = (
        f"**The tokens of PEFT**: {of['tokens']:,} greedy tokens of {of['cases']:,} drawn cases in fp32 and fp16, "
        f"{of['mismatches']} differ, {of['ties']} excused as a tie of PEFT's own logits. "
        f"{report['settings']['model']}, in fp16 a drawn Llama."
    )
    return _source(text, "docs/results/benchmarks.md#the-same-tokens-as-peft", "exactness")


def _fair(report: dict[str, Any]) -> str:
    ratios = ", ".join(
        f"{title} {_of_rounds(flood_ratio(report, key))}"
        for title, key in (("TTFT p50", "ttft_p50_ms"), ("TTFT p95", "ttft_p95_ms"), ("TPOT p50", "tpot_p50_ms"))
    )
    attainments = {
        case: [row["attain"] for row in report["rows"] if row["part"] == "strict" and row["case"] == case]
        for case in ("strict", "standard")
    }
    shares = "; ".join(f"{case} {median(values):.1%} (worst {min(values):.1%})" for case, values in attainments.items())
    model = ", on a node that has its performance model" if report["settings"]["performance_model"] else ""
    text = (
        f"**Fair shares**: backlogged tenants within {report['figures']['share_error']:.2%} of their weights. Beside a "
        f"tenant that asks for ten times its share the others have, with it over without it: {ratios}. Calls within "
        f"their SLO beside three times the capacity of best effort{model}: {shares}. {host(report)}."
    )
    return _source(text, "docs/results/benchmarks.md#fair-shares", "fairness")


def _of_rounds(rounds: tuple[float, float]) -> str:
    return f"{rounds[0]:.2f} (worst round {rounds[1]:.2f})"


def _faults(storm: dict[str, Any], minute: dict[str, Any]) -> str:
    def sentence(report: dict[str, Any], harmed: str) -> str:
        of, minutes = report["figures"], report["settings"]["seconds"] / 60
        return (
            f"{minutes:.0f} minutes with {of['kills']:.0f} parts {harmed}: {refused_share(of)} of {of['requests']:,} "
            f"calls refused, {of['wrong_tokens']:.0f} wrong tokens, {of['unanswered']:.0f} calls without an answer, "
            f"{of['lost_acknowledged']:.0f} acknowledged and lost, {of['leaked']:.0f} leaked."
        )

    usual = sentence(minute, f"killed, one every {minute['settings']['every']:.0f} s")
    worst = sentence(storm, f"killed, hung or emptied, one every {storm['settings']['pause']:.0f} s")
    text = f"**Faults**: {usual} A storm of {worst} {storm['settings']['model']}."
    return _source(text, "docs/results/benchmarks.md#faults", "chaos_minute", "chaos")


def _gateway(report: dict[str, Any]) -> str:
    of, settings = figures_of(report["rows"]), report["settings"]
    stolen = max(row["stolen_share"] for row in report["rows"])
    text = (
        f"**Gateway**: adds {of['ttft_added_p50_ms']:.1f} ms to the median first token and "
        f"{of['ttft_added_p99_ms']:.1f} ms to its p99, over all {of['rounds']:.0f} rounds (worst round "
        f"{of['ttft_added_p50_max_ms']:.0f} and {of['ttft_added_p99_max_ms']:.0f} ms, where the host took up to "
        f"{stolen:.0%} of the processors away); {settings['workers']} workers, {settings['streams']} streams, "
        f"{host(report)}."
    )
    return _source(text, "docs/results/benchmarks.md#the-gateway", "gateway")


def _simulated(reports: Iterable[dict[str, Any]]) -> str:
    cases = [case for report in reports for case in simulated_cases(report["rows"])]
    text = f"**Routing, simulated** (60 nodes, two profiles, each rate with all policies): {verdict(cases)}"
    return _source(text, "docs/guide/simulate.md#policies-compared", "scheduling", "scheduling_measured")


def _routed(report: dict[str, Any], text: str) -> str:
    text = f"**Routing** behind a real gateway and eight nodes timed by two profiles, {host(report)}: {text}"
    return _source(text, "docs/guide/simulate.md#behind-the-real-gateway", "testbed")
