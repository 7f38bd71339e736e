"""Helper process that trains the neural network of forecasts for the leader. Started by
gateway.residency.remote_trainer."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import msgspec
import numpy as np

from adapters.helper_process import NICENESS, bound_memory, jobs, receive, send
from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.lstm import STEPS
from cluster.forecast.lstm_cells import FEATURES, MOMENT, SHAPES, Parameters
from cluster.forecast.lstm_training import Observations, Trainer
from cluster.forecast.table import Array

IDLE_SECONDS = 3600.0
"""Seconds without a job after which the process ends, for example because its worker is no longer the leader. The next
job starts a new one."""


class Weights(msgspec.Struct, frozen=True):
    """Weights of the network: values are the bytes of f32 arrays."""

    parameters: dict[str, bytes]
    embeddings: dict[str, bytes]


class ObservationBatch(msgspec.Struct, frozen=True):
    """Batch of observations; `bytes` fields are f32 arrays."""

    keys: list[str]
    windows: bytes
    moment: bytes
    outcomes: bytes


class Job(msgspec.Struct, frozen=True):
    """Update of the network with the new observations in `lots`.

    The answer is a Weights with all parameters, and with the embeddings that changed.
    """

    lots: list[ObservationBatch]


def weights_of(parameters: Parameters, embeddings: dict[str, Array]) -> Weights:
    return Weights(_as_bytes(parameters), _as_bytes(embeddings))


def observation_batch(observations: Observations) -> ObservationBatch:
    return ObservationBatch(
        observations.keys,
        observations.windows.tobytes(),
        observations.moment.tobytes(),
        observations.outcomes.tobytes(),
    )


def parameters_of(weights: Weights) -> Parameters:
    return {name: _array(weights.parameters[name], *shape) for name, shape in SHAPES.items()}


def embeddings_of(weights: Weights) -> dict[str, Array]:
    return {key: _array(data, -1) for key, data in weights.embeddings.items()}


def learn(trainer: Trainer, job: Job) -> Weights:
    for lot in job.lots:
        n = len(lot.keys)
        windows, moment = _array(lot.windows, n, STEPS, FEATURES), _array(lot.moment, n, MOMENT)
        trainer.add(Observations(lot.keys, windows, moment, _array(lot.outcomes, n, len(HORIZONS_S))))
    before = dict(trainer.embeddings)
    trainer.update()
    changed = {key: embedding for key, embedding in trainer.embeddings.items() if before.get(key) is not embedding}
    return weights_of(trainer.parameters, changed)


def _as_bytes(arrays: dict[str, Array]) -> dict[str, bytes]:
    return {key: array.astype(np.float32, copy=False).tobytes() for key, array in arrays.items()}


def _array(data: bytes, *shape: int) -> Array:
    return np.frombuffer(data, np.float32).reshape(shape)


def main() -> None:
    """Runs the process. Weights, then jobs come over the socket at standard input; answers are sent back over it."""
    os.nice(NICENESS)
    connection = socket.socket(fileno=0)
    bound_memory()
    connection.settimeout(IDLE_SECONDS)
    with suppress(EOFError, TimeoutError):
        weights = msgspec.msgpack.decode(receive(connection), type=Weights)
        trainer = Trainer(parameters_of(weights))
        trainer.embeddings = embeddings_of(weights)
        for job in jobs(connection, Job):
            send(connection, learn(trainer, job))


if __name__ == "__main__":
    main()
