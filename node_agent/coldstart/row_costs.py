"""Costs of decode rows whose adapters are still loading, and the choice of those that join a decode step.

Unless a docstring says otherwise, arrays are f64[N layers, projection groups] with seconds of one worker.
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
"""Maximum adapters that join one step while they are loading."""


class RowCosts:
    """Costs of decode rows, and of LoRA terms that workers compute for chunks, by a node's profile."""

    def __init__(self, profile: Profile, base: BaseModel) -> None:
        self.profile, self.base = profile, base

    def step(self, rows: int) -> float:
        """Returns the seconds of a step of `rows` rows with all adapters on the device."""
        return self.base.num_layers * self.profile.layer_seconds(rows)

    def base_seconds(self, rows: int) -> np.ndarray:
        """Returns f64[groups]: seconds of the base's products per layer for `rows` rows or tokens."""
        shares = group_shares(self.base)
        return self.profile.layer_seconds(rows) * np.array([shares[name] for name in NAMES])

    def work(self, layout: AdapterLayout, rows: int) -> np.ndarray:
        """Returns the workers' seconds for the LoRA terms of `rows` rows."""
        return self._by_group(layout, lambda _, elements: self.profile.cpu_seconds(rows, elements))

    def slices(self, layout: AdapterLayout, tokens: int, workers: int) -> np.ndarray:
        """Returns the seconds of one of `workers` workers for its slice of a chunk of `tokens` tokens. If they
        split the weights, returns the seconds for its share of them."""
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
        """Returns the seconds for inputs and results to cross between the device and the workers. The link is also used
        by `sharing` loads. `row_bytes`: bytes of one element times the number of rows."""

        def crossing(group: str, _: int) -> float:
            handed, answered = group_widths(self.base, group)
            return self.profile.crossing_seconds(row_bytes * handed, row_bytes * answered, sharing)

        return self._by_group(layout, crossing)

    def _by_group(self, layout: AdapterLayout, seconds: Callable[[str, int], float]) -> np.ndarray:
        """Returns f64[N, groups] of `seconds`, a function of a group's name and its number of elements."""
        by_layer = np.zeros((self.base.num_layers, len(NAMES)))
        by_ranks: dict[bytes, np.ndarray] = {}
        for layer in range(self.base.num_layers):
            key = layout.rank[layer].tobytes()  # layers with equal ranks cost the same
            if key not in by_ranks:
                elements = group_elements(layout, layer, self.base)
                by_ranks[key] = np.array([seconds(name, elements[name]) if name in elements else 0.0 for name in NAMES])
            by_layer[layer] = by_ranks[key]
        return by_layer


@dataclass(frozen=True)
class RowPart:
    """Costs that rows of one adapter add to a step; times in seconds."""

    rows: int
    work: np.ndarray
    """f64[N layers, groups]: workers' seconds for the layers that they would compute"""
    crossing: float
    arriving: float
    """seconds until the layers have arrived whose copy is already enqueued and for which the step would wait"""
    load_left: float
    """seconds until the adapter's whole load ends"""
    results: float = 0.0
    """seconds by which the workers' results for one step delay the load"""


class JoinedStep:
    """Decode step that rows of several loading adapters join, one adapter after another."""

    def __init__(self, costs: RowCosts, workers: int, other_requests: int) -> None:
        """`workers`: number of workers available; `other_requests`: number of requests that wait for the end of the
        step."""
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
        """Adds the rows to the step if all requests together gain by it. Returns whether they were added."""
        step = self.costs(part)
        if not joins(step):
            return False
        self._work, self._longer = self._work + part.work, self._longer + step.longer
        self._parts, self.other_requests = self._parts + 1, self.other_requests + part.rows
        return True

    def _lengthens(self, work: np.ndarray, parts: int, rows: int) -> float:
        """Returns the seconds that the step waits for workers, which compute the rows of one adapter after another
        during one base product."""
        each = work / max(1, min(self._workers, parts))
        return float((each - self._costs.base_seconds(rows)).clip(0.0).sum())
