"""The network against torch, its training, and what the predictor shows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cluster.forecast.forecaster import Forecaster
from cluster.forecast.lstm import OBSERVED, STEPS, Lstm
from cluster.forecast.lstm_cells import (
    EMBEDDING,
    FEATURES,
    MOMENT,
    SHAPES,
    UNITS,
    Parameters,
    draw_parameters,
    loss_and_gradients,
    read_out,
    states,
)
from cluster.forecast.lstm_training import BATCH, REPLAY, Adam, Observations, Trainer, embedding_of
from tests.cluster.forecast.seconds import MONDAY, Calls, drive


def drawn(rng: np.random.Generator, n: int, steps: int) -> tuple[np.ndarray, ...]:
    windows, embedding, moment = (
        rng.normal(size=shape) for shape in ((n, steps, FEATURES), (n, EMBEDDING), (n, MOMENT))
    )
    return windows, embedding, moment, (rng.random((n, 4)) < 0.5).astype(float)


def torch_layers(parameters: Parameters) -> nn.LSTM:
    layers = nn.LSTM(FEATURES + EMBEDDING, UNITS, 2, batch_first=True).double()
    with torch.no_grad():
        for number, (name, below) in enumerate((("lower", FEATURES + EMBEDDING), ("upper", UNITS))):
            getattr(layers, f"weight_ih_l{number}").copy_(torch.tensor(parameters[name][:below].T))
            getattr(layers, f"weight_hh_l{number}").copy_(torch.tensor(parameters[name][below:].T))
            getattr(layers, f"bias_ih_l{number}").copy_(torch.tensor(parameters[f"{name}_bias"]))
            getattr(layers, f"bias_hh_l{number}").zero_()
    return layers


@pytest.mark.parametrize(("seed", "n", "steps"), [(0, 1, 1), (1, 3, 2), (2, 17, 10)])
def test_forward_and_gradients(seed: int, n: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    parameters = {name: 3 * value.astype(np.float64) for name, value in draw_parameters(rng).items()}
    windows, embedding, moment, came = drawn(rng, n, steps)
    layers = torch_layers(parameters)
    own = torch.tensor(embedding, requires_grad=True)
    readout, bias = (torch.tensor(parameters[name], requires_grad=True) for name in ("readout", "readout_bias"))
    state = layers(torch.cat([torch.tensor(windows), own[:, None].expand(-1, steps, -1)], 2))[0][:, -1]
    odds = torch.cat([state, torch.tensor(moment)], 1) @ readout + bias
    loss = nn.functional.binary_cross_entropy_with_logits(odds, torch.tensor(came))
    loss.backward()

    found_state = states(parameters, windows, embedding)
    assert found_state == pytest.approx(state.detach().numpy(), abs=1e-12)
    assert read_out(parameters, found_state, moment) == pytest.approx(odds.detach().numpy(), abs=1e-12)
    found_loss, gradients, by_embedding = loss_and_gradients(parameters, windows, embedding, moment, came)
    assert found_loss == pytest.approx(loss.item(), abs=1e-12)
    assert by_embedding == pytest.approx(own.grad.numpy(), abs=1e-13)
    expected = {"readout": readout.grad, "readout_bias": bias.grad}
    for number, name in enumerate(("lower", "upper")):
        by_weight = [getattr(layers, f"weight_{kind}_l{number}").grad for kind in ("ih", "hh")]
        expected |= {name: torch.cat(by_weight, 1).T, f"{name}_bias": getattr(layers, f"bias_ih_l{number}").grad}
    assert set(gradients) == set(expected) == set(SHAPES) - {"embedding"}
    for name, gradient in expected.items():
        assert gradients[name] == pytest.approx(gradient.numpy(), abs=1e-13), name
    assert any(abs(gradient).max() > 1e-3 for gradient in gradients.values())


def test_adam() -> None:
    rng = np.random.default_rng(0)
    parameters = {"a": rng.normal(size=(3, 2)), "b": rng.normal(size=4)}
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in parameters.items()}
    ours, theirs = Adam(0.01), torch.optim.Adam(list(tensors.values()), 0.01)
    for _ in range(5):
        gradients = {name: rng.normal(size=value.shape) for name, value in parameters.items()}
        ours.step(parameters, gradients)
        for name, tensor in tensors.items():
            tensor.grad = torch.tensor(gradients[name])
        theirs.step()
    for name, tensor in tensors.items():
        assert parameters[name] == pytest.approx(tensor.detach().numpy(), abs=1e-9)


def observations(rng: np.random.Generator, n: int) -> Observations:
    """Called within every horizon if, and only if, there was a call in the last window; and one function always."""
    called = rng.random(n) < 0.5
    windows = np.zeros((n, STEPS, FEATURES), np.float32)
    windows[:, -1, 1] = called
    keys = [str(number) for number in rng.integers(0, 5, n)]
    came = np.repeat((called | np.array([key == "0" for key in keys]))[:, None], 4, 1)
    return Observations(keys, windows, np.zeros((n, MOMENT), np.float32), came.astype(np.float32))


def test_training_learns_the_law_and_a_function_of_its_own() -> None:
    rng = np.random.default_rng(0)
    trainer = Trainer(draw_parameters(rng))
    assert trainer.update() is None
    before = draw_parameters(np.random.default_rng(0))
    trainer.add(observations(rng, 400))
    losses = [trainer.update() for _ in range(150)]
    assert losses[0] > 0.5 and np.mean(losses[-10:]) < 0.3
    assert np.any(trainer.parameters["embedding"] != before["embedding"])
    own = embedding_of(trainer, ["0", "new"])
    assert (own[1] == trainer.parameters["embedding"]).all() and (own[0] != own[1]).any()
    assert embedding_of(trainer, []).shape == (0, EMBEDDING)


def test_replay_is_bounded() -> None:
    rng = np.random.default_rng(0)
    trainer = Trainer(draw_parameters(rng))
    for _ in range(70):
        trainer.add(observations(rng, 200))
    assert trainer._size == sum(len(lot.keys) for lot in trainer._lots) == REPLAY
    assert len(trainer._draw().keys) == BATCH


class Recorder(Trainer):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__(draw_parameters(np.random.default_rng(0)))
        self.lots: list[Observations] = []
        self.updates = 0

    def add(self, lot: Observations) -> None:
        self.lots.append(lot)

    def update(self) -> None:
        self.updates += 1


def test_what_is_observed_is_what_happened() -> None:
    rng = np.random.default_rng(0)
    recorder = Recorder()
    called = rng.random((700, 50)) < np.exp(rng.uniform(-7, -1, 50))
    calls: list[Calls] = [(1.0, {str(number): 1 for number in np.flatnonzero(row)}) for row in called]
    for _ in drive(lambda table: Lstm(table, recorder), calls):
        pass
    assert recorder.updates == called.sum() // 100
    assert len(recorder.lots) > 70
    for number, lot in enumerate(recorder.lots):
        now = 1 + 5 * number  # the clock of the observation: seconds 0 to now - 1 have been seen
        assert len(lot.keys) <= OBSERVED
        for row, key in enumerate(lot.keys):
            of = called[:, int(key)]
            assert lot.outcomes[row].tolist() == [of[now : now + horizon].any() for horizon in (1, 5, 30, 300)]
            ended = (now - 1) // 30
            begins = [30 * (ended - STEPS + step) for step in range(STEPS)]
            counts = [of[begin : begin + 30].sum() if begin >= 0 else 0 for begin in begins]
            assert lot.windows[row, :, 0] == pytest.approx(np.log1p(counts))
            assert lot.windows[row, :, 1].tolist() == [count > 0 for count in counts]
            assert lot.moment[row, 1] == of[30 * ended : now].any()


def test_forecasts_follow_the_states() -> None:
    trainer = Recorder()
    calls: list[Calls] = [(1.0, {"a": 1, "b": 2} if second % 7 == 0 else {}) for second in range(61)]
    *_, (_, chances) = drive(lambda table: Lstm(table, trainer), calls)
    counts = np.array([[0] * 8 + [5, 4], [0] * 8 + [10, 8]], np.float32)
    windows = np.stack([np.log1p(counts), counts > 0], axis=2).astype(np.float32)
    own = np.repeat(trainer.parameters["embedding"][None], 2, 0)
    rates = np.array([sum(n * np.exp(-(60 - at) / 1800) for at in range(0, 61, 7)) for n in (1, 2)])
    moment = np.array([[np.log1p(4) / np.log1p(1800), 0, 1 / 30, np.log1p(rate) / 10] for rate in rates])
    odds = read_out(trainer.parameters, states(trainer.parameters, windows, own), moment)
    assert np.array([chances["a"], chances["b"]]) == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-5)


def test_in_the_forecaster() -> None:
    forecaster = Forecaster("lstm")
    for second in range(1, 200):
        forecaster.observe(MONDAY + second, {"a": 40} if second % 3 == 0 else {"b": 1} if second == 50 else {})
        found = forecaster.forecast(MONDAY + second)
        assert all(0 <= chance <= 1 for of in found.values() for chance in of)
    assert set(found) == {"a", "b"}
