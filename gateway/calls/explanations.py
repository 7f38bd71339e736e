"""Bounded log of the latest routing decisions, shared fairly by tenants, for `/explain`."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from gateway.scheduling.decision import Decision, Outcome, Snapshot
from gateway.scheduling.request import RoutingRequest

MAX_RECORDS = 4096
MAX_OF_CALL = 16
"""Maximum decisions kept for one call. A call may have many choices, and each may be routed twice."""
OF_RECORD = ("outcome", "node", "policy", "at", "took", "tries")
OF_DEMAND = ("prompt_tokens", "max_tokens", "rank", "slo_class", "tpot")
OF_REQUEST = ("adapter_bytes", "ttft")
"""Names of the fields that a Decision copies from a RoutingRecord, from the request's demand, and from the request."""


class RoutingRecord(msgspec.Struct, frozen=True):
    """Routing decision, as this log stores it."""

    request: RoutingRequest
    outcome: Outcome
    node: str | None
    policy: str
    at: float
    took: float
    tries: int
    excluded: tuple[str, ...]
    snapshot: Snapshot | None

    def decision(self) -> Decision:
        request = self.request
        return Decision(
            **{name: getattr(self, name) for name in OF_RECORD},
            **{name: getattr(request.demand, name) for name in OF_DEMAND},
            **{name: getattr(request, name) for name in OF_REQUEST},
            excluded=list(self.excluded),
            expected_tokens=request.answer_tokens,
            expected_inverse=request.inverse_tokens,
            candidates=self.snapshot.candidates(request) if self.snapshot else [],
            more=self.snapshot.more if self.snapshot else 0,
        )


class CallKey(msgspec.Struct, frozen=True):
    """Identifies the call that was routed."""

    id: str
    request_id: str
    tenant: str
    function: str


class Explained(msgspec.Struct):
    call: CallKey
    records: list[RoutingRecord] = []
    left_out: int = 0

    def reply(self) -> ExplainReply:
        return ExplainReply(
            **msgspec.structs.asdict(self.call),
            decisions=[ExplainedDecision(record.request.id, record.decision()) for record in self.records],
            left_out=self.left_out,
        )


class ExplainReply(msgspec.Struct, frozen=True):
    """Routing decisions of the generations of one call."""

    id: str
    request_id: str
    tenant: str
    function: str
    decisions: list[ExplainedDecision]
    """Decisions in the order in which they were made: one for each choice, and one for each retry after a node
    failed."""
    left_out: int


class ExplainedDecision(msgspec.Struct, frozen=True):
    request: str
    decision: Decision


class _Tenant:
    def __init__(self) -> None:
        self.calls: OrderedDict[str, None] = OrderedDict()
        self.records = 0


class Explanations:
    """Routing decisions of this process.

    If the log is full, a tenant with more than an equal share of it loses its own oldest call. So no tenant displaces
    the decisions of others.
    """

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._records = 0
        self._calls: OrderedDict[str, Explained] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self._latest_by_request: dict[tuple[str | None, str], str] = {}
        """Id of the latest call by (tenant, request id), and by (None, request id) for all tenants."""

    def keep(self, call: CallKey, record: RoutingRecord) -> None:
        explained = self._calls.get(call.id) or self._add(call)
        if len(explained.records) == MAX_OF_CALL:
            explained.left_out += 1
            return
        explained.records.append(record)
        self._records += 1
        self._tenants[call.tenant].records += 1
        while self._records > self._max_records:
            self._drop(call.tenant)

    def find(self, id: str, tenant: str | None) -> Explained | None:
        """Returns the decisions of a call; None if the call is unknown.

        `id`: id of an invocation, a generation or a request; a request's id means its latest call. `tenant`: owner of
        the call; None means any tenant.
        """
        for name in (id, id.rpartition("-")[0], self._latest_by_request.get((tenant, id))):
            explained = self._calls.get(name) if name else None
            if explained is not None and tenant in (None, explained.call.tenant):
                return explained
        return None

    def _add(self, call: CallKey) -> Explained:
        self._tenants.setdefault(call.tenant, _Tenant()).calls[call.id] = None
        for tenant in (call.tenant, None):
            self._latest_by_request[tenant, call.request_id] = call.id
        self._calls[call.id] = Explained(call)
        return self._calls[call.id]

    def _drop(self, adding: str) -> None:
        """Drops the oldest call of the tenant `adding` if this tenant has more than its share, else the oldest call of
        all tenants."""
        share = max(MAX_OF_CALL, self._max_records // len(self._tenants))
        adding_tenant = self._tenants.get(adding)
        oldest = next(
            iter(self._calls if adding_tenant is None or adding_tenant.records <= share else adding_tenant.calls)
        )
        dropped = self._calls.pop(oldest)
        call, theirs = dropped.call, self._tenants[dropped.call.tenant]
        del theirs.calls[oldest]
        theirs.records -= len(dropped.records)
        self._records -= len(dropped.records)
        if not theirs.calls:
            del self._tenants[call.tenant]
        for tenant in (call.tenant, None):
            if self._latest_by_request.get((tenant, call.request_id)) == oldest:
                del self._latest_by_request[tenant, call.request_id]
