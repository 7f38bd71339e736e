"""Tables of how well calls are forecast."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import captioned_table
from benchmarks.common.rule import table, wrapped

SAMPLE = "InVitro's 500-function, 8-hour sample of the Azure 2019 trace"
DRAWN = "arrivals inside the minute drawn by us"
NAMES = {
    "last_window": "`last_window`", "ewma": "`ewma`", "seasonal": "`seasonal`", "histogram": "`histogram`",
    "lstm": "`lstm`", "mix": "`mix`", "mix_with_lstm": "`mix` with `lstm`",
}  # fmt: skip
SHOWN = ("ewma", "histogram", "mix")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
Row = dict[str, Any]


def function_table(document: dict[str, Any]) -> str:
    """Every predictor and horizon, with and without the busiest functions."""
    rows = _of(document, "function")
    with_busiest, without = ([row for row in rows if (row["without_top"] > 0) == rest] for rest in (False, True))
    text = (
        f"On {SAMPLE}; {DRAWN}. {document['settings']['functions'] // 2} functions on which nothing was chosen or "
        f"trained, {with_busiest[0]['forecasts']} forecasts; in brackets without those among the ten busiest."
    )
    cells = list[tuple[str, ...]]()
    for row, rest in zip(with_busiest, without, strict=True):
        if row["predictor"] == next(iter(NAMES)):
            never = f"{row['always_no']:.1%} ({rest['always_no']:.1%})"
            cells.append((f"{row['horizon_s']:g} s", "always no", "", "", never, "50.0% (50.0%)", ""))
        numbers = (f"{row[name]:.4f} ({rest[name]:.4f})" for name in ("log_loss", "brier"))
        shares = (f"{row[name]:.1%} ({rest[name]:.1%})" for name in ("accuracy", "balanced_accuracy"))
        area = f"{row['pr_area']:.3f} ({rest['pr_area']:.3f})"
        cells.append((f"{row['horizon_s']:g} s", NAMES[row["predictor"]], *numbers, *shares, area))
    head = ("horizon", "predictor", "log loss", "Brier", "accuracy", "balanced accuracy", "precision-recall area")
    return captioned_table(document, text, head, cells, _gains(document))


def _gains(document: dict[str, Any]) -> str:
    """Renders the gains of the mixture, and the calibration of its probabilities."""
    figures = document["figures"]
    mixed = [row for row in _of(document, "function") if row["predictor"] == "mix" and not row["without_top"]]
    horizons = [f"{row['horizon_s']:g}s" for row in mixed]
    parts = ", ".join(f"{figures[f'mix_over_best_part_{horizon}']:.3f}" for horizon in horizons)
    network = ", ".join(f"{figures[f'lstm_gain_{horizon}']:+.2%}" for horizon in horizons)
    errors = ", ".join(f"{row['calibration_error']:.2%}" for row in mixed)
    return (
        f"Log loss of `mix` over that of its best part, by horizon: {parts}. What `lstm` takes off it: {network}. What "
        f"`mix` says differs from what comes, in ten bins of probability, by {errors} in the mean."
    )


def popularity_table(document: dict[str, Any]) -> str:
    text = f"Within 30 s, by decile of popularity (1: the tenth that is called most), on {SAMPLE}; {DRAWN}."
    rows = _grouped(_of(document, "decile"), "decile")
    return "\n".join([wrapped(text), "", *_split("decile", [(str(key + 1), of) for key, of in rows.items()])])


def time_table(document: dict[str, Any]) -> str:
    """Renders tables by the hour of both traces, and by weekday."""
    blocks = []
    parts = (
        ("hour", "hour", f"Within 30 s, by hour, on {SAMPLE}; {DRAWN}."),
        ("day_hour", "hour", "Within 300 s, by three hours, on 41 clients of ServeGen's m-large: the second week; "
         "forecast each minute; arrivals inside ten minutes drawn by us."),
        ("weekday", "weekday", "The same by weekday, the trace's first day taken for a Monday: its date is not known."),
    )  # fmt: skip
    for kind, key, text in parts:
        rows = _grouped(_of(document, kind), key)
        name = WEEKDAYS.__getitem__ if key == "weekday" else str
        blocks += [wrapped(text), "", *_split(key, [(name(value), of) for value, of in rows.items()]), ""]
    return "\n".join(blocks[:-1])


def day_table(document: dict[str, Any]) -> str:
    text = (
        "Within 300 s, on 41 clients of ServeGen's m-large, the second week; forecast each minute; arrivals inside ten "
        "minutes drawn by us."
    )
    cells = (
        (
            NAMES[row["predictor"]], f"{row['log_loss']:.4f}", f"{row['brier']:.4f}",
            f"{row['accuracy']:.1%}, always no {row['always_no']:.1%}", f"{row['balanced_accuracy']:.1%}",
        )
        for row in _of(document, "day")
    )  # fmt: skip
    head = ("predictor", "log loss", "Brier", "accuracy", "balanced accuracy")
    return "\n".join([wrapped(text), "", *table(head, cells)])


def window_table(document: dict[str, Any]) -> str:
    minutes = document["settings"]["short_minutes"]
    text = (
        f"Within 30 s, by the length of a window, on {minutes} minutes of {SAMPLE}; {DRAWN}. The network sees ten "
        "windows and was trained once, for each length anew."
    )
    rows = sorted(_of(document, "window"), key=lambda row: row["window_s"])
    cells = [
        (
            f"{window:g} s",
            *(f"{row['accuracy']:.1%}, {row['log_loss']:.4f}" for row in rows if row["window_s"] == window),
        )
        for window in dict.fromkeys(row["window_s"] for row in rows)
    ]
    head = ("window", "`last_window`: accuracy, log loss", "`lstm`: accuracy, log loss")
    return "\n".join([wrapped(text), "", *table(head, cells)])


def drift_table(document: dict[str, Any]) -> str:
    minutes = document["settings"]["short_minutes"]
    text = (
        f"Log loss in the {minutes // 2} minutes after every function got the calls of another, on {SAMPLE}; {DRAWN}. "
        "Frozen: the network, calibration and weights stay as they were; what is known of single functions goes on."
    )
    cells = []
    for (horizon, predictor), of in _grouped(_of(document, "drift"), "horizon_s", "predictor").items():
        online, frozen = (next(row for row in of if row["frozen"] == is_frozen) for is_frozen in (False, True))
        losses = (f"{row['log_loss']:.4f}" for row in (online, frozen))
        cells.append((f"{horizon:g} s", NAMES[predictor], *losses))
    return "\n".join([wrapped(text), "", *table(("horizon", "predictor", "online", "frozen"), cells)])


def cost_table(document: dict[str, Any]) -> str:
    text = (
        "Processor time of a second (observing and forecasting), and resident memory with as many functions again that "
        "have left; `lstm` with its training."
    )
    cells = (
        (
            f"{NAMES[row['predictor']]}, {row['functions']}", f"{row['ms']:.1f} ms", f"{row['worst_ms']:.1f} ms",
            f"{row['ms'] / row['functions'] * 1000:.1f} ms", f"{row['mb']:.0f} MB",
        )
        for row in _of(document, "cost")
    )  # fmt: skip
    head = ("functions", "mean", "worst", "mean per 1,000", "memory")
    return "\n".join([wrapped(text), "", *table(head, cells)])


def _of(document: dict[str, Any], kind: str) -> list[Row]:
    return [row for row in document["rows"] if row["kind"] == kind]


def _grouped(rows: list[Row], *keys: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        values = tuple(row[key] for key in keys)
        groups.setdefault(values if len(keys) > 1 else values[0], []).append(row)
    return groups


def _split(key: str, parts: list[tuple[str, list[Row]]]) -> list[str]:
    """A line for each part: how often calls came, the accuracy of `mix`, log loss of those in SHOWN."""
    cells = []
    for name, rows in parts:
        by = {row["predictor"]: row for row in rows}
        mix = by["mix"]
        accuracy = f"{mix['accuracy']:.1%} ({mix['balanced_accuracy']:.1%}), {mix['always_no']:.1%}"
        cells.append((name, accuracy, *(f"{by[predictor]['log_loss']:.4f}" for predictor in SHOWN)))
    head = (key, "`mix`: accuracy (balanced), always no", *(f"log loss, {NAMES[name]}" for name in SHOWN))
    return table(head, cells)
