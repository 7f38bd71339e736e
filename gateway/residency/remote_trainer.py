"""Trains the network of forecasts in a helper process, where a predictor with the network is chosen."""

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
"""Choices of `gateway.predictor`."""
MAX_LOTS = 320
"""Lots that wait for an update, as many as a Trainer keeps; the oldest are dropped."""
MAX_JOBS = 4
"""Updates that wait; there is one a second at most, and beyond these it is left out."""
ANSWER_SECONDS = 60.0
"""Seconds for one job, the start of the process included; one that takes longer is killed."""
END_SECONDS = 2.0

log = logging.getLogger("gateway")


def make_forecaster(predictor: str, trainer: RemoteTrainer) -> Forecaster:
    """`predictor`: one of CHOICES."""
    if predictor == MIX:
        return Forecaster()
    makers: dict[str, Maker] = PARTS | {"lstm": partial(Lstm, trainer=trainer)}
    return Forecaster(mixed=makers if predictor == WITH_LSTM else {predictor: makers[predictor]})


class RemoteTrainer:
    """Does what a Trainer does for a Lstm, but nobody waits for it: its weights are those that came last. What the
    process learns of is lost when it ends, what it has learned is not. The process starts with the first job."""

    def __init__(self) -> None:
        self.parameters = draw_parameters(np.random.default_rng(0))
        self.embeddings: dict[str, Array] = {}
        self.helper = HelperProcess(
            "gateway.residency.trainer_process", hello=lambda: weights_of(self.parameters, self.embeddings)
        )
        self._lots: deque[Observations] = deque(maxlen=MAX_LOTS)
        self._jobs: Queue[Job | None] = Queue(MAX_JOBS)
        """Jobs; None wakes a thread that is to end."""
        self._closed = False
        self._thread: Thread | None = None

    def add(self, lot: Observations) -> None:
        """Keeps them for the next update."""
        self._lots.append(lot)

    def update(self) -> None:
        """Trains on one batch, later."""
        if self._thread is None:
            # A daemon: a job under way does not hold up the end of the gateway.
            self._thread = Thread(target=self._run, name="remote-trainer", daemon=True)
            self._thread.start()
        with suppress(Full):
            self._jobs.put_nowait(Job([observation_batch(lot) for lot in self._lots]))
            self._lots.clear()

    def close(self) -> None:
        """Ends the process, and with it what it is doing."""
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
                log.warning("the network's training begins again", extra={"why": str(error) or "no answer in time"})
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
