"""Plans which adapters each node must have ready.

Provisioned copies come first, then adapters that operators and tenants ordered or scheduled, then adapters for forecast
calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from cluster.messages import Adapter
from cluster.news import NodeRecord
from cluster.node_table import ABSENT, HOST, NodeTable
from cluster.residency import MAX_WANTED, WantedAdapter
from gateway.residency.messages import Cause, LeftOut, Tier
from gateway.scheduling.home_nodes import HomeNodes

DEVICE_CHANCE = 0.5
"""Minimum probability of a call within 30 s at which a forecast adapter is loaded onto the device, and not only into
host memory."""
WANTED_SHARE = 0.75
"""Share of each tier of a node's adapter memory that planned adapters may take. The rest is for calls that were not
foreseen.

Tuned, like DEVICE_CHANCE, on one half of the traces of benchmarks/adapter_memory/prefetch.py.
"""
PROVISIONED_SHARE = 0.5
"""Share of each tier of a node's adapter memory for provisioned copies. Adapters that calls load can't evict these."""
TENANT_PROVISIONED_SHARE = 0.5
"""Share of the memory for provisioned copies that one tenant may use."""
TENANT_SHARE = 0.125
"""Share of each tier of a node's adapter memory that one tenant's orders and schedules may take."""
TENANT_WANTED = 16
"""Maximum adapters on one node for one tenant's orders and schedules."""
MAX_LEFT_OUT = 1000
MAX_NODES_KEPT = 4
WHERE: Mapping[Tier, str] = {"device": "the device", "host": "host memory"}
"""Names of the tiers in the reasons of targets that are left out."""
STEPS = 20
"""Number of steps into which probabilities from 0 to 1 are divided in orders. Rounded probabilities avoid new orders
after small changes."""


@dataclass(frozen=True)
class PrewarmTarget:
    """Adapter to have ready on some nodes."""

    key: str
    adapter: Adapter
    cause: Cause
    chance: float
    tier: Tier = "device"
    copies: int = 1
    node: str | None = None
    """Id of the node that must have the adapter; None if its home nodes must."""


@dataclass
class PlannedAdapter:
    """Adapter that a node is ordered to have ready."""

    adapter: Adapter
    tier: Tier
    chance: float
    causes: dict[str, Cause] = field(default_factory=dict)
    provisioned: Tier | None = None
    """Fastest tier in which a function's policy provisions the adapter; None if no policy does."""

    @property
    def pinned(self) -> bool:
        return any(cause != "forecast" for cause in self.causes.values())

    @property
    def steps(self) -> int:
        """Returns the probability of a call in units of 1 / STEPS, rounded to a whole number. Orders contain this
        rounded probability."""
        return round(self.chance * STEPS)

    def message(self) -> WantedAdapter:
        return WantedAdapter(self.adapter, self.tier, self.steps / STEPS, self.pinned, self.provisioned)


@dataclass(frozen=True)
class NodeMemory:
    """Adapter memory of a node, for planning."""

    bytes: Mapping[Tier, float]
    """Bytes by tier; infinite if the node does not report them."""
    itemsize: int = 0
    takes_wants: bool = True
    rank_limit: int = 0
    """Largest rank of an adapter that the node takes; 0: any."""

    def taken_by(self, adapter: Adapter) -> float:
        """Returns the adapter's size on the node in bytes."""
        return float(adapter.bytes_in(self.itemsize))

    def why_never(self, adapter: Adapter, tier: Tier) -> str | None:
        """Returns the reason why a tenant's order or schedule can never load the adapter on this node; None if it
        can."""
        if not self.takes_wants:
            return "prefetch is off on this node"
        if self.rank_limit and adapter.max_rank > self.rank_limit:
            return f"its rank {adapter.max_rank} is above {self.rank_limit}, the largest that this node takes"
        size, limit = self.taken_by(adapter), TENANT_SHARE * self.bytes[tier]
        if size > limit:
            return (
                f"it takes {size:.0f} bytes, and a tenant's orders and schedules get {limit:.0f} of {WHERE[tier]} there"
            )
        return None


