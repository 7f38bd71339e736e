"""Decides how many CPU LoRA workers a node starts by default.

The decision uses the measured cost of a load, and cold calls measured with and without workers. It does not depend on
whether the link is simulated or the device is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from adapters.base_model import BaseModel
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.cold_starts import MODES, WorkersDecision
from node_agent.coldstart.costs import pipelined_costs, result_bytes
from node_agent.coldstart.pass_times import ROUNDS, CallKind, PassSample, PassTimes, median_spread
from node_agent.coldstart.planner import choose
from node_agent.coldstart.profile import Profile
from node_agent.config import EngineConfig
from node_agent.types import GROUPS

TYPICAL = CallKind(GROUPS["qkv"], 64, 64)
"""Kind of call by which workers are judged: a large adapter and a short prompt, which hides little of the adapter's
load."""
SHORT_PROMPT = CallKind(GROUPS["qkv"], 64, 16)
"""Second kind of call by which workers are judged: a prompt of 16 tokens. The workers' results for it have a quarter of
the bytes that they have for TYPICAL."""
JUDGED = (TYPICAL, SHORT_PROMPT)
PLANS = ("pipeline", "assist")
MIN_GAIN = 0.1
"""Minimum share, 0 to 1, by which workers must shorten the time to first token. Also the minimum wait for a load, as a
share of a warm prefill, at which workers are measured at all."""
SAME_ANSWER = 1.02
"""Minimum factor between two medians of answer times that differ, besides the widths of their confidence intervals."""
MAX_WORKERS = 16
"""Maximum number of workers; a handoff has no work for more."""


def refusal(config: EngineConfig) -> str:
    """Returns the reason why this node's settings rule out CPU workers; empty if they do not."""
    if "assist" not in MODES[config.cold_start].plans:
        return f"cold_start: {config.cold_start} has no use for them"
    if config.host_nodes > 1:
        return f"{config.host_nodes} nodes share this host's cores"
    return ""


def judge_link(config: EngineConfig, store: AdapterStore, base: BaseModel, profile: Profile) -> WorkersDecision:
    """Returns the decision by the cost of the link alone: MAX_WORKERS, or 0 if workers can't help.

    They can't help if the prefill hides the load of a TYPICAL call even while `max_cold` loads share the link. Nor can
    they if their results have as many bytes as the weights.
    """
    layout = store.pool.uniform_layout(base, TYPICAL.rank, TYPICAL.projections)
    warm, alone = exposed_seconds(store, base, profile, loads=1)
    _, together = exposed_seconds(store, base, profile, loads=config.max_cold)
    figures = (("warm", warm * 1e3), ("exposed", alone * 1e3), ("exposed_shared", together * 1e3))
    what = f"{TYPICAL}: without workers the first token waits {alone * 1e3:.1f} ms for the load "
    what += f"({together * 1e3:.1f} ms with {config.max_cold} loads at once) beyond a prefill of {warm * 1e3:.1f} ms"
    results = result_bytes(layout, base, TYPICAL.tokens * store.pool.data.element_size())
    if (results >= layout.moved).all():
        return WorkersDecision(0, f"the workers' results have as many bytes as the weights; {what}", figures)
    if together < MIN_GAIN * warm:
        return WorkersDecision(0, f"little to gain; {what}", figures)
    return WorkersDecision(MAX_WORKERS, what, figures)


def exposed_seconds(store: AdapterStore, base: BaseModel, profile: Profile, loads: int) -> tuple[float, float]:
    """Returns two times of a TYPICAL call, in seconds, while `loads` loads share the link. The first is its warm
    prefill, the second the delay of its first token by pipelined loading."""
    layout = store.pool.uniform_layout(base, TYPICAL.rank, TYPICAL.projections)
    costs = pipelined_costs(profile, layout, TYPICAL.tokens, loads)
    return costs.device * base.num_layers, choose(costs, ("wait", "pipeline")).exposed


