"""A pass that waits for the device to catch up goes on as soon as it has: the engine's loop is woken."""

from __future__ import annotations

import threading
import time
from math import inf
from types import SimpleNamespace

import pytest
import torch

from node_agent.device import EventWatch
from node_agent.device_event import ENDED
from node_agent.engine import cold
from node_agent.engine.cold import ColdPass, ColdPasses
from node_agent.engine.pulse import Pulse
from node_agent.leases import Lease
from node_agent.types import Plan

LAYERS, LONG = 4, 30.0


class DeviceEvent:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.query = self.over.is_set

    def synchronize(self) -> None:
        self.over.wait(LONG)

    def wait(self) -> None:
        return None


class Starts:
    """Layers that lie in host memory are for the CPU workers, unless the device is behind."""

    def ready_until(self, lease: Lease, plan: Plan, layer: int) -> int:
        return layer if plan.cpu_extra[layer] == inf else LAYERS


class Run:
    layer, stretch = 0, 1

    def advance(self, to_layer: int) -> None:
        self.layer = to_layer


def test_the_loop_wakes_when_the_device_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    woken, events = threading.Event(), list[DeviceEvent]()

    def record(_device: torch.device, sleeps: bool) -> DeviceEvent:
        assert sleeps, "whoever waits must not take a processor's time"
        events.append(DeviceEvent())
        return events[-1]

    monkeypatch.setattr(cold, "record_event", record)
    watch = EventWatch(woken.set)
    runner = SimpleNamespace(device=torch.device("cpu"), num_layers=LAYERS)
    passes = ColdPasses(Starts(), None, None, runner, Pulse(False), watch, 2)  # type: ignore[arg-type]
    row = SimpleNamespace(length=10, request=SimpleNamespace(slo_class="standard", device_seconds=0.0))
    plan = Plan("assist", 1, cpu_extra=(0.0,) * LAYERS, load=(1.0,) * LAYERS)
    lora = SimpleNamespace(poisoned=False)
    one = ColdPass(row, None, Run(), lora, plan, None, time.monotonic())  # type: ignore[arg-type]
    passes.open.append(one)
    assert one.enqueued is ENDED
    assert passes.advance(3) == 3, "a layer: more would hold up others"
    assert one.run.layer == 1
    for _ in range(5):
        assert passes.advance(3) == 0, "the device is behind"
    assert not woken.is_set()
    events[0].over.set()
    assert woken.wait(LONG)
    woken.clear()
    assert passes.advance(3) == 3
    for _ in range(3):
        passes.advance(3)
    assert len(events) == 2
    events[1].over.set()
    assert woken.wait(LONG)
    watch.close()


def test_nothing_runs_where_nothing_is_awaited() -> None:
    watch = EventWatch(lambda: None)
    watch.close()
    assert watch._thread is None