def node_memory(node: NodeRecord) -> NodeMemory:
    bytes: dict[Tier, float] = {"device": node.adapter_bytes or inf, "host": node.host_bytes or inf}
    return NodeMemory(bytes, node.adapter_itemsize, node.takes_wants, node.rank_limit)


@dataclass
class NodeWants:
    """Planned adapters of a node, and the adapter memory that they leave free."""

    memory: NodeMemory
    wants: dict[str, PlannedAdapter] = field(default_factory=dict)
    tenants: dict[str, dict[str, tuple[Tier, float]]] = field(default_factory=dict)
    """Adapters of each tenant's orders and schedules, by tenant and digest. Values are the tier and the bytes taken
    there."""
    room: dict[Tier, float] = field(init=False)
    kept_room: dict[Tier, float] = field(init=False)

    def __post_init__(self) -> None:
        self.room = {tier: WANTED_SHARE * size for tier, size in self.memory.bytes.items()}
        self.kept_room = {tier: PROVISIONED_SHARE * size for tier, size in self.memory.bytes.items()}

    def keep(self, wish: PrewarmTarget) -> bool:
        """Plans a provisioned copy, and returns True. Returns False if it does not fit. Copies for devices must be
        planned first."""
        size, digest, tier = self.memory.taken_by(wish.adapter), wish.adapter.digest, wish.tier
        want = self.wants.get(digest)
        if want is None:
            if len(self.wants) >= MAX_WANTED or size > min(self.kept_room[tier], self.room[tier]):
                return False
            self.kept_room[tier] -= size
            self.room[tier] -= size
            # for a copy in host memory, the probability says whether it is wanted on the device as well
            want = self.wants[digest] = PlannedAdapter(wish.adapter, tier, float(tier == "device"), provisioned=tier)
        want.causes.setdefault(wish.key, wish.cause)
        return True

    def take(self, wish: PrewarmTarget, tier: Tier) -> str | None:
        """Plans a target in this tier. Returns the reason if the target is left out; None if it is planned.

        A forecast for which the device has no room goes to host memory.
        """
        size, digest = self.memory.taken_by(wish.adapter), wish.adapter.digest
        want = self.wants.get(digest)
        if want is None and wish.cause == "forecast" and size > self.room[tier]:
            tier = "host"
        if wish.cause != "forecast" and (never := self.memory.why_never(wish.adapter, tier)) is not None:
            return never
        if want is None and (len(self.wants) >= MAX_WANTED or size > self.room[tier]):
            return "other adapters that are wanted there take all that it may be asked for"
        if wish.cause != "forecast" and (beyond := self._beyond(wish, tier, size)) is not None:
            return beyond
        if want is None:
            self.room[tier] -= size
            want = self.wants[digest] = PlannedAdapter(wish.adapter, tier, 0.0)
        elif (want.tier, tier) == ("host", "device") and size <= self.room[tier]:
            self.room["host"] += 0.0 if want.provisioned else size  # a provisioned copy also stays in host memory
            self.room[tier] -= size
            want.tier = tier
        want.chance = 1.0 - (1.0 - want.chance) * (1.0 - wish.chance)
        want.causes.setdefault(wish.key, wish.cause)
        return None

    def _beyond(self, wish: PrewarmTarget, tier: Tier, size: float) -> str | None:
        """Returns a text that says which of the tenant's limits the target exceeds. If it exceeds none, records its
        `size` in bytes and returns None."""
        tenant_bytes, digest = self.tenants.setdefault(wish.key.partition("/")[0], {}), wish.adapter.digest
        if digest in tenant_bytes:
            return None
        if len(tenant_bytes) >= TENANT_WANTED:
            return f"a tenant's orders and schedules may name {TENANT_WANTED} adapters there"
        limit = TENANT_SHARE * self.memory.bytes[tier]
        if sum(bytes for where, bytes in tenant_bytes.values() if where == tier) + size > limit:
            return f"a tenant's orders and schedules may take {limit:.0f} bytes of {WHERE[tier]} there"
        tenant_bytes[digest] = tier, size
        return None


