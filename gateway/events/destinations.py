"""Checks destinations of asynchronous calls when they are set, in a policy or a call: what can never be reached is
refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adapters.destinations import Destination, check_destination
from adapters.errors import NotFound
from adapters.functions import Policy, parse_policy
from cluster.errors import ServiceError
from gateway.catalog.callers import Callers
from gateway.catalog.functions import Functions
from gateway.http.errors import invalid
from gateway.webhook_hosts import NotAllowed, WebhookHosts, parse_webhook_hosts


@dataclass(frozen=True, kw_only=True)
class Destinations:
    """Allowed destinations of all tenants."""

    functions: Functions
    callers: Callers
    base_id: str
    hosts: Sequence[str]
    max_timeout: float

    async def check_policy(
        self, tenant: str, function: str, policy: Mapping[str, Any], *, within: str = "", aliases: Sequence[str] = ()
    ) -> None:
        """Checks the stated fields of a function's policy that may name something that does not exist here.

        `aliases`: aliases that the function gets together with the policy. `within`: prefix of the policy's fields in
        errors. Raises ServiceError `validation_failed`, InvalidRequest, StoreUnavailable.
        """
        stated = parse_policy(dict(policy), Policy(), within)
        if stated.timeout is not None and stated.timeout > self.max_timeout:
            field = f"{within}timeout"
            raise invalid(field, f"{field}: a call may take at most {self.max_timeout:g} s here")
        itself = {function, *(f"{function}:{alias}" for alias in aliases)}
        for field in ("on_success", "on_failure"):
            destination: Destination | None = getattr(stated, field)
            if destination is not None and destination.function not in itself:
                await self.check(tenant, destination, f"{within}{field}")

    async def check(self, tenant: str, destination: Destination, field: str) -> None:
        """Checks that the destination can be used.

        Its function must exist for the tenant or be the base model; its URL must have a host to which the tenant's
        webhooks may go.
        `field`: name of the field to state in errors. Raises InvalidRequest for a malformed destination. Raises
        ServiceError `validation_failed` for a missing function or a host that is not allowed, and StoreUnavailable.
        """
        check_destination(destination, field)
        if destination.webhook is not None:
            await self.check_host(tenant, destination.webhook, field)
            return
        name, _, qualifier = (destination.function or "").partition(":")
        if name == self.base_id and not qualifier:
            return
        try:
            await self.functions.choices(tenant, name, qualifier or None)
        except NotFound as error:
            raise invalid(f"{field}.function", f"{field}.function: {error}; deploy it first") from None

    async def check_host(self, tenant: str, url: str, field: str) -> None:
        """Checks that the tenant's webhooks may go to the host of a URL. Raises ServiceError `validation_failed`."""
        try:
            (await self.webhook_hosts(tenant)).check_url(url)
        except NotAllowed as error:
            raise ServiceError("validation_failed", str(error), param=f"{field}.webhook") from None

    async def webhook_hosts(self, tenant: str) -> WebhookHosts:
        """Returns the allowed hosts of the tenant's webhooks: those for all tenants, and its own. Raises
        StoreUnavailable."""
        tenant_hosts: tuple[str, ...] = ()
        with suppress(NotFound):  # the tenant is being removed, together with its calls
            tenant_hosts = (await self.callers.account(tenant)).webhook_hosts
        return parse_webhook_hosts((*self.hosts, *tenant_hosts))
