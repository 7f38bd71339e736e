"""The operator's prices of usage, as numbers without a currency."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Price = Annotated[float, Meta(ge=0, le=1e9)]


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices by kind of usage; an omitted kind is free."""

    input_tokens_1m: Price = 0.0
    output_tokens_1m: Price = 0.0
    device_second: Price = 0.0
    adapter_gb_hour: Price = 0.0
    """Price of one GB (10^9 bytes) of an adapter for an hour in a node's memory. The price is the same for device and
    host memory, and for pinned and other copies."""