class Plan:
    """Plan for all nodes that serve a base model. Targets must be added in order of importance."""

    def __init__(self, nodes: NodeTable, base: str) -> None:
        self._table, self._homes = nodes, HomeNodes(nodes, base)
        self._records = {row: nodes.record(row) for row in self._homes.rows}
        self._planned_by_row: dict[int, NodeWants] = {}
        self._copies: dict[tuple[str, str], set[int]] = {}
        """Rows of the nodes with a provisioned copy, by function and digest."""
        self.left_out: dict[str, list[LeftOut]] = {}

    def add(self, wish: PrewarmTarget) -> None:
        if wish.cause == "provisioned":
            self._provision(wish)
            return
        rows = self._rows(wish)
        if not rows and self._homes.rows and wish.node is None and wish.cause != "forecast":
            self._leave_out(wish, "", f"no node takes its rank {wish.adapter.max_rank}")
        for row in rows:
            if not self._records[row].takes_wants and wish.cause == "forecast":
                continue
            why = self._of(row).take(wish, self._tier(wish, row))
            if why is not None and wish.cause != "forecast":
                self._leave_out(wish, self._records[row].id, why)

    @property
    def nodes(self) -> list[NodeRecord]:
        """Returns the records of the nodes that serve the base model."""
        return list(self._records.values())

    def wants(self) -> dict[str, Sequence[PlannedAdapter]]:
        """Returns the planned adapters of each serving node, by node id.

        Provisioned copies come in the order in which they were added, those on devices first. Other pinned adapters
        follow, then the rest, both by their rounded probability. So the list stays equal as long as its content does.
        """
        by_node: dict[str, Sequence[PlannedAdapter]] = {}
        for row, record in self._records.items():
            wants = self._planned_by_row[row].wants.values() if row in self._planned_by_row else ()
            by_node[record.id] = sorted(wants, key=_urgency)
        return by_node

    def _provision(self, wish: PrewarmTarget) -> None:
        """Plans each provisioned copy on a different node. The adapter's first home nodes that have room are used."""
        copies, digest = self._copies.setdefault((wish.key, wish.adapter.digest), set()), wish.adapter.digest
        target = len(copies) + wish.copies
        for row in self._homes.of(digest, len(self._homes), wish.adapter.max_rank):
            if len(copies) >= target:
                return
            if row not in copies and self._of(row).keep(wish):
                copies.add(row)
        if len(copies) < target:
            why = f"{target - len(copies)} of the {wish.tier} copies find no node with room for them"
            self._leave_out(wish, "", why)

    def _leave_out(self, wish: PrewarmTarget, node: str, why: str) -> None:
        if len(self.left_out) < MAX_LEFT_OUT:
            entry = LeftOut(node, wish.adapter.digest, wish.tier, wish.cause, why)
            self.left_out.setdefault(wish.key, []).append(entry)

    def _rows(self, wish: PrewarmTarget) -> Sequence[int]:
        if wish.node is not None:
            row = self._table.row(wish.node)
            return [row] if row is not None and row in self._records else []
        digest, rank = wish.adapter.digest, wish.adapter.max_rank
        if wish.cause != "forecast":
            return self._homes.of(digest, wish.copies, rank)
        tiers = self._table.tiers(digest)
        homes = self._homes.of(digest, MAX_NODES_KEPT, rank)
        return [row for row in homes if tiers.get(row, ABSENT) <= HOST] or homes[:1]

    def _tier(self, wish: PrewarmTarget, row: int) -> Tier:
        if wish.cause != "forecast":
            return wish.tier
        near = self._table.tiers(wish.adapter.digest).get(row, ABSENT) <= HOST
        return "device" if near or wish.chance >= DEVICE_CHANCE else "host"

    def _of(self, row: int) -> NodeWants:
        if row not in self._planned_by_row:
            self._planned_by_row[row] = NodeWants(node_memory(self._records[row]))
        return self._planned_by_row[row]


def _urgency(want: PlannedAdapter) -> tuple[int, int, str]:
    """Returns the sort key of a planned adapter, the most important first."""
    if want.provisioned is not None:
        return (0 if want.provisioned == "device" else 1), 0, ""
    return (2 if want.pinned else 3), -want.steps, want.adapter.digest
