"""The plan `wait`: a cold pass stands still until its whole adapter is on the device. Other passes go on."""

from __future__ import annotations

import time

from node_agent.adapter_memory.store import AdapterStore
from node_agent.types import Lease, Plan


class WaitForAll:
    """A ColdStart (docs/seams.md) with one plan."""

    def __init__(self, store: AdapterStore, num_layers: int) -> None:
        self._store, self._num_layers = store, num_layers

    def plan(self, lease: Lease, n_tokens: int) -> Plan:  # noqa: ARG002 - the seam's signature
        return Plan("wait", begun=time.monotonic())

    def ready_until(self, lease: Lease) -> int:
        """Layers that a pass which reads this lease may be advanced to."""
        return self._num_layers if self._store.loaded(lease) else 0

    def observe(self, plan: Plan) -> None:
        """The adapter is there: what was waited until now was exposed."""
        plan.exposed = time.monotonic() - plan.begun
