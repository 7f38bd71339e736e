"""The link's arithmetic against a simulation that moves the bytes from event to event, and against plain bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.report import load
from benchmarks.link_bytes.link_bytes import SHAPES, TARGETS, study
from benchmarks.link_bytes.model import LayerBytes, Shape, Targets, best_group, first_token
from tests.benchmarks.studies import run_study

SIZE = st.integers(1, 5000)
DRAWN = {"layers": st.integers(1, 8), "seconds": st.integers(1, 50), "weights": SIZE, "up": SIZE, "down": SIZE,
         "rate": st.integers(1, 500)}  # fmt: skip


class Played:
    """The same call as flows that share the link, from the end of one of them to the next."""

    def __init__(self, order: list[int], weights: float, rate: float) -> None:
        self.clock, self.coming, self._left = 0.0, order, [weights] * len(order)
        self._rate = rate

    def step(self, work: dict[str, float]) -> dict[str, float]:
        """Goes on to the next end; returns what is left of `work`: seconds of computation, bytes up and down."""
        flows = work | ({"load": self._left[0]} if self.coming else {})
        sharing = len({"down", "load"} & set(flows))
        speeds = {"compute": 1.0, "up": self._rate}
        speeds |= {name: self._rate / sharing for name in ("down", "load") if sharing}
        step = min(amount / speeds[name] for name, amount in flows.items())
        self.clock += step
        flows = {name: amount - step * speeds[name] for name, amount in flows.items()}
        if self.coming:
            self._left[0] = flows.pop("load")
            if self._left[0] < 1e-6:
                self.coming.pop(0)
                self._left.pop(0)
        return {name: amount for name, amount in flows.items() if amount > 1e-9}


def played(layers: int, seconds: float, size: LayerBytes, rate: float, group: int) -> float:
    call = Played([*range(group, layers), *range(group)], size.weights, rate)
    for layer in range(layers):
        assisted = layer < group and layer in call.coming
        while not assisted and layer in call.coming:
            call.step({})
        work = {"compute": seconds} | ({"up": size.up, "down": size.down} if assisted else {})
        while work:
            work = call.step(work)
    return call.clock


@given(**DRAWN)
def test_every_group_as_flows_have_it(layers: int, seconds: int, weights: int, up: int, down: int, rate: int) -> None:
    size = LayerBytes(weights, up, down)
    times = [played(layers, seconds, size, rate, group) for group in range(layers + 1)]
    assert [first_token(layers, seconds, size, rate, group) for group in range(layers + 1)] == pytest.approx(times)
    best, group = best_group(layers, seconds, size, rate)
    assert best == pytest.approx(min(times))
    assert times[group] == pytest.approx(best)
    assert best >= layers * seconds


def test_a_call_by_hand() -> None:
    """Two layers of 1 s. The second's 10 bytes come at 2 bytes/s beside the first's results: 2 bytes in 2 s, in which
    the weights get 2; the other 8 take 4 s."""
    assert first_token(2, 1.0, LayerBytes(10, 1, 2), 2.0, 1) == 2 + 4 + 1
    assert first_token(2, 1.0, LayerBytes(10, 1, 2), 2.0, 0) == 5 + 5 + 1
    assert best_group(2, 1.0, LayerBytes(10, 1, 2), 2.0) == (4, 2)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_border_is_where_results_outweigh_weights(shape: Shape, targets: Targets) -> None:
    """Bytes as the matrices of an adapter have them, written out."""
    d, kv, mlp = shape.width, shape.kv_width, shape.mlp_width
    matrices = [(d, d), (d, kv), (d, kv), (d, d), (d, mlp), (d, mlp), (mlp, d)][: 3 if targets == "q,k,v" else 7]
    weights = sum(2 * 8 * d_in + 2 * 8 * d_out for d_in, d_out in matrices)
    border = 8 * shape.border(targets)
    below, above = (shape.layer_bytes(targets, 8, tokens) for tokens in (int(border), int(border) + 1))
    assert below.weights == above.weights == weights
    assert below.down <= weights < above.down
    assert above.down == (int(border) + 1) * sum(2 * d_out for _, d_out in matrices)
    assert above.up == (int(border) + 1) * 2 * (d if targets == "q,k,v" else 3 * d + mlp)


def test_the_study_writes_a_whole_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    run_study(monkeypatch, "link_bytes.link_bytes", "--quick", "--seed", "3", "--json", str(file))
    document = json.loads(file.read_text())
    assert (document["study"], document["seed"]) == ("link_bytes", 3)
    assert {row["part"] for row in document["rows"]} == {"border", "links", "settings"}


def test_the_committed_report_is_what_the_code_computes() -> None:
    committed, made = load("link_bytes"), study(quick=False, seed=0)
    assert (made["rows"], made["figures"]) == (committed["rows"], committed["figures"])
