"""What was warmed by hand: for a while, and not without end."""

from __future__ import annotations

import pytest
from numbered_adapters import adapter

from gateway.residency import manual_holds
from gateway.residency.manual_holds import HOLD_S, ManualHold, ManualHolds


def test_it_is_wanted_for_a_while_from_the_last_order_on() -> None:
    now = 0.0
    wants = ManualHolds(lambda: now)
    wants.hold(ManualHold("t", "f", adapter(0), "n", "host"))
    now = HOLD_S - 1
    assert [want.seconds for want in wants.now()] == [1.0]
    wants.hold(ManualHold("t", "f", adapter(0), "n", "device"))
    now += HOLD_S - 1
    (want,) = wants.now()
    assert (want.tier, want.seconds) == ("device", 1.0)
    other = ManualHolds(lambda: now)
    other.hold(want)  # as a worker hears it that started late
    now += 1
    assert (wants.now(), other.now()) == ([], [])


def test_one_tenant_takes_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual_holds, "MAX_TENANT_HELD", 3)
    monkeypatch.setattr(manual_holds, "MAX_HELD", 5)
    wants = ManualHolds(lambda: 0.0)
    wants.hold(ManualHold("u", "f", adapter(0), "n", "host"))
    for number in range(10):
        wants.hold(ManualHold("t", "f", adapter(number), "n", "host"))
    found = [(want.tenant, want.adapter) for want in wants.now()]
    assert found == [("u", adapter(0)), *(("t", adapter(number)) for number in (7, 8, 9))]
    for number in range(4):
        wants.hold(ManualHold(f"v{number}", "f", adapter(0), "n", "host"))
    assert len(wants.now()) == 5
