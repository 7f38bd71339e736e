"""Errors of node pools; their texts are meant for the operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InfraError(Exception):
    """An error that the operator must know or fix; the message is complete."""


class TerraformMissing(InfraError):
    """No usable terraform or tofu on PATH."""


class StateLocked(InfraError):
    """Another command or person works on this state."""


class StateElsewhere(InfraError):
    """Terraform's state is in another place than the service file says; `move` is the command that moves it."""

    def __init__(self, move: str) -> None:
        super().__init__(
            "infra.state names another place than before, and the state still lies where it was. Set it back, or move "
            f"the state: `{move}`"
        )


class StalePlan(InfraError):
    """The saved plan is outdated, or there is none."""


class Unchanged(InfraError):
    """The work ended before anything was changed."""


class TerraformFailed(InfraError):
    """terraform failed; the message repeats its output."""


class Interrupted(InfraError):
    """Ctrl-C, or another signal: terraform has saved its state and ended."""


@contextmanager
def raised_as(kind: type[Exception], *caught: type[Exception]) -> Iterator[None]:
    """Raises exceptions of the types `caught` as `kind`, with the same text."""
    try:
        yield
    except caught as error:
        raise kind(str(error)) from error
