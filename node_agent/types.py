"""The contracts between engine, runner, adapter memory and cold start (docs/design/seams.md).

Shapes: T tokens; R rows (sequences); Q rows whose logits are computed; S segments (maximal runs of tokens of one
adapter).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from node_agent.device_event import Event
from node_agent.leases import Lease
from node_agent.runner.products import Products
from node_agent.runner.score_rules import ScoreRules

GROUPS = {"qkv": (0, 1, 2), "o": (3,), "gate_up": (4, 5), "down": (6,)}
"""Projection groups: projections with a shared input, as indices into adapters.base_model.PROJECTIONS."""


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters for the next token of each of the Q rows.

    `uniform` f64[Q] holds random numbers in [0, 1) that depend on (seed, choice, position) alone.
    """

    temperature: list[float]
    top_p: list[float]
    top_k: list[int]
    min_p: list[float]
    uniform: list[float]
    logprobs: list[int]
    """number per row: -1 for no log probabilities; k for that of the chosen token and those of the k likeliest"""
    rules: dict[int, ScoreRules] = field(default_factory=dict)
    """rules that change a row's logits before sampling, by row; rows without rules are left out"""
    masks: dict[int, Callable[[], np.ndarray]] = field(default_factory=dict)
    """by row, returns the tokens that its grammar or parameters allow, as bits i32[ceil(V / 32)]; rows that may have
    all tokens are left out. It is called while the device computes the pass."""


@dataclass(frozen=True)
class PromptScoring:
    """Prompt tokens whose log probabilities are requested. Here S is the number of such tokens."""

    rows: torch.Tensor
    """i64[S]: index (below T) of the token before each scored token"""
    targets: torch.Tensor
    """i64[S]: ids of the scored tokens"""
    top: list[int]
    """per scored token, the number of likeliest tokens to report"""


@dataclass(frozen=True)
class ScoredToken:
    """Log probability of a prompt token, its rank (1: the likeliest), and the likeliest tokens as (id, log
    probability)."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class StepBatch:
    """Tokens of one iteration. Decode rows (one token each) come first, then prompt chunks."""

    token_ids: torch.Tensor
    """i64[T]"""
    positions: torch.Tensor
    """i64[T]"""
    query_start: torch.Tensor
    """i32[R + 1]: index of the first token of each row; the last element is the end of the last row"""
    context_len: torch.Tensor
    """i32[R]: context length of each row, including this chunk"""
    block_table: torch.Tensor
    """i32[R, max_blocks], padded with 0"""
    slot_mapping: torch.Tensor
    """i64[T]: KV-cache slot for each token's key and value; -1 for padding"""
    logit_rows: torch.Tensor
    """i64[Q]: indices (below T) of the tokens whose logits are computed"""
    sampling: SamplingBatch
    n_decode: int
    n_tokens: int
    n_rows: int
    max_query: int
    max_context: int
    query_lens: list[int]
    context_lens: list[int]
    scoring: PromptScoring | None = None
    """Prompt tokens to score; None when no row requests prompt log probabilities."""
    fed: list[int] | None = None
    """Indices of rows of the previous step, one for each row of this one: the token chosen there is this row's input.
    Only for runners that feed tokens (`SendingRunner.feeds`). None: `token_ids` has all tokens."""


@dataclass(frozen=True)
class LoraBatch:
    """Adapters of the tokens of a pass."""

    seg_start: torch.Tensor
    """i32[S + 1]: index of the first token of each segment; the last element is the end of the last segment"""
    seg_slot: torch.Tensor
    """i32[S]: adapter slot of each segment; -1 for the base model"""
    token_slot: torch.Tensor
    """i32[T]: adapter slot of each token; -1 for the base model"""
    leases: list[Lease | None]
    """lease of each segment; None for the base model"""
    bounds: list[tuple[int, int]]
    """index of the first token, and end, of each segment, as Python integers"""
    max_rank: int
    empty: bool
    """whether no token uses an adapter; the pass then runs no LoRA code"""


class StepOutput(Protocol):
    """Sampled tokens of a pass. They may be read once `done` has ended. The start of the pass after the next one makes
    them invalid."""

    @property
    def token_ids(self) -> torch.Tensor:
        """Sampled tokens, i64[Q] in host memory."""

    @property
    def logprobs(self) -> Sequence[tuple[float, list[tuple[int, float]]] | None]:
        """Log probabilities of each of the Q rows: that of the chosen token, and (id, log probability) of the k
        likeliest. None for rows that requested none."""

    @property
    def non_finite(self) -> frozenset[int]:
        """Indices of those of the Q rows whose logits are not finite. Their requests end with an error."""

    @property
    def done(self) -> Event: ...

    @property
    def prompt_scores(self) -> list[ScoredToken]:
        """Returns the scores of the rows of `StepBatch.scoring`."""


