"""Errors of commands and of the client. The command line prints them as one line.

Any other exception that reaches the command line is a defect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_DETAILS = 20


class FrontDoorError(Exception):
    """A failure whose message is shown to the user of the command line."""

    def report(self) -> str:
        return str(self)


class ServiceFileError(FrontDoorError):
    """An error in serverless.yml. The message has the file, the line, the field and what was expected."""

    def __init__(self, file: Path, line: int | None, field: str, problem: str) -> None:
        where = f"{file}:{line}" if line is not None else str(file)
        super().__init__(f"{where}: {field + ': ' if field else ''}{problem}")
        self.file, self.line, self.field, self.problem = file, line, field, problem


class StartError(FrontDoorError):
    """The service can't be started. The message says what is missing and what to do."""


class GarnishError(FrontDoorError):
    """The service refused a request or could not be reached.

    The fields are those of the error reply. If the service could not be reached, `type` is `unreachable` and `status`
    is 0. `details` has one entry per problem if there are several.
    """

    def __init__(
        self,
        type: str,
        message: str,
        *,
        param: str | None = None,
        details: list[dict[str, Any]] | None = None,
        request_id: str | None = None,
        status: int = 0,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{type}: {message}")
        self.type, self.message, self.param, self.details = type, message, param, details or []
        self.request_id, self.status, self.retry_after = request_id, status, retry_after

    def report(self) -> str:
        """Returns the message followed by the details, each on a line. A single detail is on the message's line."""
        if len(self.details) == 1 and str(self).endswith(_problem(self.details[0])):
            return str(self) + _expected(self.details[0])
        shown = [f"\n  {_detail(entry)}" for entry in self.details[:MAX_DETAILS]]
        remaining = len(self.details) - len(shown)
        return str(self) + "".join(shown) + (f"\n  and {remaining} more" if remaining else "")


def _detail(entry: dict[str, Any]) -> str:
    return _problem(entry) + _expected(entry)


def _problem(entry: dict[str, Any]) -> str:
    return f"{entry.get('tensor') or entry.get('check')}: {entry.get('problem')}"


def _expected(entry: dict[str, Any]) -> str:
    return f" (expected {entry['expected']}, found {entry.get('found')})" if entry.get("expected") else ""
