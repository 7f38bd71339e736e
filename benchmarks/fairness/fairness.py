"""Shares of a node that tenants get, and SLO attainment of strict tenants, whatever the others send.

An engine in this process, with the scheduler of production; tenants with their own mean lengths and adapters, drawn
(TENANTS of synthetic lengths: log-normal prompts, geometric answers).

`share_error`: four tenants that always have more to do, with weights 1, 1, 2 and 4. The largest relative difference of
a tenant's share of the service (prompt tokens + 2 output tokens, times its adapter's price) from that of its weight.

`victim_ttft_ratio`: three tenants that ask for a tenth of the node's capacity each, and a fourth of the same weight
that asks for ten times its share. Their median TTFT with it, over that without it, in rounds that alternate. What the
node serves then is in the rows (`served`, in the unit of shares per second).

`strict_attain`: a strict tenant that asks for 0.6 of the capacity, more than its share, while best-effort calls ask for
three times the capacity. Promised are a TPOT of 1.5 times that in a full batch, and a TTFT of three times that of an
idle node and one such step together; `standard_attain` is the same without the class. Aim: 0.99. What bounds a pass
then is the node's performance model, which is measured at the start as by a node (`performance_model` in the settings
says whether it could be).
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.report import ROOT, SMOLLM2, ContentionProbe, arguments, publish, report
from benchmarks.fairness.load import Client, ClientCall, drive, drive_backlogged, poisson
from node_agent.performance.idle import IdleMeasurement
from node_agent.performance.setup import use_performance
from tests.support.local_engine import LocalEngine

WEIGHTS = (1.0, 1.0, 2.0, 4.0)
LENGTHS = ((96, 24), (24, 48), (192, 16), (64, 32))
"""Mean prompt and answer of each tenant, times `length_scale`."""
FLOOD = 10.0
"""Multiple of its share that the flood asks for."""
VICTIM_UTILISATION = 0.1
STRICT_UTILISATION, BEST_EFFORT_UTILISATION = 0.6, 3.0
TTFT_OVER, TPOT_OVER = 3.0, 1.5
WINDOW = 0.2, 0.85
"""Part of a round whose calls count: queues fill at the beginning, and the end has no time."""
WAITING = 6


class Study:
    def __init__(self, engine: LocalEngine, adapters: list[Path], settings: dict[str, Any], seed: int) -> None:
        self.engine, self.settings, self.rng = engine, settings, np.random.default_rng(seed)
        self.max_tokens = settings["most_tokens"]
        self.rows: list[dict[str, Any]] = []
        deployed = [engine.deploy(path) for path in adapters[: len(LENGTHS)]]
        for adapter in deployed:
            engine.submit([1, 2, 3], 2, adapter, ignore_eos=True)
        engine.run()
        scale = settings["length_scale"]
        self.clients = [
            Client(f"t{i}", max(8, int(prompt * scale)), max(4, int(output * scale)), deployed[i % len(deployed)])
            for i, (prompt, output) in enumerate(LENGTHS)
        ]

    def shares(self) -> float:
        """The largest relative error; leaves the node's capacity in `capacity`."""
        clients = [replace(client, owner={"weight": w}) for client, w in zip(self.clients, WEIGHTS, strict=True)]
        served = drive_backlogged(self.engine, clients, self.settings["share_seconds"], WAITING, self.rng)
        self.capacity, errors = sum(served.values()), []
        for client, weight in zip(clients, WEIGHTS, strict=True):
            got, fair_share = served[client.name] / self.capacity, weight / sum(WEIGHTS)
            errors.append(abs(got / fair_share - 1))
            self.rows.append(
                {"part": "shares", "tenant": client.name, "weight": weight, "share": got, "due": fair_share}
            )
        return max(errors)

    def flood(self) -> tuple[float, float]:
        """Ratio of the victims' TTFT: median and largest over the rounds."""
        *victims, flooder = self.clients
        share = self.capacity / len(self.clients)
        ratios = []
        for index in range(self.settings["rounds"]):
            ttft: dict[str, float] = {}
            for case in ("alone", "flood"):
                load = [(victim, VICTIM_UTILISATION * self.capacity) for victim in victims]
                called = self._run([*load, (flooder, FLOOD * share)] if case == "flood" else load)
                calls = [each for each in called if each.call.client is not flooder]
                ttft[case] = median(each.ttft if each.ttft is not None else float("inf") for each in calls)
                served = sum(each.cost for each in called) / (WINDOW[1] - WINDOW[0]) / self.settings["round_seconds"]
                self.rows.append({"part": "flood", "round": index, "case": case, "served": served, **_summary(calls)})
            ratios.append(ttft["flood"] / ttft["alone"])
        return median(ratios), max(ratios)

    def strict(self) -> dict[str, float]:
        """Attainment of the class strict, and of standard under the same load."""
        dear, cheap = self.clients[0], replace(self.clients[3], owner={"slo_class": "best_effort"})
        step = self._full_tpot(cheap)
        promise = {"ttft": TTFT_OVER * (self._idle_ttft(dear) + step), "tpot": TPOT_OVER * step}
        attained: dict[str, list[float]] = {"strict": [], "standard": []}
        for index in range(self.settings["rounds"]):
            for name, attainments in attained.items():
                client = replace(dear, owner={"slo_class": name, **promise})
                load = [(client, STRICT_UTILISATION * self.capacity), (cheap, BEST_EFFORT_UTILISATION * self.capacity)]
                called = self._run(load)
                calls = [each for each in called if each.call.client is client]
                attainments.append(sum(_is_within(each, promise) for each in calls) / len(calls))
                preempted = sum(each.outcome.finished.preemptions for each in called if each.outcome.finished)
                self.rows.append(
                    {"part": "strict", "round": index, "case": name, "attain": attainments[-1],
                     "preemptions": preempted}
                    | {f"{which}_ms": value * 1e3 for which, value in promise.items()} | _summary(calls)
                )  # fmt: skip
        return {f"{name}_attain": median(attainments) for name, attainments in attained.items()}

    def _run(self, load: list[tuple[Client, float]]) -> list[ClientCall]:
        """Runs calls of each client that ask for this much of the node's service per second.

        Leaves out the calls of the beginning, when queues fill, and of the end, which had no time to begin.
        """
        seconds, limits = self.settings["round_seconds"], self.engine.engine.limits
        calls = [
            call
            for client, cost in load
            for call in poisson(client, cost / client.mean_cost, seconds, self.rng, limits.vocab_size, self.max_tokens)
        ]
        called = drive(self.engine, calls, seconds)
        return [each for each in called if WINDOW[0] * seconds < each.call.at < WINDOW[1] * seconds]

    def _idle_ttft(self, client: Client) -> float:
        """Seconds, of the client's calls one at a time."""
        ttfts = []
        for _ in range(self.settings["idle_calls"]):
            vocab = self.engine.engine.limits.vocab_size
            prompt = self.rng.integers(3, vocab, client.prompt).tolist()
            request = self.engine.submit(prompt, 2, client.adapter, ignore_eos=True)
            self.engine.run()
            outcome = self.engine.outcomes[request]
            assert outcome.finished is not None
            ttfts.append(outcome.finished.queue + outcome.finished.prefill)
        return median(ttfts)

    def _full_tpot(self, client: Client) -> float:
        """Seconds, median over calls, while the batch is full of the client's."""
        seconds, limits = self.settings["round_seconds"] / 2, self.engine.engine.limits
        rate = BEST_EFFORT_UTILISATION * self.capacity / client.mean_cost
        calls = poisson(client, rate, seconds, self.rng, limits.vocab_size, self.max_tokens)
        return median(each.tpot for each in drive(self.engine, calls, seconds) if each.tpot is not None)


