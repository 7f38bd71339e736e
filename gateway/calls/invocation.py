"""A checked call: prompt as tokens, sampling with all defaults filled in, ready to be sent to a node."""

from __future__ import annotations

import msgspec

from cluster.limits import Call
from cluster.messages import GenerateRequest
from gateway.catalog.functions import Target
from gateway.usage.meter import Meter


class Echo(msgspec.Struct, frozen=True):
    """A prompt that the text is to begin with."""

    text: str
    first_token: str
    """It has no log probability: nothing stands before it."""


class Invocation(msgspec.Struct, frozen=True):
    """One call; `requests` holds one entry per choice, those of a prompt one behind the other."""

    id: str
    tenant: str
    target: Target
    requests: list[GenerateRequest]
    received: float
    """Monotonic seconds at which the request's headers were there."""
    steps: dict[str, float]
    """Seconds of the steps before placement, for Server-Timing."""
    call: Call
    """What it takes of the tenant's and the function's limits."""
    meter: Meter
    request_id: str = ""
    """As in `x-request-id`."""
    choices: int = 1
    """Of each prompt."""
    echo: list[Echo] = []
    """Of each prompt, where the text is to begin with it."""

    def echo_of(self, index: int) -> Echo | None:
        """Returns what the text of the request at `index` begins with; None where nothing is to be echoed."""
        return self.echo[index // self.choices] if self.echo else None
