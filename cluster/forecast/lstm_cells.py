"""Forward and backward passes of the network: two LSTM layers and a readout (Predictive-LoRA, section III.A).

The input of a step is the features of a window of calls and the function's embedding. After the last step, the readout
gets the upper layer's state and what has been observed since the window ended.
"""

from __future__ import annotations

import numpy as np

from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.table import Array

UNITS = 64
EMBEDDING = 16
FEATURES = 2
"""Number of features of a window: log(1 + calls), and whether there was a call."""
MOMENT = 4
"""Number of inputs at the time of a forecast; `lstm.Lstm._moment` describes them."""
SHAPES = {
    "lower": (FEATURES + EMBEDDING + UNITS, 4 * UNITS),
    "lower_bias": (4 * UNITS,),
    "upper": (UNITS + UNITS, 4 * UNITS),
    "upper_bias": (4 * UNITS,),
    "readout": (UNITS + MOMENT, len(HORIZONS_S)),
    "readout_bias": (len(HORIZONS_S),),
    "embedding": (EMBEDDING,),
}
"""Shapes of the parameters. In a layer's matrix, the rows of its input precede those of its state. The gates are side
by side: input, forget, cell, output. `embedding` is the one of new functions."""

Parameters = dict[str, Array]


def draw_parameters(rng: np.random.Generator) -> Parameters:
    """Returns random f32 parameters, uniform within +-1 / sqrt(UNITS)."""
    bound = 1 / np.sqrt(UNITS)
    return {name: rng.uniform(-bound, bound, shape).astype(np.float32) for name, shape in SHAPES.items()}


def states(parameters: Parameters, windows: Array, embedding: Array) -> Array:
    """Returns the upper layer's state [n, UNITS] of n functions after the last step. `windows` is [n, steps, FEATURES];
    `embedding` is [n, EMBEDDING]."""
    zero: Array = np.zeros((len(windows), UNITS), windows.dtype)
    lower = upper = zero, zero
    for step in range(windows.shape[1]):
        below = np.concatenate([windows[:, step], embedding], axis=1)
        lower = _cell(parameters, "lower", below, *lower)[:2]
        upper = _cell(parameters, "upper", lower[0], *upper)[:2]
    return upper[0]


def read_out(parameters: Parameters, state: Array, moment: Array) -> Array:
    """Returns the log-odds [n, horizons] of calls of n functions. `state` is [n, UNITS]; `moment` is [n, MOMENT]."""
    odds: Array = np.concatenate([state, moment], axis=1) @ parameters["readout"] + parameters["readout_bias"]
    return odds


def loss_and_gradients(
    parameters: Parameters, windows: Array, embedding: Array, moment: Array, outcomes: Array
) -> tuple[float, Parameters, Array]:
    """Returns the loss, its gradients by the arrays in `parameters`, and its gradient [n, EMBEDDING] by the argument
    `embedding`. The loss is the mean cross-entropy over functions and horizons. The gradients lack the key `embedding`
    of `parameters`. `outcomes` is [n, horizons], 0 or 1."""
    tape: list[tuple[_Tape, _Tape]] = []
    zero: Array = np.zeros((len(windows), UNITS), windows.dtype)
    lower = upper = zero, zero
    for step in range(windows.shape[1]):
        below = np.concatenate([windows[:, step], embedding], axis=1)
        state, cell, lower_tape = _cell(parameters, "lower", below, *lower)
        lower = state, cell
        state, cell, upper_tape = _cell(parameters, "upper", state, *upper)
        upper = state, cell
        tape.append((lower_tape, upper_tape))
    odds = read_out(parameters, upper[0], moment)
    loss = float(np.mean(np.logaddexp(0, odds) - outcomes * odds))
    by_odds = (1 / (1 + np.exp(-odds)) - outcomes) / odds.size
    gradients = {name: np.zeros_like(parameters[name]) for name in SHAPES if name != "embedding"}
    gradients["readout"] += np.concatenate([upper[0], moment], axis=1).T @ by_odds
    gradients["readout_bias"] += by_odds.sum(axis=0)
    by_embedding = _backward(parameters, tape, by_odds @ parameters["readout"][:UNITS].T, gradients)
    return loss, gradients, by_embedding


_Tape = tuple[Array, Array, Array, Array]
"""Values that the backward pass needs of one step of one layer: input and state, previous cell, the four gates, tanh of
the new cell."""


def _cell(parameters: Parameters, layer: str, below: Array, state: Array, cell: Array) -> tuple[Array, Array, _Tape]:
    """Computes one step of a layer. Returns the layer's new state and cell, and the values that `_backward` needs."""
    inputs = np.concatenate([below, state], axis=1)
    gates = inputs @ parameters[layer] + parameters[f"{layer}_bias"]
    for begin, end in ((0, 2), (3, 4)):
        part = gates[:, begin * UNITS : end * UNITS]
        part[:] = 0.5 + 0.5 * np.tanh(0.5 * part)  # the logistic function, without overflow
    np.tanh(gates[:, 2 * UNITS : 3 * UNITS], out=gates[:, 2 * UNITS : 3 * UNITS])
    let_in, keep, new, show = np.split(gates, 4, axis=1)
    next_cell = keep * cell + let_in * new
    shown = np.tanh(next_cell)
    return show * shown, next_cell, (inputs, cell, gates, shown)


def _backward(parameters: Parameters, tape: list[tuple[_Tape, _Tape]], by_state: Array, gradients: Parameters) -> Array:
    """Adds the layers' gradients to `gradients`, starting from the gradient of the upper layer's last state. Returns
    the gradients of the embeddings."""
    zero = np.zeros_like(by_state)
    by_upper, by_upper_cell, by_lower, by_lower_cell = by_state, zero, zero, zero
    by_embedding = np.zeros((len(by_state), EMBEDDING), by_state.dtype)
    for lower, upper in reversed(tape):
        by_seen, by_upper_cell = _cell_backward(parameters, "upper", upper, (by_upper, by_upper_cell), gradients)
        by_upper = by_seen[:, UNITS:]
        into_lower = by_lower + by_seen[:, :UNITS]
        by_seen, by_lower_cell = _cell_backward(parameters, "lower", lower, (into_lower, by_lower_cell), gradients)
        by_lower = by_seen[:, FEATURES + EMBEDDING :]
        by_embedding += by_seen[:, FEATURES : FEATURES + EMBEDDING]
    return by_embedding


def _cell_backward(
    parameters: Parameters, layer: str, tape: _Tape, by_behind: tuple[Array, Array], gradients: Parameters
) -> tuple[Array, Array]:
    """Returns the gradients of a step's input (with the previous state) and of the previous cell. `by_behind` has the
    gradients of the step's state and cell. Adds the gradients of the layer's parameters to `gradients`."""
    inputs, cell, gates, shown = tape
    let_in, keep, new, show = np.split(gates, 4, axis=1)
    by_state, by_cell = by_behind
    by_cell = by_cell + by_state * show * (1 - shown**2)
    by_gates = np.concatenate(
        [
            by_cell * new * let_in * (1 - let_in),
            by_cell * cell * keep * (1 - keep),
            by_cell * let_in * (1 - new**2),
            by_state * shown * show * (1 - show),
        ],
        axis=1,
    )
    gradients[layer] += inputs.T @ by_gates
    gradients[f"{layer}_bias"] += by_gates.sum(axis=0)
    return by_gates @ parameters[layer].T, by_cell * keep
