"""Places an invocation's generations: adds what was learnt of its function, and remembers why it was placed so."""

from __future__ import annotations

import time

import msgspec

from cluster.errors import ServiceError
from cluster.messages import GenerateRequest
from cluster.state import ClusterState
from gateway.calls.explanations import Explanations, PlacedCall, Placement
from gateway.scheduling.decision import Outcome
from gateway.scheduling.lengths import ResponseLengths
from gateway.scheduling.placement import Placed, Trace, able, place
from gateway.scheduling.policy import Policy, make_policy
from gateway.scheduling.request import PlacementRequest
from gateway.scheduling.work import work
from gateway.workers.metrics import Metrics

LEAST_TTFT = 1e-3
"""Seconds: what is left of a promise that has passed already."""


class Placer:
    """`policy`: a name of gateway.scheduling.policy. Raises UnknownPolicy."""

    def __init__(self, state: ClusterState, policy: str, base: str, metrics: Metrics) -> None:
        self._state = state
        self._name = policy
        self.policy: Policy = make_policy(policy)
        self._base = base
        self._metrics = metrics
        self.explanations = Explanations()
        self.lengths = ResponseLengths()

    async def place(
        self,
        call: PlacedCall,
        request: GenerateRequest,
        received: float,
        excluded: frozenset[str],
        *,
        displaces: bool = False,
    ) -> Placed:
        """`received`: monotonic seconds; the promise of the first token counts from there. `displaces`: it may take
        another's place in a full queue. Raises ServiceError."""
        began, at, trace = time.monotonic(), time.time(), Trace()
        ttft = ttft_left(request, received)
        wanted = msgspec.structs.replace(self._wanted(call, request), ttft=ttft, displaces=displaces)
        outcome: Outcome = "placed"
        node: str | None = None
        try:
            placed = await place(self._state, self.policy, self._base, wanted, excluded, trace)
            node = placed.node_id
            return placed
        except ServiceError as error:
            outcome = "unavailable" if error.type == "unavailable" else "overloaded"
            raise
        finally:
            took = time.monotonic() - began
            self._metrics.observe_schedule(took)
            kept = Placement(
                wanted, outcome, node, self._name, at, took, trace.tries, tuple(sorted(excluded)), trace.picture
            )
            self.explanations.keep(call, kept)

    async def refused_work(self, call: PlacedCall, request: GenerateRequest) -> float | None:
        """Returns the seconds of work that a request which no node takes would be to a node that could serve it; None
        when there is no such node, or its costs were never measured."""
        wanted, nodes = self._wanted(call, request), await self._state.table()
        rows = able(nodes, self._base, wanted, frozenset())
        return work(nodes, int(rows[0]), wanted) if rows.size else None

    def _wanted(self, call: PlacedCall, request: GenerateRequest) -> PlacementRequest:
        adapter, lengths = request.adapter, self.lengths
        generated = len(request.generated)  # by a node before; they are computed as part of the prompt
        max_tokens = max(1, request.max_tokens - generated)
        expected = lengths.expected(call.tenant, call.function, max_tokens)
        return PlacementRequest(
            id=request.id,
            prompt_tokens=len(request.token_ids) + generated,
            max_tokens=max_tokens,
            digest=adapter.digest if adapter else None,
            adapter_bytes=adapter.bytes if adapter else 0,
            adapter_itemsize=adapter.itemsize if adapter else 0,
            rank=max(adapter.ranks, default=0) if adapter else 0,
            expected_tokens=expected,
            expected_inverse=lengths.inverse(expected),
            typical_tokens=lengths.typical(),
            tpot=request.tpot,
            slo_class=request.slo_class,
        )


def ttft_left(request: GenerateRequest, received: float) -> float | None:
    """Returns the seconds that are left now of the promised time to the first token, at least LEAST_TTFT; None when
    none was promised. `received`: monotonic seconds."""
    return None if request.ttft is None else max(request.ttft - (time.monotonic() - received), LEAST_TTFT)
