"""Service level objective of a simulation, written as `tpt=1.5x` or `ttft=500ms,tpot=60ms`."""

from __future__ import annotations

import re

import msgspec

from cluster.performance_model import counted_rank
from garnish.simulation.job import Job
from garnish.simulation.profile import NodeProfile

REFERENCE_ROWS, REFERENCE_PROMPT, REFERENCE_OUTPUT = 16, 256, 128
"""Number of rows of the batch, of prompt tokens and of output tokens, for which `base_tpt` computes the TPT.

An SLO such as `tpt=1.5x` is a multiple of that TPT.
"""
DEFAULT_SLO = "tpt=1.5x"
_PART = re.compile(r"(ttft|tpot|tpt)=(\d+(?:\.\d+)?)(ms|s|x)")


class SloError(ValueError):
    """The text is not an SLO. The message says what was expected."""


class Slo(msgspec.Struct, frozen=True):
    """Upper bounds for a request in seconds; None means no bound."""

    ttft: float | None = None
    tpot: float | None = None
    tpt: float | None = None

    def holds(self, job: Job, overhead: float) -> bool:
        """Returns True if a finished request met the SLO.

        `overhead` is the seconds before its first token that the simulation leaves out.
        """
        return self._hold(job.ttft + overhead, job.tpot, job.tpt + overhead / job.output)

    def attainable(self, job: Job, profile: NodeProfile) -> bool:
        """Returns True if an empty node with the adapter loaded would meet the SLO for this request.

        If it would not, no policy can meet the SLO.
        """
        model, steps = profile.performance, job.output - 1
        of_prompt = counted_rank(job.rank, model.prefill.padded_rank)
        ttft = profile.overhead + model.prefill.seconds(job.prompt, job.prompt**2, job.prompt * of_prompt)
        in_step = counted_rank(job.rank, model.decode.padded_rank)
        decode = steps * model.decode.seconds(1, 0, in_step) + model.decode.per_context * (
            steps * job.prompt + steps * (steps - 1) // 2
        )
        return self._hold(ttft, decode / max(1, steps), (ttft + decode) / job.output)

    def _hold(self, ttft: float, tpot: float, tpt: float) -> bool:
        promised = ((self.ttft, ttft), (self.tpot, tpot), (self.tpt, tpt))
        return all(bound is None or time <= bound for bound, time in promised)

    @property
    def per_token(self) -> float | None:
        """TPOT SLO in seconds that is used for routing: `tpot`, else `tpt`, else None."""
        return self.tpot if self.tpot is not None else self.tpt


def base_tpt(profile: NodeProfile) -> float:
    """Returns the seconds per token of the base model without adapters, in a batch of REFERENCE_ROWS rows."""
    model = profile.performance
    contexts = REFERENCE_ROWS * (REFERENCE_PROMPT + REFERENCE_OUTPUT // 2)
    prefill = model.prefill.seconds(REFERENCE_PROMPT, REFERENCE_PROMPT**2, 0)
    decode = model.decode.seconds(REFERENCE_ROWS, contexts, 0)
    return (prefill + (REFERENCE_OUTPUT - 1) * decode) / REFERENCE_OUTPUT


def parse_slo(text: str, profile: NodeProfile) -> Slo:
    """Returns the SLO in a text such as `ttft=500ms,tpot=60ms`. Raises SloError."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or match[1] in bounds or float(match[2]) <= 0:
            raise SloError(f"SLO {text!r}: expected {DEFAULT_SLO!r}, or bounds such as 'ttft=500ms,tpot=60ms'")
        if match[3] == "x" and match[1] != "tpt":
            raise SloError(f"SLO {text!r}: only tpt can be a multiple of the base's")
        unit = {"ms": 1e-3, "s": 1.0, "x": base_tpt(profile)}[match[3]]
        bounds[match[1]] = float(match[2]) * unit
    return Slo(**bounds)
