"""The operator's prices of usage: numbers without a currency."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Price = Annotated[float, Meta(ge=0, le=1e9)]


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices by kind of usage; a kind that is left out is free."""

    input_tokens_1m: Price = 0.0
    """A million tokens of prompts."""
    output_tokens_1m: Price = 0.0
    device_second: Price = 0.0
    adapter_gb_hour: Price = 0.0
    """A GB of an adapter for an hour in a node's memory, device or host, pinned or not."""
