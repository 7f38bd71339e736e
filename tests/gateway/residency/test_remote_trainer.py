"""The network learns in a helper process as it would here, nobody waits for that, and what was learned outlives it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from adapters.helper_process import NICENESS
from cluster.forecast.lstm import STEPS
from cluster.forecast.lstm_cells import FEATURES, MOMENT, draw_parameters
from cluster.forecast.lstm_training import BATCH, LEARNING_RATE, Observations, Trainer
from gateway.residency.remote_trainer import CHOICES, MAX_JOBS, MAX_LOTS, RemoteTrainer, make_forecaster


@pytest.fixture
def remote() -> Iterator[RemoteTrainer]:
    with closing(RemoteTrainer()) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    """A test's own time limit bounds it."""
    while not condition():
        time.sleep(0.002)


def observations(rng: np.random.Generator, n: int = 2 * BATCH) -> Observations:
    keys = [str(number) for number in rng.integers(0, 5, n)]
    windows = rng.random((n, STEPS, FEATURES), np.float32)
    return Observations(keys, windows, rng.random((n, MOMENT), np.float32), np.ones((n, 4), np.float32))


def update(trainer: RemoteTrainer) -> None:
    """Returns when the weights have come."""
    before = trainer.parameters
    trainer.update()
    until(lambda: trainer.parameters is not before)


def pid_of(trainer: RemoteTrainer) -> int:
    assert trainer.helper.process is not None
    return trainer.helper.process.pid


def test_it_learns_what_a_trainer_learns(remote: RemoteTrainer) -> None:
    rng, local = np.random.default_rng(1), Trainer(draw_parameters(np.random.default_rng(0)))
    for _ in range(10):
        lot = observations(rng)
        for each in (local, remote):
            each.add(lot)
        local.update()
        update(remote)
    assert local.embeddings.keys() == remote.embeddings.keys()
    for ours, theirs in ((local.parameters, remote.parameters), (local.embeddings, remote.embeddings)):
        for name, array in ours.items():
            assert theirs[name] == pytest.approx(array, abs=1e-5), name


def test_what_was_learned_outlives_a_killed_process(remote: RemoteTrainer) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        remote.add(observations(rng))
        update(remote)
    learned, embeddings, first = remote.parameters, dict(remote.embeddings), pid_of(remote)
    os.kill(first, signal.SIGKILL)
    while np.all(remote.parameters["readout_bias"] == learned["readout_bias"]):
        remote.add(observations(rng))  # those that meet the death are lost
        remote.update()
        time.sleep(0.01)
    after, drawn = remote.parameters, draw_parameters(np.random.default_rng(0))
    assert pid_of(remote) != first and embeddings.keys() <= remote.embeddings.keys()
    assert max(float(abs(array - learned[name]).max()) for name, array in after.items()) < 8 * LEARNING_RATE
    assert float(abs(after["readout_bias"] - drawn["readout_bias"]).max()) > 12 * LEARNING_RATE


def test_nobody_waits_for_it_and_little_waits(remote: RemoteTrainer) -> None:
    rng = np.random.default_rng(1)
    remote.add(observations(rng))
    update(remote)
    os.kill(pid_of(remote), signal.SIGSTOP)
    for _ in range(2 * MAX_LOTS):
        remote.add(observations(rng, 2))
        remote.update()
    assert remote._jobs.qsize() <= MAX_JOBS and len(remote._lots) == MAX_LOTS
    before = remote.parameters
    os.kill(pid_of(remote), signal.SIGCONT)
    until(lambda: remote.parameters is not before)


def test_the_process_ends_with_the_gateway() -> None:
    with closing(RemoteTrainer()) as remote:
        update(remote)
        process = remote.helper.process
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid_of(remote)) == min(19, own + NICENESS)
    assert process is not None and process.poll() is not None
    assert remote._thread is not None and not remote._thread.is_alive()


@pytest.mark.parametrize("predictor", CHOICES)
def test_only_the_network_s_predictors_have_a_process(remote: RemoteTrainer, predictor: str) -> None:
    forecaster = make_forecaster(predictor, remote)
    for second in range(1, 330):
        forecaster.observe(1e9 + second, {"a": 40, "b": 1} if second % 3 == 0 else {})
    assert set(forecaster.forecast(1e9 + 330)) == {"a", "b"}
    assert ("lstm" in forecaster.parts) == (remote._thread is not None) == ("lstm" in predictor)
    if "lstm" in predictor:
        until(lambda: remote.helper.process is not None)
