"""Training of the LSTM network on recent outcomes (Predictive-LoRA, section III.A, "Online Learning")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.forecast.lstm_cells import EMBEDDING, Parameters, loss_and_gradients
from cluster.forecast.table import Array

REPLAY = 10_000
"""Maximum number of stored observations; beyond it the oldest are dropped."""
UPDATE_EVERY = 100
"""Number of requests between two updates; there is at most one update a second."""
BATCH = 64
LEARNING_RATE = 1e-3
MAX_EMBEDDINGS = 40_000
"""Maximum number of functions with their own embedding; the least recently trained return to the shared one."""


@dataclass(frozen=True)
class Observations:
    """Inputs of n functions at one time, and whether calls came."""

    keys: list[str]
    windows: Array
    """Features of the last windows, f32[n, steps, FEATURES]."""
    moment: Array
    """Inputs of the readout, f32[n, MOMENT]."""
    outcomes: Array
    """Outcomes f32[n, horizons]: 1 where a call came within the horizon."""


class TrainerLike(Protocol):
    """Interface of a Trainer, or of a proxy for one in another process."""

    parameters: Parameters
    embeddings: dict[str, Array]

    def add(self, lot: Observations) -> None: ...

    def update(self) -> object: ...


class Adam:
    """Adam optimiser (Kingma and Ba, 2015) for named arrays."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._steps = 0
        self._means: dict[str, tuple[Array, Array]] = {}

    def step(self, parameters: Parameters, gradients: Parameters) -> None:
        """Updates `parameters` in place by one step along `gradients`."""
        self._steps += 1
        fade_mean, fade_square = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        for name, gradient in gradients.items():
            mean, square = self._means.get(name, (np.zeros_like(gradient), np.zeros_like(gradient)))
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            self._means[name] = mean, square
            step = self._rate * (mean / fade_mean) / (np.sqrt(square / fade_square) + 1e-8)
            parameters[name] = parameters[name] - step.astype(parameters[name].dtype)


class Trainer:
    """Trains the parameters and the functions' embeddings, which it owns."""

    def __init__(self, parameters: Parameters, seed: int = 0) -> None:
        self.parameters = dict(parameters)
        self.embeddings: dict[str, Array] = {}
        """Embedding f32[EMBEDDING] of each trained function, by key."""
        self._adam = Adam(LEARNING_RATE)
        self._rng = np.random.default_rng(seed)
        self._lots: list[Observations] = []
        self._size = 0

    def add(self, lot: Observations) -> None:
        """Stores the observations for replay; drops the oldest beyond REPLAY."""
        self._lots.append(lot)
        self._size += len(lot.keys)
        while self._size - len(self._lots[0].keys) >= REPLAY:
            self._size -= len(self._lots.pop(0).keys)

    def update(self) -> float | None:
        """Trains on one batch and returns its loss. Returns None, and does nothing, while there are fewer than BATCH
        observations."""
        if self._size < BATCH:
            return None
        batch = self._draw()
        embeddings = np.stack([self.embeddings.get(key, self.parameters["embedding"]) for key in batch.keys])
        loss, gradients, by_embedding = loss_and_gradients(
            self.parameters, batch.windows, embeddings, batch.moment, batch.outcomes
        )
        gradients["embedding"] = by_embedding.sum(axis=0)
        self._adam.step(self.parameters, gradients)
        for key, before, gradient in zip(batch.keys, embeddings, by_embedding * BATCH, strict=True):
            trained = self.embeddings.pop(key, before)
            self.embeddings[key] = trained - np.float32(LEARNING_RATE) * gradient.astype(np.float32)
        while len(self.embeddings) > MAX_EMBEDDINGS:
            del self.embeddings[next(iter(self.embeddings))]
        return loss

    def _draw(self) -> Observations:
        """Returns a random batch in which each stored observation is equally likely."""
        sizes = np.cumsum([len(lot.keys) for lot in self._lots])
        drawn = self._rng.integers(0, self._size, BATCH)
        lots = np.searchsorted(sizes, drawn, side="right")
        at = drawn - np.concatenate([[0], sizes])[lots]
        of = [(self._lots[lot], row) for lot, row in zip(lots.tolist(), at.tolist(), strict=True)]
        return Observations(
            [lot.keys[row] for lot, row in of],
            np.stack([lot.windows[row] for lot, row in of]),
            np.stack([lot.moment[row] for lot, row in of]),
            np.stack([lot.outcomes[row] for lot, row in of]),
        )


def embedding_of(trainer: TrainerLike, keys: list[str]) -> Array:
    """Returns the functions' embeddings f32[functions, EMBEDDING]; functions that were not trained have the shared
    one."""
    if not keys:
        return np.zeros((0, EMBEDDING), np.float32)
    return np.stack([trainer.embeddings.get(key, trainer.parameters["embedding"]) for key in keys])
