from __future__ import annotations

import pytest

from node_agent.performance import idle_base


@pytest.fixture(autouse=True)
def host_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs on the host of these tests: beside others an idle node pauses after each slice."""
    monkeypatch.setattr(idle_base, "others_share", lambda before, after: 0.0)