@dataclass(frozen=True)
class HostOutput:
    """StepOutput whose values are already in host memory."""

    token_ids: torch.Tensor
    logprobs: list[tuple[float, list[tuple[int, float]]] | None]
    non_finite: frozenset[int]
    done: Event
    prompt_scores: list[ScoredToken] = field(default_factory=list)


class PassLora(Protocol):
    """Adds the LoRA terms of a pass's adapters to its projections. One is created per pass."""

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        """Starts the LoRA term of `group` for its input x[T, d_in], which may be a view of wider rows.

        Called before the base product. Returns False when the group has no LoRA term; `finish` is then not called.
        """

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        """Adds the LoRA term to each y[T, d_out] in place; ys may be views of wider rows. Called after the base product
        and before rotary embedding of q and k."""


@runtime_checkable
class ArrivingLora(PassLora, Protocol):
    """PassLora of an adapter that may still be loading: some of its layers may not be on the device yet."""

    @property
    def on_device(self) -> PassLora | None:
        """PassLora that is used if the whole adapter is on the device; None if the pass has no adapter."""

    @property
    def hands_over(self) -> bool:
        """True if CPU workers compute the layers that have not arrived."""

    def adapts(self, layer: int, group: str) -> bool:
        """Returns whether the adapter has weights for that group of the layer."""

    def claim(self, layer: int) -> bool:
        """Decides where the layer's LoRA term is computed. Returns True for the device: work enqueued from then on
        finds the layer's weights on the device.

        Returns False for CPU workers. Without workers, no valid result of the pass is then possible.
        """


class Pass(Protocol):
    """Forward pass that can stop between layers."""

    layer: int
    stretch: int
    """Number of layers between two stopping points. The pass can stop only before layers whose index is a multiple of
    it, and at the end."""

    def advance(self, to_layer: int) -> None:
        """Enqueues layers up to `to_layer`, or up to the last stopping point before it. Never waits for a GPU; on a CPU
        it returns once the layers are computed."""

    def finish(self) -> StepOutput:
        """Computes the final norm and the logits of `logit_rows`, samples, and returns the output. All layers must have
        been enqueued."""

    def abort(self) -> Event:
        """Drops an unfinished pass. Returns the event after which its resources are free."""


class ModelRunner(Protocol):
    """A base model on a device, with its KV cache."""

    name: str
    """name of the runner in `node.runner`; measurements made with one runner do not apply to another"""
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    block_tokens: int
    num_blocks: int
    products: Products | None
    """implementation of bf16 matrix products on a CPU; None: torch computes them"""

    def start(self, batch: StepBatch, lora: PassLora | None) -> Pass:
        """Starts a pass over the batch. `lora` is None when no token uses an adapter."""


@dataclass(frozen=True)
class RunnerSettings:
    """Settings for opening a runner."""

    model_dir: Path
    device: torch.device
    dtype: torch.dtype | None
    """dtype of the weights; None: the dtype in the model's files"""
    block_tokens: int
    num_blocks: Callable[[torch.dtype], int]
    """Returns the number of KV blocks of a dtype that fit into free memory. Must be called after the weights are
    loaded, since it measures free memory. Raises ValueError when no block fits."""


OpenRunner = Callable[[RunnerSettings], ModelRunner]
"""Loads the base model and returns its runner. Raises ValueError or OSError. The modules in node_agent.config.RUNNERS
define it as `open_runner`."""


@dataclass(frozen=True)
class Plan:
    """Plan for computing a prompt chunk of a request while its adapter is still loading."""

    name: str
    """wait, pipeline or assist"""
    assisted: int = 0
    """number of assisted layers: CPU workers compute the first ones, except those that have arrived by then"""
    exposed: float = 0.0
    """forecast seconds of load time that are not hidden behind computation"""
    cpu_extra: tuple[float, ...] = ()
    """extra seconds of each layer if workers compute its LoRA term instead of the device"""
    load: tuple[float, ...] = ()
    """seconds to transfer each layer to the device"""
    seconds: float = 0.0
    """forecast seconds from now until the chunk's end"""
    rest: float = 0.0
    """forecast seconds from the chunk's end until the request may decode; 0 if no token follows the chunk"""
    other_requests: int = 0
    """number of other running requests, which also wait while the engine waits for workers"""
    by_profile: float = 0.0
    """forecast seconds until the chunk's end by the profile alone; 0 if the chunk shares the engine or the link"""
