"""The contracts between engine, runner, adapter memory and cold start (docs/design/seams.md).

Shapes: T tokens, R rows (sequences), Q rows whose logits are wanted, S segments (maximal runs of tokens of one
adapter).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from node_agent.device import Event
from node_agent.runner.products import Products
from node_agent.runner.score_rules import ScoreRules

GROUPS = {"qkv": (0, 1, 2), "o": (3,), "gate_up": (4, 5), "down": (6,)}
"""Projection groups that share their input, as indices into adapters.base_model.PROJECTIONS."""


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters by which the next token of each of the Q rows is chosen.

    `uniform` f64[Q] in [0, 1) depends on (seed, choice, position) alone.
    """

    temperature: list[float]
    top_p: list[float]
    top_k: list[int]
    min_p: list[float]
    uniform: list[float]
    logprobs: list[int]
    """-1: none; k: the chosen token's and the k largest"""
    rules: dict[int, ScoreRules] = field(default_factory=dict)
    """rules by row, for those whose scores are changed before a token is chosen"""


@dataclass(frozen=True)
class PromptScoring:
    """Prompt tokens whose log probabilities are wanted: S rows."""

    rows: torch.Tensor
    """i64[S]: tokens (indices below T), each the one before a scored token"""
    targets: torch.Tensor
    """i64[S]: ids of the scored tokens"""
    top: list[int]
    """per row, how many of the likeliest tokens are wanted"""


@dataclass(frozen=True)
class ScoredToken:
    """The log probability of a prompt token, its rank (1: the likeliest), and the likeliest tokens (id, log
    probability)."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class StepBatch:
    """Tokens of one iteration; decode rows (one token each) come first, then prompt chunks."""

    token_ids: torch.Tensor
    """i64[T]"""
    positions: torch.Tensor
    """i64[T]"""
    query_start: torch.Tensor
    """i32[R + 1]"""
    context_len: torch.Tensor
    """i32[R], this chunk included"""
    block_table: torch.Tensor
    """i32[R, max_blocks], padded with 0"""
    slot_mapping: torch.Tensor
    """i64[T]: where each token's key and value go; -1 is padding"""
    logit_rows: torch.Tensor
    """i64[Q]: tokens (indices below T) whose logits are wanted"""
    sampling: SamplingBatch
    n_decode: int
    n_tokens: int
    n_rows: int
    max_query: int
    max_context: int
    query_lens: list[int]
    context_lens: list[int]
    scoring: PromptScoring | None = None
    """Prompt tokens to be scored; None where no row asks for log probabilities of its prompt."""
    fed: list[int] | None = None
    """Rows of the step before whose chosen tokens are the tokens of this one's rows, for a runner that `feeds`. None:
    `token_ids` has all tokens."""


@dataclass(frozen=True)
class Lease:
    """The right to read an adapter's weights in `slot` until it is released."""

    digest: str
    slot: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NoRoom:
    """Not now: adapters in use fill the pool or the slots."""


@dataclass(frozen=True)
class Pending:
    """Not now: how large the adapter is, is still being read."""


@dataclass(frozen=True)
class TooLarge:
    """Never: the adapter needs `need` bytes and the whole pool has `have`."""

    need: int
    have: int


@dataclass(frozen=True)
class LoadFailed:
    """The adapter's bytes could not be read, or are not what they must be."""

    reason: str
    damaged: bool = False
    """artifact of the registry is not what it must be, or is missing"""


@dataclass(frozen=True)
class LoraBatch:
    """Adapter of each token of a pass."""

    seg_start: torch.Tensor
    """i32[S + 1]"""
    seg_slot: torch.Tensor
    """i32[S], -1 = base"""
    token_slot: torch.Tensor
    """i32[T], -1 = base"""
    leases: list[Lease | None]
    """per segment"""
    bounds: list[tuple[int, int]]
    """per segment: first token and end, on the host"""
    max_rank: int
    empty: bool
    """no token uses an adapter: no LoRA code runs"""


class LayerState:
    """States of one layer of an adapter, in the order in which they are passed through."""

    NO, HOST, ENQUEUED, DEVICE, FAILED = range(5)


class StepOutput(Protocol):
    """Sampled tokens; to be read once `done` has ended, and before the next pass but one is started."""

    @property
    def token_ids(self) -> torch.Tensor:
        """The sampled tokens, i64[Q] in host memory."""

    @property
    def logprobs(self) -> Sequence[tuple[float, list[tuple[int, float]]] | None]:
        """The log probabilities per row that asked: the chosen token's and the k largest (id, log probability)."""

    @property
    def non_finite(self) -> frozenset[int]:
        """The rows of Q whose logits were not finite: their requests end with an error."""

    @property
    def done(self) -> Event: ...

    @property
    def prompt_scores(self) -> list[ScoredToken]:
        """Returns the scores of the rows of `StepBatch.scoring`."""


