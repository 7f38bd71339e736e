"""Changes to a request's logits by its parameters before sampling, in vLLM's order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from cluster.messages import Sampling

NEVER = float("-inf")
LARGEST = 1e30
"""Maximum of a penalised logit, so that a repetition penalty or temperature near 0 does not make it infinite."""


def changes_scores(sampling: Sampling) -> bool:
    """Returns True if a request with these parameters needs ScoreRules, which most do not."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
        or sampling.logit_bias
        or sampling.bad_words
        or sampling.min_tokens
    )


@dataclass(frozen=True)
class ScoreEdits:
    """Changes to logits. All token numbers are indices into the one tensor to which the changes apply."""

    never: torch.Tensor
    """i64[n]: tokens that must not be chosen"""
    biased: torch.Tensor
    """i64[m]: tokens with a bias, each once"""
    bias: torch.Tensor
    """f32[m]: bias added to the logit of each token in `biased`"""
    penalised: torch.Tensor
    """i64[p]: tokens with a penalty, each once"""
    repetition: torch.Tensor
    """f32[p]: repetition penalty; divides logits above 0 and multiplies others"""
    frequency: torch.Tensor
    """f32[p]: frequency penalty of each token in `penalised`, subtracted from its logit"""
    presence: torch.Tensor
    """f32[p]: presence penalty of each token in `penalised`, subtracted from its logit"""


def apply_edits(scores: torch.Tensor, edits: ScoreEdits) -> None:
    """Applies the edits to scores f32[n] in place."""
    if len(edits.never):
        scores.index_fill_(0, edits.never, NEVER)
    if len(edits.biased):
        scores.index_add_(0, edits.biased, edits.bias)
    if len(edits.penalised):
        changed = scores.index_select(0, edits.penalised)
        changed = torch.where(changed > 0, changed / edits.repetition, changed * edits.repetition)
        changed = changed - edits.frequency - edits.presence
        scores.index_copy_(0, edits.penalised, changed.clamp_(max=LARGEST))


class ScoreRules:
    """Rules by which one request's parameters change its logits. They are updated with each generated token, so that
    nothing is rebuilt per step."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        max_tokens: int,
        eos_ids: Collection[int],
        device: torch.device,
    ) -> None:
        """Token ids must be below the vocabulary's size, which is not checked here."""
        self._min_tokens = sampling.min_tokens
        self._generated: list[int] = []
        self._forbidden = _Forbidden(sampling.bad_words, device)
        self._ends = torch.tensor(sorted({*eos_ids, *sampling.stop_token_ids}), dtype=torch.int64, device=device)
        self._bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self._penalties = _Penalties(sampling, prompt, max_tokens, device)

    def append_token(self, token: int) -> None:
        """Records a generated token."""
        self._generated.append(token)
        self._penalties.count(token)

    def apply(self, scores: torch.Tensor) -> None:
        """Applies the rules to the row's scores f32[V] in place."""
        apply_edits(scores, self.edits())

    def edits(self) -> ScoreEdits:
        """Returns the changes to the next token's logits."""
        never = self._forbidden.tokens(self._generated)
        if len(self._generated) < self._min_tokens:
            never = torch.cat((never, self._ends))
        return ScoreEdits(never, self._bias_ids, self._bias, *self._penalties.edits())


class _Forbidden:
    """Forbidden token sequences: the last token of each is masked if the output ends in its other tokens."""

    def __init__(self, words: Sequence[Sequence[int]], device: torch.device) -> None:
        alone = sorted({word[0] for word in words if len(word) == 1})
        self._alone = torch.tensor(alone, dtype=torch.int64, device=device)
        self._longer = [(list(word[:-1]), word[-1]) for word in words if len(word) > 1]

    def tokens(self, generated: list[int]) -> torch.Tensor:
        """Returns the tokens i64[n] that must not come next."""
        last = [token for prefix, token in self._longer if generated[-len(prefix) :] == prefix]
        if not last:
            return self._alone
        return torch.cat((self._alone, torch.tensor(last, dtype=torch.int64, device=self._alone.device)))


class _Penalties:
    """Penalties for repetition (of prompt and output), frequency and presence (of the output).

    `_ids` i64[n] are the distinct tokens that count, `_counts` f32[n] the times that each was generated. Both are
    allocated for the longest output, so that a step writes one number.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int], max_tokens: int, device: torch.device) -> None:
        self._repetition, self._frequency = sampling.repetition_penalty, sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._on = bool(self._presence or self._frequency or self._repetition != 1.0)
        prompt_tokens = list(dict.fromkeys(prompt)) if self._repetition != 1.0 else []
        self._places = {token: place for place, token in enumerate(prompt_tokens)}
        room = len(prompt_tokens) + max_tokens if self._on else 0
        self._ids = torch.zeros(room, dtype=torch.int64, device=device)
        self._ids[: len(prompt_tokens)] = torch.tensor(prompt_tokens, dtype=torch.int64, device=device)
        self._counts = torch.zeros(room, dtype=torch.float32, device=device)

    def count(self, token: int) -> None:
        if not self._on:
            return
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            self._ids[place] = token
        self._counts[place] += 1

    def edits(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the last four fields of ScoreEdits."""
        count = len(self._places)
        counts = self._counts[:count]
        repetition = torch.full_like(counts, self._repetition)
        return self._ids[:count], repetition, self._frequency * counts, self._presence * (counts > 0)
