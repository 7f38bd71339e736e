"""Which way of bf16 products is chosen from what was measured, and that it is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node_agent.runner import product_choice
from node_agent.runner.product_choice import COMPARED_ROWS, FEW_ROWS, MARGIN, choose_products, decide
from node_agent.runner.products import can_pack

SECONDS = st.floats(1e-4, 1.0)
NAMES = [f"few {rows}" for rows in sorted({1, *FEW_ROWS})] + [f"widened {rows}" for rows in (*FEW_ROWS, 128)]


def weights(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(96, 64).bfloat16() for _ in range(count)]


@given(
    times=st.fixed_dictionaries(dict.fromkeys((*NAMES, "attention bf16", "attention fp32"), SECONDS)),
    packed=st.none() | st.tuples(*(SECONDS for _ in COMPARED_ROWS)),
)
def test_no_row_is_slower_than_packed_weights_beyond_the_margin(
    times: dict[str, float], packed: tuple[float, ...] | None
) -> None:
    by_rows = dict(zip(COMPARED_ROWS, packed or (), strict=False))
    chosen = decide(times | {f"packed {rows}": seconds for rows, seconds in by_rows.items()})
    assert all(times[f"few {rows}"] <= times[f"widened {rows}"] for rows in FEW_ROWS if rows <= chosen.few)
    later = [rows for rows in FEW_ROWS if rows > chosen.few]
    assert not later or times[f"few {later[0]}"] > times[f"widened {later[0]}"]
    taken = {rows: times[f"{'few' if rows <= chosen.few else 'widened'} {rows}"] for rows in COMPARED_ROWS}
    if not by_rows:
        assert not chosen.packed
    elif not chosen.packed:
        assert all(taken[rows] <= MARGIN * by_rows[rows] for rows in COMPARED_ROWS)
    else:
        assert any(taken[rows] > by_rows[rows] for rows in COMPARED_ROWS)


def test_the_choice_is_measured_once_and_kept(tmp_path: Path) -> None:
    first = choose_products(weights(), tmp_path)
    assert first is not None
    (file,) = tmp_path.iterdir()
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"packed": False, "few": 7}))
    again = choose_products(weights(), tmp_path)
    assert again is not None
    assert (again.packed, again.few) == (False, 7)
    assert again.name == "bf16 to 7 rows, then fp32"
    assert len(list(tmp_path.iterdir())) == 1


def test_other_shapes_and_threads_are_measured_apart(tmp_path: Path) -> None:
    choose_products(weights(), tmp_path)
    choose_products([torch.randn(32, 64).bfloat16()], tmp_path)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        choose_products(weights(), tmp_path)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("content", [b"", b"{", b'{"packed": 1}', b"[" * 100_000])
def test_what_cannot_be_read_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    choose_products(weights(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert choose_products(weights(), tmp_path) is not None
    assert set(json.loads(file.read_text())) == {"packed", "few", "wide_attention", "milliseconds"}


def test_a_folder_that_cannot_be_written_costs_only_the_keeping(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert choose_products(weights(), tmp_path / "file" / "folder") is not None


def test_a_user_without_a_home_directory_has_a_choice_that_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert choose_products(weights()) is not None
    assert any(
        record.message == "matrix products are measured at every start: the result can't be stored"
        for record in caplog.records
    )


def test_a_choice_of_packed_weights_is_not_taken_where_they_can_not_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ONEDNN_MAX_CPU_ISA: the processor is the same, and oneDNN has fewer of its instructions."""
    choose_products(weights(), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"packed": True}))
    monkeypatch.setattr(product_choice, "can_pack", lambda: False)
    chosen = choose_products(weights(), tmp_path)
    assert chosen is not None
    assert not chosen.packed or not can_pack()


def test_only_bf16_on_a_cpu_has_a_choice(tmp_path: Path) -> None:
    assert choose_products([torch.randn(8, 8)], tmp_path) is None
    assert choose_products([], tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_packed_weights_are_compared_where_they_can_be_had(tmp_path: Path) -> None:
    choose_products(weights(), tmp_path)
    (file,) = tmp_path.iterdir()
    measured = json.loads(file.read_text())["milliseconds"]
    assert ("packed 1" in measured) is can_pack()
