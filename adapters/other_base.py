"""Recognises an adapter that was trained for another base model, so that one problem says so."""

from __future__ import annotations

from collections.abc import Iterable

from adapters.base_model import BaseModel
from adapters.errors import Problem
from adapters.peft_config import field_problem
from adapters.peft_format import PeftAdapter, TensorRef


def other_base_problem(
    adapter: PeftAdapter, base: BaseModel, pairs: Iterable[tuple[int, TensorRef | None, TensorRef | None]]
) -> Problem | None:
    """Returns the problem if not one targeted module has this base's widths; None if one fits or too little is known.

    `pairs`: projection, A [rank, d_in] and B [d_out, rank] of each targeted module, None for a tensor that is missing.
    """
    widths = {
        projection: (a.shape[1], b.shape[0])
        for projection, a, b in pairs
        if a is not None and b is not None and len(a.shape) == len(b.shape) == 2
    }
    if not widths or any(found == base.widths[projection] for projection, found in widths.items()):
        return None
    projection, found = next(iter(widths.items()))
    return field_problem(
        "base_model_name_or_path",
        f"trained for another base model, for no module has the widths of {base.id}; "
        "deploy it to a service with its own base_model",
        f"{base.widths[projection][0]} to {base.widths[projection][1]}",
        f"{adapter.config.get('base_model_name_or_path')}, {found[0]} to {found[1]}",
    )
