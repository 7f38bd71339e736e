"""Errors of adapters and the registry, which callers map to their own replies.

Messages say what was wrong and may be shown to a user. They contain no paths, stack traces or keys of other tenants.
"""

from __future__ import annotations

import msgspec

MAX_PROBLEMS = 1000
"""Maximum number of problems listed in one refusal. Further ones are only counted, so that a hostile file can't cause a
huge reply."""


class Problem(msgspec.Struct, frozen=True):
    """A single reason why an adapter is refused."""

    tensor: str
    """Source of the problem: a tensor's name, `adapter_config.json#field` for the config, or the name of an unreadable
    file."""
    problem: str
    expected: str | None = None
    found: str | None = None


class AdapterError(Exception):
    """Base class of all errors that this package raises on purpose."""


class InvalidAdapter(AdapterError):
    """The adapter's files can't be served. `problems` (at least one) has the reasons."""

    def __init__(self, problems: list[Problem], omitted: int = 0) -> None:
        """Creates the error with `problems`, MAX_PROBLEMS of them at most. `omitted` is the number of further problems
        that were only counted."""
        total = len(problems) + omitted
        self.problems = problems[:MAX_PROBLEMS]
        self.omitted = total - len(self.problems)
        """Number of problems that are not listed; the last one of `problems` states it."""
        if self.omitted:
            self.problems.append(Problem("...", f"{self.omitted} further problems are not listed"))
        first = problems[0]
        more = f" (and {total - 1} more problems)" if total > 1 else ""
        super().__init__(f"{first.tensor}: {first.problem}{more}")


class InvalidRequest(AdapterError):
    """A name, alias, policy or record breaks the rules. `param` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class NotFound(AdapterError):
    """The function, version, alias, tenant or object does not exist, or belongs to another tenant."""


class NotCallable(NotFound):
    """There is nothing to call by this name and qualifier. `called`: both, as `name:qualifier`."""

    def __init__(self, called: str, message: str) -> None:
        super().__init__(message)
        self.called = called


class NoSuchFunction(NotCallable):
    """The tenant has no function of this name. `meant`: the name that was probably meant."""

    def __init__(self, tenant: str, function: str, meant: str | None = None) -> None:
        hint = f"; did you mean {meant!r}?" if meant else ""
        super().__init__(function, f"there is no function {function[:100]!r}{hint}")
        self.tenant = tenant
        self.function = function


class Conflict(AdapterError):
    """The request conflicts with existing state: a name is taken, a limit is reached, or an object is in use."""


class PreconditionFailed(AdapterError):
    """Another writer has changed the object or function since the caller read it."""


class TooLarge(AdapterError):
    """A file is larger than `limit`, in bytes."""

    def __init__(self, message: str, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class StoreUnavailable(AdapterError):
    """The object store can't be reached, is full, or did not answer in time. Retrying the call may succeed."""


class StoreFull(StoreUnavailable):
    """There is no room to store anything, or the disk is read-only. What was to be stored was not; reads still work.
    Retrying the call succeeds once the operator has made room."""


class CorruptRecord(StoreUnavailable):
    """A record in the registry is unreadable: an operator has to repair it."""


class CorruptFunction(CorruptRecord):
    """A function's record is unreadable. The message may be shown to its tenant."""

    def __init__(self, function: str) -> None:
        super().__init__(f"the record of function {function} is damaged: the operator restores it from a backup")


class InspectionBusy(AdapterError):
    """Adapters can't be inspected now. Retrying the deploy may succeed."""


class CorruptArtifact(AdapterError):
    """Stored bytes in the registry differ from what was written."""


class ArtifactPending(AdapterError):
    """A version's artifact for the current base is not built yet. Retrying the call later will succeed."""

    def __init__(self, function: str, version: int) -> None:
        super().__init__(f"version {version} of function {function} is being made ready for the present base model")
        self.version = version
