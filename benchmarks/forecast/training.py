"""The first training of the forecasting network, in torch, from what those functions did that are not reported on.

It is trained further, in numpy, by `cluster.forecast.lstm_training`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from cluster.forecast.lstm_cells import EMBEDDING, FEATURES, MOMENT, UNITS, Parameters
from cluster.forecast.lstm_training import Observations, Trainer

BATCH = 128
LEARNING_RATE = 2e-3
UNSEEN_SHARE = 0.5
"""Share of a batch that counts as of new functions, so that the shared embedding is trained."""


class Recorder(Trainer):
    """Keeps all observations, and trains nothing."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.lots: list[Observations] = []

    def add(self, lot: Observations) -> None:
        self.lots.append(lot)

    def update(self) -> None:
        return None


class Network(nn.Module):
    """The network of cluster/forecast/lstm_cells.py, with an embedding of each function after the shared one."""

    def __init__(self, functions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + functions, EMBEDDING)
        self.layers = nn.LSTM(FEATURES + EMBEDDING, UNITS, 2, batch_first=True)
        self.readout = nn.Linear(UNITS + MOMENT, 4)

    def forward(self, windows: torch.Tensor, moment: torch.Tensor, function: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(function)[:, None].expand(-1, windows.shape[1], -1)
        states, _ = self.layers(torch.cat([windows, embedded], 2))
        odds: torch.Tensor = self.readout(torch.cat([states[:, -1], moment], 1))
        return odds

    def parameters_as_arrays(self) -> Parameters:
        layers, arrays = self.layers, dict[str, torch.Tensor]()
        for number, name in enumerate(("lower", "upper")):
            weights = [getattr(layers, f"weight_{kind}_l{number}") for kind in ("ih", "hh")]
            arrays[name] = torch.cat(weights, 1).T
            arrays[f"{name}_bias"] = getattr(layers, f"bias_ih_l{number}") + getattr(layers, f"bias_hh_l{number}")
        arrays |= {"readout": self.readout.weight.T, "readout_bias": self.readout.bias}
        arrays["embedding"] = self.embedding.weight[0]
        return {name: np.ascontiguousarray(value.detach().numpy()) for name, value in arrays.items()}


def train(lots: list[Observations], steps: int, seed: int) -> Parameters:
    """Returns the network's parameters after `steps` of Adam on batches of the observations."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    numbers: dict[str, int] = {}
    function = np.array([numbers.setdefault(key, 1 + len(numbers)) for lot in lots for key in lot.keys])
    windows, moment, arrived = (
        np.concatenate([getattr(lot, name) for lot in lots]) for name in ("windows", "moment", "outcomes")
    )
    network = Network(len(numbers))
    optimiser = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        batch = rng.integers(0, len(function), BATCH)
        embedding_index = np.where(rng.random(BATCH) < UNSEEN_SHARE, 0, function[batch])
        odds = network(*(torch.from_numpy(each) for each in (windows[batch], moment[batch], embedding_index)))
        loss = nn.functional.binary_cross_entropy_with_logits(odds, torch.from_numpy(arrived[batch]))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    return network.parameters_as_arrays()