@dataclass(frozen=True)
class HostOutput:
    """A StepOutput whose values are in host memory already."""

    token_ids: torch.Tensor
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]
    non_finite: frozenset[int]
    done: Event
    prompt_scores: list[ScoredToken] = field(default_factory=list)


class PassLora(Protocol):
    """Adds the adapters' part to a pass's projections. Made per pass."""

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        """Begins the adapters' part of `group`, with its input x[T, d_in], which may be a part of wider rows.

        Called before the base product. Returns False when nothing is to be added there: `finish` is not called then.
        """

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        """Adds the adapters' part to each y[T, d_out], parts of wider rows, in place. Called after the base product,
        and before q and k are rotated."""


@runtime_checkable
class ArrivingLora(PassLora, Protocol):
    """A PassLora of an adapter whose layers may still be on their way to the device."""

    @property
    def on_device(self) -> PassLora | None:
        """The PassLora that adds every layer, once it has arrived; None where there is no adapter at all."""

    @property
    def hands_over(self) -> bool:
        """True if CPU workers add the layers that have not arrived."""

    def adapts(self, layer: int, group: str) -> bool:
        """Returns whether the adapter has a part in that group of the layer."""

    def claim(self, layer: int) -> bool:
        """Fixes where the layer is computed. Returns True for the device, where what is enqueued from now on finds its
        weights; False, where no workers are: the pass is void."""


class Pass(Protocol):
    """A forward that can stop between layers."""

    layer: int
    stretch: int
    """Number of layers between the places where the pass can stop: before layers whose index is a multiple, and at the
    end."""

    def advance(self, to_layer: int) -> None:
        """Enqueues layers up to `to_layer`, or the last place before it where it can stop. Never waits on a device; on
        a CPU it returns when computed."""

    def finish(self) -> StepOutput:
        """Computes the final norm and the logits of `logit_rows`, and samples. All layers must have been advanced."""

    def abort(self) -> Event:
        """Drops a half-run pass; what it holds is free at the event."""


class ModelRunner(Protocol):
    """A base model on a device, with its KV cache."""

    name: str
    """name of the runner in `node.runner`: what was measured with one says nothing of another"""
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    block_tokens: int
    num_blocks: int
    products: Products | None
    """products of bf16 matrices on a CPU; None: torch alone computes them"""

    def start(self, batch: StepBatch, lora: PassLora | None) -> Pass:
        """Starts a pass over the batch. `lora` is None when no token uses an adapter."""


@dataclass(frozen=True)
class RunnerSettings:
    """Settings with which a runner is opened."""

    model_dir: Path
    device: torch.device
    dtype: torch.dtype | None
    """dtype of the weights; None: the model's own"""
    block_tokens: int
    num_blocks: Callable[[torch.dtype], int]
    """Number of KV blocks of this dtype that fit. To be called once the weights are on the device: it measures what is
    free. Raises ValueError when there is no room for any."""


OpenRunner = Callable[[RunnerSettings], ModelRunner]
"""Loads the base model. Raises ValueError or OSError. Modules of node_agent.config.RUNNERS call it `open_runner`."""


@dataclass(frozen=True)
class Plan:
    """Strategy by which a cold chunk gets its weights."""

    name: str
    """wait, pipeline or assist"""
    assisted: int = 0
    """layers 0..assisted-1 are for the CPU workers, unless they have arrived when they are needed"""
    exposed: float = 0.0
    """forecast, seconds"""
    cpu_extra: tuple[float, ...] = ()
    """per layer: seconds that the workers take longer than the device would"""
    load: tuple[float, ...] = ()
    """per layer: seconds of its transfer to the device"""
    seconds: float = 0.0
    """forecast of the chunk's end, from now"""
    rest: float = 0.0
    """forecast of the seconds from then until the request may decode; 0 where no token follows the chunk"""
    other_requests: int = 0
    """number of other requests, which wait wherever the engine waits for workers"""
    by_profile: float = 0.0
    """forecast of the chunk's end by the profile alone; 0: the chunk does not have engine and link for itself"""


class IdleWork(Protocol):
    """Work of the engine's thread that an idle engine does, such as measuring calls with CPU workers."""

    def work(self, should_yield: Callable[[], bool]) -> bool:
        """Works until `should_yield`. Returns False when there is nothing to do now."""

    def close(self) -> None: ...
