"""Circuit breakers: a node that can't be reached gets no requests for a while, and then one request as a probe.

A node's record shows that the node can reach the gateway; only a call shows that the gateway can reach the node. After
THRESHOLD failures in a row the node's circuit opens. It gets no requests for one second, and for twice the previous
pause after each failed probe. Then one request at a time may try, and the others are refused. Once a request is served,
the circuit closes. Each worker has its own circuits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from cluster.errors import ServiceError
from cluster.node_table import NodeTable
from gateway.calls.node_watch import NodeFailure

THRESHOLD = 3
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0

Circuit = Literal["closed", "open", "half_open"]


class Probe:
    """Permit of the single request that may go to a node whose circuit is half open."""


class CircuitOpen(NodeFailure):
    """The node's circuit is open, so no request may be sent to it."""

    def __init__(self, node_id: str) -> None:
        message = f"node {node_id} could not be talked to lately, and another request tries now"
        super().__init__(ServiceError("unavailable", message, retry_after=FIRST_PAUSE_S), retryable=True)


class _Breaker:
    def __init__(self) -> None:
        self.failures = 0
        self.pause = FIRST_PAUSE_S / 2
        self.until = 0.0
        self.probe: Probe | None = None


class Breakers:
    """Circuit breakers of one worker, by node and epoch, so that a restarted process has a new one.

    `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], opened: Callable[[str], None] = lambda _: None) -> None:
        """`opened` is called with each node whose circuit opens."""
        self._clock = clock
        self._opened = opened
        self._failing: dict[tuple[str, str], _Breaker] = {}

    def blocked(self, nodes: NodeTable) -> frozenset[str]:
        """Returns the ids of nodes that get no requests now."""
        if not self._failing:
            return frozenset()
        for node_id, epoch in list(self._failing):
            row = nodes.row(node_id)
            if row is None or nodes.record(row).epoch != epoch:
                del self._failing[node_id, epoch]
        now = self._clock()
        return frozenset(
            node_id
            for (node_id, _), breaker in self._failing.items()
            if breaker.failures >= THRESHOLD and (breaker.probe is not None or now < breaker.until)
        )

    def circuit(self, node_id: str, epoch: str) -> Circuit:
        breaker = self._failing.get((node_id, epoch))
        if breaker is None or breaker.failures < THRESHOLD:
            return "closed"
        return "half_open" if self._clock() >= breaker.until else "open"

    def begin(self, node_id: str, epoch: str) -> Probe | None:
        """Admits a request to the node. Returns the probe if the circuit is half open, else None.

        Raises CircuitOpen, for example if another request became the probe after the node was chosen.
        """
        breaker = self._failing.get((node_id, epoch))
        if breaker is None or breaker.failures < THRESHOLD:
            return None
        if breaker.probe is not None or self._clock() < breaker.until:
            raise CircuitOpen(node_id)
        breaker.probe = Probe()
        return breaker.probe

    def answered(self, node_id: str, epoch: str) -> None:
        """Records that the node serves requests, which closes its circuit."""
        self._failing.pop((node_id, epoch), None)

    def failed(self, node_id: str, epoch: str, probe: Probe | None = None) -> None:
        """Records that the node can't be reached.

        While the circuit is not closed, only the probe's failure counts, because other requests were sent before it
        opened.
        """
        breaker = self._failing.setdefault((node_id, epoch), _Breaker())
        was_open = breaker.failures >= THRESHOLD
        if was_open and (probe is None or probe is not breaker.probe):
            return
        breaker.failures += 1
        if breaker.failures < THRESHOLD:
            return
        breaker.probe = None
        breaker.pause = min(2 * breaker.pause, MAX_PAUSE_S)
        breaker.until = self._clock() + breaker.pause
        if not was_open:
            self._opened(node_id)

    def undecided(self, node_id: str, epoch: str, probe: Probe | None) -> None:
        """Releases the probe without a result, so that another request may try.

        The probe's request waits in the node's queue, or it ended for a reason that says nothing about the node.
        """
        breaker = self._failing.get((node_id, epoch))
        if breaker is not None and breaker.probe is probe:
            breaker.probe = None
