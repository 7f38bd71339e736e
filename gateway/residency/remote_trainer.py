"""Trains the neural network of forecasts in a helper process, if the chosen predictor uses it."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from functools import partial
from queue import Full, Queue
from threading import Thread

import msgspec
import numpy as np

from adapters.helper_process import HelperEnded, HelperProcess
from cluster.forecast.forecaster import PARTS, Forecaster, Maker
from cluster.forecast.lstm import Lstm
from cluster.forecast.lstm_cells import draw_parameters
from cluster.forecast.lstm_training import MAX_EMBEDDINGS, Observations
from cluster.forecast.table import Array
from gateway.residency.trainer_process import Job, Weights, embeddings_of, observation_batch, parameters_of, weights_of

MIX, WITH_LSTM = "mix", "mix_with_lstm"
CHOICES = (MIX, *PARTS, "lstm", WITH_LSTM)
"""Values of the setting `gateway.predictor`."""
MAX_LOTS = 320
"""Maximum batches of observations that wait for an update, as many as a Trainer keeps. Beyond that the oldest are
dropped."""
MAX_JOBS = 4
"""Maximum updates that wait. There is at most one per second; further ones are skipped."""
ANSWER_SECONDS = 60.0
"""Timeout of one job, including the start of the process. A process that takes longer is killed."""
END_SECONDS = 2.0

log = logging.getLogger("gateway")


def make_forecaster(predictor: str, trainer: RemoteTrainer) -> Forecaster:
    """Returns the forecaster of a predictor, one of CHOICES."""
    if predictor == MIX:
        return Forecaster()
    makers: dict[str, Maker] = PARTS | {"lstm": partial(Lstm, trainer=trainer)}
    return Forecaster(mixed=makers if predictor == WITH_LSTM else {predictor: makers[predictor]})


class RemoteTrainer:
    """Replacement for an Lstm's Trainer that never blocks: its weights are the latest that the process returned.

    When the process ends, its observations are lost, but not its weights. The process starts with the first job.
    """

    def __init__(self) -> None:
        self.parameters = draw_parameters(np.random.default_rng(0))
        self.embeddings: dict[str, Array] = {}
        self.helper = HelperProcess(
            "gateway.residency.trainer_process", hello=lambda: weights_of(self.parameters, self.embeddings)
        )
        self._lots: deque[Observations] = deque(maxlen=MAX_LOTS)
        self._jobs: Queue[Job | None] = Queue(MAX_JOBS)
        """Queue of jobs for the thread. The item None ends the thread."""
        self._closed = False
        self._thread: Thread | None = None

    def add(self, lot: Observations) -> None:
        """Stores observations for the next update."""
        self._lots.append(lot)

    def update(self) -> None:
        """Queues one update of the network, which trains on the stored observations."""
        if self._thread is None:
            # A daemon thread, so that a job in progress does not delay the end of the gateway.
            self._thread = Thread(target=self._run, name="remote-trainer", daemon=True)
            self._thread.start()
        with suppress(Full):
            self._jobs.put_nowait(Job([observation_batch(lot) for lot in self._lots]))
            self._lots.clear()

    def close(self) -> None:
        """Kills the process and abandons its work."""
        self._closed = True
        with suppress(Full):
            self._jobs.put_nowait(None)
        self.helper.kill()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._closed and (job := self._jobs.get()) is not None:
            try:
                answer = self.helper.ask(job, ANSWER_SECONDS)
            except (HelperEnded, OSError) as error:
                log.warning(
                    "the forecasting network is trained from the start again: its process ended",
                    extra={"why": str(error) or "no answer in time"},
                )
            else:
                self._take(msgspec.msgpack.decode(answer, type=Weights))
        self.helper.end()

    def _take(self, weights: Weights) -> None:
        self.parameters = parameters_of(weights)
        for key, embedding in embeddings_of(weights).items():
            self.embeddings.pop(key, None)
            self.embeddings[key] = embedding
        while len(self.embeddings) > MAX_EMBEDDINGS:
            del self.embeddings[next(iter(self.embeddings))]