def is_judged(times: PassTimes) -> bool:
    """Returns whether all kinds of calls by which workers are judged were measured, answers included. Later calls of
    users may have displaced the measured ones."""
    return all(len(times.answers(kind, plan)) >= ROUNDS for kind in JUDGED for plan in PLANS)


def judge_calls(times: PassTimes, count: int, link: WorkersDecision) -> WorkersDecision:
    """Returns a decision for `count` workers if measured calls gain by them, else for none. `link`: the decision by the
    link alone.

    Calls gain if, for at least one of the judged kinds, alone or concurrently, first tokens come sooner by MIN_GAIN and
    answers do not end later.
    """
    alone = [_Comparison.of(kind, {plan: times.answers(kind, plan) for plan in PLANS}) for kind in JUDGED]
    burst = [_Comparison.of(kind, {plan: times.burst(kind, plan) for plan in PLANS}) for kind in JUDGED]
    comparisons = [comparison for comparison in alone + burst if comparison is not None]
    if not comparisons:
        return WorkersDecision(0, f"no call could be measured with them; {link.reason}", link.figures)
    gains = any(comparison.gains for comparison in comparisons)
    measured = "; ".join(comparison.shown(count) for comparison in comparisons)
    reason = f"{'they gain' if gains else 'they gain too little'}; measured {measured}; {link.reason}"
    figures = tuple(figure for comparison in comparisons for figure in comparison.figures)
    return WorkersDecision(count if gains else 0, reason, (*link.figures, *figures))


@dataclass(frozen=True)
class _Comparison:
    """Measured calls of one kind without and with workers; medians in milliseconds."""

    kind: CallKind
    calls: int
    first: dict[str, float]
    answer: dict[str, float]
    answer_spread: float
    """sum of the half widths of both answers' confidence intervals, as a share of the median"""

    @classmethod
    def of(cls, kind: CallKind, samples: dict[str, list[PassSample]]) -> _Comparison | None:
        """Returns the comparison of a kind's samples, given by plan; None if a plan has no samples."""
        if not all(samples.values()):
            return None
        first = {plan: 1e3 * median(s.first for s in each) for plan, each in samples.items()}
        answer = {plan: 1e3 * median(s.answer for s in each) for plan, each in samples.items()}
        spread = sum(median_spread([s.answer for s in each]) for each in samples.values())
        return cls(kind, next(iter(samples.values()))[0].calls, first, answer, spread)

    @property
    def gains(self) -> bool:
        """Returns whether workers bring first tokens sooner by MIN_GAIN, without later ends of the answers.

        Answers end later only if they do so beyond the confidence intervals of their medians, or by MIN_GAIN. Otherwise
        the noise of a dozen decode steps would decide.
        """
        sooner = self.first["assist"] <= (1 - MIN_GAIN) * self.first["pipeline"]
        same = max(SAME_ANSWER, 1 + min(MIN_GAIN, self.answer_spread))
        return sooner and self.answer["assist"] <= same * self.answer["pipeline"]

    def shown(self, count: int) -> str:
        first, answer = self.first, self.answer
        what = "one call" if self.calls == 1 else f"{self.calls} calls at once"
        text = f"{self.kind}, {what}: first token {first['assist']:.1f} ms with {count} workers, "
        text += f"{first['pipeline']:.1f} ms without; 12-token answer {answer['assist']:.1f} ms and "
        return text + f"{answer['pipeline']:.1f} ms"

    @property
    def figures(self) -> list[tuple[str, float]]:
        tail = ("_short" if self.kind == SHORT_PROMPT else "") + ("" if self.calls == 1 else "_burst")
        return [
            (f"{name}_{plan}{tail}", of[plan])
            for name, of in (("first_token", self.first), ("answer", self.answer))
            for plan in PLANS
        ]


def candidate_counts(max_count: int) -> list[int]:
    """Returns the numbers of workers to try: powers of two below `max_count`, and `max_count`."""
    return (
        sorted({1 << i for i in range(max_count.bit_length()) if 1 << i < max_count} | {max_count}) if max_count else []
    )
