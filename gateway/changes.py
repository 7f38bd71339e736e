"""Keeps a gateway worker's caches up to date with changes by itself, by other workers, and in the registry."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

import msgspec

from adapters.epoch import Mark, mark
from adapters.errors import StoreUnavailable
from adapters.standing import function_key
from adapters.store import ObjectStore
from cluster.errors import ServiceError
from gateway.calls.active_calls import ActiveCalls
from gateway.calls.explanations import Explanations
from gateway.catalog.callers import Callers
from gateway.catalog.functions import Functions
from gateway.catalog.threads import StoreThreads
from gateway.residency.residency import Residency
from gateway.workers.called import CalledDigests
from gateway.workers.peers import (
    CallsRevoked,
    DigestCalled,
    ExplanationAnswered,
    ExplanationAsked,
    FunctionChanged,
    Message,
    Peers,
    TenantChanged,
)

log = logging.getLogger("gateway")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Publishes changes to other workers, and invalidates caches."""

    store: ObjectStore
    threads: StoreThreads
    callers: Callers
    functions: Functions
    residency: Residency
    running: ActiveCalls
    called: CalledDigests
    explanations: Explanations
    peers: Peers

    def tenant_changed(self, tenant: str) -> None:
        """Forgets cached data of a tenant after any change to it or its keys."""
        self._forget_tenant(tenant)
        self.peers.publish(TenantChanged(tenant))

    def function_changed(self, tenant: str, function: str) -> None:
        """Forgets cached data of a function after any change to it by this process."""
        self.callers.forget(tenant)  # the tenant's record contains its functions' reservations
        self.residency.forget(tenant, function)
        self.peers.publish(FunctionChanged(tenant, function))

    async def revoke(self, tenant: str, function: str, why: str) -> None:
        """Ends the function's generations on all workers.

        Workers that Redis does not reach read the revocation in the registry's epoch within a second.
        """
        number = secrets.token_hex(8)
        self._end_calls(tenant, function, why, number)
        self.peers.publish(CallsRevoked(tenant, function, why, number))
        try:
            await self.threads.write(mark, self.store, function_key(tenant, function), why, number)
        except StoreUnavailable as error:
            log.error(
                "gateways without Redis may continue calls of a deleted function: the registry can't be written",
                extra={"why": str(error)},
            )

    def read_mark(self, mark: Mark) -> None:
        """Forgets the record that a mark in the registry's epoch names."""
        match mark.key.split("/"):
            case ["tenants", tenant, "functions", name, _]:
                self.functions.forget(tenant, name)
                self.residency.forget(tenant, name)
                if mark.ended:
                    self._end_calls(tenant, name, mark.ended, mark.id)
            case ["tenants", tenant, _]:
                self._forget_tenant(tenant)
            case _:
                self.callers.forget(None)

    def forget_all(self) -> None:
        """Forgets all records, if more may have changed than the registry's epoch shows."""
        self.functions.forget_all()
        self.callers.forget_all()

    def receive(self, message: Message) -> None:
        """Handles a message from another worker."""
        match message:
            case FunctionChanged(tenant, function):
                self.functions.forget(tenant, function)
                self.callers.forget(tenant)
                self.residency.forget(tenant, function)
            case TenantChanged(tenant):
                self._forget_tenant(tenant)
            case CallsRevoked(tenant, function, why, number):
                self._end_calls(tenant, function, why, number)
            case DigestCalled(tenant, digest):
                self.called.record(tenant, digest)
            case ExplanationAsked(number, call, tenant):
                explained = self.explanations.find(call, tenant)
                if explained is not None:
                    self.peers.publish(ExplanationAnswered(number, msgspec.json.encode(explained.reply())))
            case ExplanationAnswered(number, reply):
                self.peers.answer(number, reply)

    def _end_calls(self, tenant: str, function: str, why: str, number: str) -> None:
        self.running.cancel(tenant, function, ServiceError("cancelled", why), number)

    def _forget_tenant(self, tenant: str) -> None:
        self.callers.forget(tenant)
        self.functions.forget_tenant(tenant)