def _is_within(call: ClientCall, promise: dict[str, float]) -> bool:
    in_time = call.ttft is not None and call.ttft <= promise["ttft"]
    return in_time and (call.tpot is None or call.tpot <= promise["tpot"])


def _summary(calls: list[ClientCall]) -> dict[str, float]:
    ttft = sorted(each.ttft for each in calls if each.ttft is not None)
    tpot = sorted(each.tpot for each in calls if each.tpot is not None)
    at = {"ttft_p50_ms": (ttft, 0.5), "ttft_p95_ms": (ttft, 0.95), "tpot_p50_ms": (tpot, 0.5)}
    times_ms = {name: values[int(share * (len(values) - 1))] * 1e3 for name, (values, share) in at.items() if values}
    return {"calls": len(calls), "unanswered": len(calls) - len(ttft), **times_ms}


def give_performance(engine: LocalEngine, seconds: float) -> None:
    """Measures a performance model, as an idle engine process does. The engine gets none if that takes more than
    `seconds`, as it may on a busy host."""
    if not use_performance(engine.engine, engine.config, engine.base):
        idle = IdleMeasurement(engine.engine, engine.config, engine.base)
        until = time.monotonic() + seconds
        while not idle.ended and time.monotonic() < until:
            if not idle.work(lambda: False):
                time.sleep(0.05)


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "rounds": 5, "round_seconds": 30.0, "share_seconds": 90.0, "idle_calls": 9, "length_scale": 0.3,
        "performance_seconds": 600.0, "most_tokens": 1024, "max_rows": 16, "queue_limit": 64, "chunk_tokens": 256,
    }  # fmt: skip
    if options.quick:
        settings |= {"rounds": 1, "round_seconds": 2.0, "share_seconds": 1.0, "idle_calls": 3, "length_scale": 0.5}
        settings |= {"most_tokens": 256, "performance_seconds": 3.0}
    adapters = sorted(
        path.parent for path in (ROOT / "examples" / "adapters" / options.model.name).glob("*/adapter_config.json")
    )
    probe = ContentionProbe()
    limits = {name: settings[name] for name in ("max_rows", "queue_limit", "chunk_tokens")}
    with tempfile.TemporaryDirectory() as root:
        engine = LocalEngine(options.model, root, **limits)
        try:
            give_performance(engine, settings["performance_seconds"])
            study = Study(engine, adapters, settings, options.seed)
            figures = {"share_error": study.shares()}
            figures["victim_ttft_ratio"], figures["victim_ttft_ratio_max"] = study.flood()
            figures |= study.strict()
        finally:
            engine.close()
    settings |= {"model": options.model.name, "weights": WEIGHTS, "lengths": LENGTHS, "flood": FLOOD}
    settings |= {"performance_model": engine.engine.drift is not None}
    settings |= {"capacity_cost_per_s": study.capacity, **probe.values()}
    publish(report("fairness", settings, options.seed, study.rows, figures), options.json)


if __name__ == "__main__":
    main()
