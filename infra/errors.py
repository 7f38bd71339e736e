"""Errors of node pools. Their messages are meant for the operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InfraError(Exception):
    """Base class of errors of node pools. The message can be shown to the operator without further context."""


class TerraformMissing(InfraError):
    """PATH has no terraform or tofu that can be used."""


class StateLocked(InfraError):
    """Another command or operator holds the lock of this state."""


class StateElsewhere(InfraError):
    """Terraform's state is not in the place that the service file names.

    `move` is the shell command that moves the state to that place.
    """

    def __init__(self, move: str) -> None:
        super().__init__(
            "infra.state names another place than before, and the state still lies where it was. Set it back, or move "
            f"the state: `{move}`"
        )


class StalePlan(InfraError):
    """The saved plan is outdated, or there is no saved plan."""


class Unchanged(InfraError):
    """The command failed before anything was changed."""


class TerraformFailed(InfraError):
    """terraform failed. The message contains its output."""


class Interrupted(InfraError):
    """The command was interrupted by Ctrl-C or another signal. terraform has saved its state and ended."""


@contextmanager
def raised_as(kind: type[Exception], *caught: type[Exception]) -> Iterator[None]:
    """Converts exceptions of the types `caught` into `kind`, with the same message, while the context runs."""
    try:
        yield
    except caught as error:
        raise kind(str(error)) from error
