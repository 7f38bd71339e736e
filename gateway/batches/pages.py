"""Pages of lists, as OpenAI's clients ask for them: `limit`, `after` and `order`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request

from cluster.errors import ServiceError
from gateway.batches.files import is_id
from gateway.http.params import integer
from gateway.http.routing import Parameter, parameter


def page_parameters(max_entries: int) -> tuple[Parameter, ...]:
    return (
        parameter("query", "limit", "Most entries", {"type": "integer", "minimum": 1, "maximum": max_entries}),
        parameter("query", "after", "The last id of the page before"),
        parameter("query", "order", "By time of creation", {"enum": ["asc", "desc"], "default": "desc"}),
    )


class Page(msgspec.Struct, frozen=True):
    limit: int
    after: str | None
    newest_first: bool

    @classmethod
    def from_request(cls, request: Request, prefix: str, *, default: int, max_limit: int) -> Page:
        """Returns the page of a request; its ids begin with `prefix`. Raises ServiceError."""
        after, order = request.query_params.get("after"), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ServiceError("validation_failed", "order must be asc or desc", param="order")
        if after is not None and not is_id(after, prefix):
            raise ServiceError("validation_failed", "after must be the id of an entry", param="after")
        return cls(integer(request, "limit", default, 1, max_limit), after, order == "desc")

    def ids(self, all_ids: Sequence[str]) -> Sequence[str]:
        """Returns the ids from the page's start on, in the page's order. `all_ids`: newest first, which is the
        ascending order of ids."""
        if self.newest_first:
            return [each for each in all_ids if self.after is None or each > self.after]
        return [each for each in reversed(all_ids) if self.after is None or each < self.after]
