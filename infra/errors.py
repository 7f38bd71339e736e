"""What goes wrong with node pools; the text is meant for the operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InfraError(Exception):
    """Something that the operator must know or mend; the message tells all of it."""


class TerraformMissing(InfraError):
    """No usable terraform or tofu on PATH."""


class StateLocked(InfraError):
    """Another command or person works on this state."""


class StateElsewhere(InfraError):
    """Terraform has its state in another place than the service file says now; `move` is the command that moves it."""

    def __init__(self, move: str) -> None:
        super().__init__(
            "infra.state names another place than before, and the state still lies where it was. Set it back, or move "
            f"the state: `{move}`"
        )


class StalePlan(InfraError):
    """The saved plan is not for what there is now, or there is none."""


class Unchanged(InfraError):
    """The work ended before anything was changed."""


class TerraformFailed(InfraError):
    """terraform ended with an error of its own; the message repeats what it said."""


class Interrupted(InfraError):
    """Ctrl-C, or another signal: terraform has saved its state and ended."""


@contextmanager
def raised_as(kind: type[Exception], *caught: type[Exception]) -> Iterator[None]:
    """Raises failures of the kinds `caught` as one of `kind` with the same text."""
    try:
        yield
    except caught as error:
        raise kind(str(error)) from error
