"""Errors of adapters and the registry, as types that callers map to their own replies.

Messages name what was wrong and may be shown to a user: they hold no paths, keys of other tenants or stack traces.
"""

from __future__ import annotations

import msgspec

MAX_PROBLEMS = 1000
"""Problems that one refusal lists; the rest is only counted, so that a hostile file can't make a huge reply."""


class Problem(msgspec.Struct, frozen=True):
    """Reason why an adapter is refused."""

    tensor: str
    """The tensor's name; `adapter_config.json#field` for the config; the file's name for a file that can't be read."""
    problem: str
    expected: str | None = None
    found: str | None = None


class AdapterError(Exception):
    """Root of every error that this package raises on purpose."""


class InvalidAdapter(AdapterError):
    """The adapter's files can't be served; `problems` (one at least) lists every reason that was found."""

    def __init__(self, problems: list[Problem], omitted: int = 0) -> None:
        """`problems` become the error's, MAX_PROBLEMS at most; `omitted`: how many further ones were only counted."""
        total = len(problems) + omitted
        self.problems = problems[:MAX_PROBLEMS]
        self.omitted = total - len(self.problems)
        """Further problems, only counted; the last of `problems` states their number."""
        if self.omitted:
            self.problems.append(Problem("...", f"{self.omitted} further problems are not listed"))
        first = problems[0]
        more = f" (and {total - 1} more problems)" if total > 1 else ""
        super().__init__(f"{first.tensor}: {first.problem}{more}")


class InvalidRequest(AdapterError):
    """A name, alias, policy or record that breaks the rules; `param` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class NotFound(AdapterError):
    """The function, version, alias, tenant or object does not exist (or belongs to someone else)."""


class NoSuchFunction(NotFound):
    """The tenant has no function of this name."""

    def __init__(self, tenant: str, function: str) -> None:
        super().__init__(f"there is no function {function[:100]!r}")
        self.tenant = tenant
        self.function = function


class Conflict(AdapterError):
    """The request contradicts what exists already: a name is taken, a limit reached, or something in use."""


class PreconditionFailed(AdapterError):
    """Someone else changed the object or function since the caller read it."""


class TooLarge(AdapterError):
    """A file exceeds a limit; `limit` is in bytes."""

    def __init__(self, message: str, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class StoreUnavailable(AdapterError):
    """The object store can't be reached, is full, or did not answer in time. The same call may work later."""


class CorruptRecord(StoreUnavailable):
    """A record in the registry is not readable: someone has to mend it."""


class CorruptFunction(CorruptRecord):
    """A function's own record is not readable; the message may be shown to its tenant."""

    def __init__(self, function: str) -> None:
        super().__init__(f"the record of function {function} is damaged: the operator restores it from a backup")


class InspectionBusy(AdapterError):
    """Adapters can't be inspected now; the same deploy may work later."""


class CorruptArtifact(AdapterError):
    """Bytes in the registry are not what was written there."""


class ArtifactPending(AdapterError):
    """A version's artifact for the present base is not made yet. The same call will work later."""

    def __init__(self, function: str, version: int) -> None:
        super().__init__(f"version {version} of function {function} is being made ready for the present base model")
        self.version = version
