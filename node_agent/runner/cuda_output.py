"""What a pass gives back: read on the host when its copy has come, and not before."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from node_agent.device import Event
from node_agent.runner.cuda_blocks import OutFields, Spec, size_of
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.sampler import Logprobs
from node_agent.types import ScoredToken


def download(stream: Stream, spec: Spec, host: torch.Tensor, device: torch.Tensor, everything: bool) -> Event:
    """Enqueues the copy of an OutFields block, without what only log probabilities need unless `everything` is
    wanted. Returns the event behind it."""
    stream.download(host, device, size_of(spec, None if everything else "chosen"))
    return stream.event()


class CudaOutput:
    """A StepOutput. `out` lies in host memory, and is overwritten by the next step but one."""

    def __init__(
        self, done: Event, out: OutFields | None, logprobs: list[int], scores: Callable[[], list[ScoredToken]]
    ) -> None:
        """`out`: None where no row wants logits; `logprobs` as in SamplingBatch, one per row that does."""
        self.done, self._out, self._wanted, self._scores = done, out, logprobs, scores

    @cached_property
    def token_ids(self) -> torch.Tensor:
        if self._out is None:
            return torch.empty(0, dtype=torch.int64)
        return self._out.ids[: len(self._wanted)].clone()

    @cached_property
    def non_finite(self) -> frozenset[int]:
        flags = [] if self._out is None else self._out.finite[: len(self._wanted)].tolist()
        return frozenset(row for row, finite in enumerate(flags) if not finite)

    @cached_property
    def logprobs(self) -> list[Logprobs | None]:
        found: list[Logprobs | None] = [None] * len(self._wanted)
        for row, k in enumerate(self._wanted):
            if k >= 0:
                assert self._out is not None
                ids, values = self._out.top_ids[row].tolist(), self._out.top_values[row].tolist()
                found[row] = (float(self._out.chosen[row]), list(zip(ids, values, strict=True))[:k])
        return found

    @cached_property
    def prompt_scores(self) -> list[ScoredToken]:
        return self._scores()
