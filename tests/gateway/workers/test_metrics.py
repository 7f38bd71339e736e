"""Metrics: bounded labels, what is known of the nodes, and several workers that count as one."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.gpu import GpuFacts, GpuLoad
from cluster.news import NodeRecord, Resident, VllmLoad
from cluster.node_book import NodeView
from gateway.workers.metrics import MAX_LABELS, Metrics

PROGRAM = """
import json, os, signal, sys
from cluster.lifeline import die_with_parent
from gateway.workers.metrics import Metrics
from gateway.workers.metrics_memory import MetricsMemory
from gateway.workers.shared_values import use_slot

memory = MetricsMemory(slots=3, slot_bytes=int(sys.argv[1]))


def fork(work):
    slot, (done, told) = memory.take(), os.pipe()
    if not (pid := os.fork()):
        die_with_parent(os.getppid())
        use_slot(memory.slot(slot))
        work(Metrics(memory))
        os.write(told, b"!")
        signal.pause()
    assert os.read(done, 1)

    def ended():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        memory.release(slot)

    return ended


def counting(count, function="f"):
    def work(metrics):
        metrics.change_open(1)
        for _ in range(count):
            metrics.count_invocation("acme", function, "ok")
        metrics.observe_speed("acme", function, 0.02, None)
    return work


def show():
    print(json.dumps(Metrics(memory).render([]).decode()), flush=True)
"""
WORKERS_END = """
ends = [fork(counting(3)), fork(counting(4))]
show()
ends[0]()
show()
fork(counting(10))  # in the slot of the one that has ended
show()
"""
FULL_SLOT = """
def many(metrics):
    for number in range(150):
        counting(1, f"f{number}")(metrics)
