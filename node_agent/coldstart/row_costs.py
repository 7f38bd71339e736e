"""Costs of decode rows whose adapters are on their way for a step that they join, and the choice of those that join.

Arrays are f64[N, groups]: seconds of one worker, by layer and projection group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.coldstart.costs import group_elements, group_shares, group_widths
from node_agent.coldstart.planner import StepCosts, joins
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.slices import Segment, slices_wanted, weight_shares
from node_agent.types import GROUPS

NAMES = tuple(GROUPS)
MAX_JOINED = 4
"""Adapters that join one step while they are on their way."""


class RowCosts:
    """Costs of decode rows, and of the workers' part of chunks, by a node's profile."""

    def __init__(self, profile: Profile, base: BaseModel) -> None:
        self.profile, self.base = profile, base

    def step(self, rows: int) -> float:
        """Returns the seconds of a step of `rows` rows, all of whose adapters are on the device."""
        return self.base.num_layers * self.profile.layer_seconds(rows)

    def base_seconds(self, rows: int) -> np.ndarray:
        """Returns f64[groups]: seconds of the base's products in each layer of a step, or a chunk, of `rows` rows."""
        shares = group_shares(self.base)
        return self.profile.layer_seconds(rows) * np.array([shares[name] for name in NAMES])

    def work(self, layout: AdapterLayout, rows: int) -> np.ndarray:
        """Returns the workers' seconds for the adapter's part of `rows` rows."""
        return self._by_group(layout, lambda _, elements: self.profile.cpu_seconds(rows, elements))

    def slices(self, layout: AdapterLayout, tokens: int, workers: int) -> np.ndarray:
        """Returns the seconds that one of `workers` workers takes for its slice of a chunk of `tokens` tokens. Where
        they split the weights, it is the time for its share of them."""
        budgets = dict(zip(NAMES, self.base_seconds(tokens).tolist(), strict=True))

        def of_slice(group: str, elements: int) -> float:
            segment = Segment(0, tokens, self.profile.slice_tokens(elements, budgets[group]), elements)
            shares = weight_shares([segment], workers)
            if shares:
                return self.profile.cpu_seconds(tokens, -(-elements // shares))
            slices = max(1, min(slices_wanted([segment]), workers))
            return self.profile.cpu_seconds(-(-tokens // slices), elements)

        return self._by_group(layout, of_slice)

    def crossings(self, layout: AdapterLayout, row_bytes: int, sharing: int = 0) -> np.ndarray:
        """Returns the seconds in which inputs and results cross between a device and the workers, on a link that
        `sharing` loads use too; `row_bytes`: of one element of each of the rows."""

        def crossing(group: str, _: int) -> float:
            handed, answered = group_widths(self.base, group)
            return self.profile.crossing_seconds(row_bytes * handed, row_bytes * answered, sharing)

        return self._by_group(layout, crossing)

    def _by_group(self, layout: AdapterLayout, seconds: Callable[[str, int], float]) -> np.ndarray:
        """`seconds` gives those of a group by its number of elements."""
        by_layer = np.zeros((self.base.num_layers, len(NAMES)))
        by_ranks: dict[bytes, np.ndarray] = {}
        for layer in range(self.base.num_layers):
            key = layout.rank[layer].tobytes()  # layers of equal ranks cost the same
            if key not in by_ranks:
                elements = group_elements(layout, layer, self.base)
                by_ranks[key] = np.array([seconds(name, elements[name]) if name in elements else 0.0 for name in NAMES])
            by_layer[layer] = by_ranks[key]
        return by_layer


@dataclass(frozen=True)
class RowPart:
    """Costs that rows of one adapter add to a step."""

    rows: int
    work: np.ndarray
    """seconds of the layers that the workers would compute"""
    crossing: float
    arriving: float
    """seconds of the load of layers that the step would wait for"""
    load_left: float
    """seconds of the whole load"""
    results: float = 0.0
    """seconds by which the results of one step delay the load"""


class JoinedStep:
    """A decode step, as rows of one adapter after another join it."""

    def __init__(self, costs: RowCosts, workers: int, other_requests: int) -> None:
        """`workers`: number that could take a part; `other_requests`: number that wait for the step's end."""
        self._costs, self._workers, self.other_requests = costs, workers, other_requests
        self._work = np.zeros((costs.base.num_layers, len(NAMES)))
        self._longer = 0.0
        self._parts = 0

    @property
    def full(self) -> bool:
        return self._parts == MAX_JOINED

    def costs(self, part: RowPart) -> StepCosts:
        rows = part.rows + self.other_requests
        device = self._costs.step(rows)
        longer = self._lengthens(self._work + part.work, self._parts + 1, rows)
        longer += part.crossing + max(0.0, part.arriving - device) - self._lengthens(self._work, self._parts, rows)
        return StepCosts(device, longer, self._longer, part.load_left, part.rows, self.other_requests, part.results)

    def join(self, part: RowPart) -> bool:
        """Lets the rows join, or returns False where they had better sit the step out."""
        step = self.costs(part)
        if not joins(step):
            return False
        self._work, self._longer = self._work + part.work, self._longer + step.longer
        self._parts, self.other_requests = self._parts + 1, self.other_requests + part.rows
        return True

    def _lengthens(self, work: np.ndarray, parts: int, rows: int) -> float:
        """Returns by how much the step waits for workers, who compute adapter after adapter during one base product."""
        each = work / max(1, min(self._workers, parts))
        return float((each - self._costs.base_seconds(rows)).clip(0.0).sum())