fork(many)
show()
"""


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes) -> Samples:
    families = text_string_to_metric_families(text.decode())
    return {(item.name, frozenset(item.labels.items())): item.value for family in families for item in family.samples}


def node(name: str, state: str, *residents: Resident, **fields: Any) -> NodeView:
    record = NodeRecord(
        id=name, epoch="1", seq=1, url="", state=state, base="b", base_id="b", max_context=8, running=3, queued=1,
        queue_limit=8, kv_blocks_free=5, kv_blocks=9, block_tokens=16, **fields,
    )  # fmt: skip
    return NodeView(record, 0, 0.0, {resident.digest: resident for resident in residents})


def test_labels_are_bounded() -> None:
    metrics = Metrics()
    for number in range(MAX_LABELS + 50):
        metrics.count_invocation(f"tenant-{number}", f"function-{number}", "ok")
    found = samples(metrics.render([]))
    invoked = [(dict(labels), value) for (name, labels), value in found.items() if name == "garnish_invocations_total"]
    counts = {labels["function"]: value for labels, value in invoked}
    assert len(counts) == MAX_LABELS + 1
    assert counts["other"] == 50


def test_nodes_as_they_are_now() -> None:
    metrics = Metrics()
    here = [Resident("a", "device", 10, 1), Resident("b", "device", 20, 0), Resident("c", "host", 5, 0)]
    found = samples(metrics.render([node("n1", "ready", *here), node("n2", "ready"), node("n3", "draining")]))
    assert found["garnish_nodes", frozenset({("state", "ready")})] == 2
    assert found["garnish_nodes", frozenset({("state", "draining")})] == 1
    assert found["garnish_resident_adapters", frozenset({("node", "n1"), ("tier", "device")})] == 2
    assert found["garnish_resident_bytes", frozenset({("node", "n1"), ("tier", "host")})] == 5
    assert found["garnish_node_kv_blocks_free", frozenset({("node", "n3")})] == 5
    assert not any(name == "garnish_node_forecast_ratio" for name, _ in found), "nothing is known of it yet"
    known = samples(metrics.render([node("n1", "ready", forecast_ratio=1.25)]))
    assert known["garnish_node_forecast_ratio", frozenset({("node", "n1")})] == 1.25
    again = samples(metrics.render([]))
    assert not any(name.startswith("garnish_node") for name, _ in again), "a node that is gone is gone"


def test_gpus_as_their_nodes_report_them() -> None:
    gpu = GpuFacts(uuid="GPU-1", memory=24, ecc_uncorrectable=2, xid=79, xids=3, pcie_width_now=8, fault="it is lost")
    first = node("n1", "ready", gpu=gpu, gpu_load=GpuLoad(memory_used=5, power=60, throttled=0x44))
    found = samples(Metrics().render([first, node("n2", "ready", gpu=GpuFacts(uuid="GPU-2")), node("n3", "ready")]))
    of_first = {
        (name.removeprefix("garnish_node_gpu_"), dict(labels).get("reason", "")): value
        for (name, labels), value in found.items()
        if name.startswith("garnish_node_gpu_") and ("node", "n1") in labels and value
    }
    assert of_first == {
        ("memory_bytes", ""): 24, ("ecc_uncorrectable", ""): 2, ("last_xid", ""): 79, ("xids", ""): 3,
        ("pcie_lanes", ""): 8, ("failed", ""): 1, ("memory_used_bytes", ""): 5, ("power_watts", ""): 60,
        ("throttled", "power_cap"): 1, ("throttled", "hardware_thermal"): 1,
    }  # fmt: skip
    assert found["garnish_node_gpu_failed", frozenset({("node", "n2")})] == 0
    assert not any("gpu" in name for (name, labels) in found if ("node", "n3") in labels)
    assert not any("temperature" in name for name, _ in found), "nobody reports it"


def test_vllm_as_its_nodes_report_it() -> None:
    busy = node("n1", "ready", vllm=VllmLoad(running=2, waiting=1, kv_usage=0.25, preemptions=7))
    found = samples(Metrics().render([busy, node("n2", "ready", vllm=VllmLoad()), node("n3", "ready")]))
    of_vllm = {
        (name.removeprefix("garnish_node_vllm_"), dict(labels)["node"]): value
        for (name, labels), value in found.items()
        if "vllm" in name
    }
    fields = {"running": 2, "waiting": 1, "kv_usage": 0.25, "preemptions": 7}
    assert of_vllm == {
        **{(name, "n1"): value for name, value in fields.items()},
        **{(name, "n2"): 0 for name in fields},
    }
    assert not any("vllm" in name for name, _ in samples(Metrics().render([node("n3", "ready")])))


def test_cpu_workers_and_what_decided_on_them() -> None:
    helped = node("n1", "ready", cpu_workers=2, cpu_workers_ms={"warm": 8.5, "first_token_assist": 11.25})
    found = samples(Metrics().render([helped, node("n2", "ready", cpu_workers=0), node("n3", "ready")]))
    told = {
        (name, dict(labels)["node"], dict(labels).get("figure", "")): value
        for (name, labels), value in found.items()
        if name.startswith("garnish_node_cpu_workers")
    }
    assert told == {
        ("garnish_node_cpu_workers", "n1", ""): 2, ("garnish_node_cpu_workers", "n2", ""): 0,
        ("garnish_node_cpu_workers_ms", "n1", "warm"): 8.5,
        ("garnish_node_cpu_workers_ms", "n1", "first_token_assist"): 11.25,
    }, "n3 does not report them"  # fmt: skip


def test_workers_count_as_one() -> None:
    both, one, again = ask(WORKERS_END, 1 << 20)
    assert both["garnish_ttft_seconds_count", OWNER] == 2
    assert both["garnish_ttft_seconds_bucket", OWNER | {("le", "0.01")}] == 0
    assert both["garnish_ttft_seconds_bucket", OWNER | {("le", "0.025")}] == 2
    assert both["garnish_ttft_seconds_bucket", OWNER | {("le", "+Inf")}] == 2
    assert both["garnish_ttft_seconds_sum", OWNER] == 0.04
    assert both["garnish_invocations_total", OWNER | {("outcome", "ok")}] == 7
    assert both["garnish_open_invocations", frozenset()] == 2
    assert one["garnish_invocations_total", OWNER | {("outcome", "ok")}] == 7, "what it counted stays"
    assert one["garnish_open_invocations", frozenset()] == 1, "what it had open does not"
    assert again["garnish_invocations_total", OWNER | {("outcome", "ok")}] == 17, "the next one continues its counters"
    assert again["garnish_open_invocations", frozenset()] == 2


def test_a_worker_whose_memory_for_metrics_is_full_goes_on_without_further_names() -> None:
    (shown,) = ask(FULL_SLOT, 64 << 10)
    counted = [value for (name, _), value in shown.items() if name == "garnish_invocations_total"]
    assert 10 < len(counted) < 150
    assert set(counted) == {1}
    assert shown["garnish_open_invocations", frozenset()] == 150, "names that have a place are counted on"


OWNER = frozenset({("tenant", "acme"), ("function", "f")})


def ask(scenario: str, slot_bytes: int) -> list[Samples]:
    """What the workers' metrics were each time that the scenario showed them."""
    command = [sys.executable, "-c", PROGRAM + scenario, str(slot_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [samples(json.loads(line).encode()) for line in done.stdout.splitlines()]
