"""Records what replies have acknowledged in benchmarks/faults/gone.py, and finds what is missing at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import httpx

from benchmarks.common.http_service import HttpService
from benchmarks.faults.routes import TENANT, Request
from gateway.batches.messages import ENDED as BATCH_ENDED
from gateway.events.records import ENDED as EVENT_ENDED

DELETED_SHARE = 3
"""Number of deployed functions of which one may be deleted again."""
REST_S = 300.0
"""Seconds within which all must have ended: what a killed worker ran is queued again two minutes later."""


@dataclass
class Acknowledged:
    """Names and ids by kind."""

    by_kind: dict[str, list[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(map(len, self.by_kind.values()))

    def add(self, request: Request, text: str, ids: dict[str, list[str]]) -> None:
        """Records what a 2xx reply has made. Adds its id to the ids that later requests use."""
        reply = json.loads(text) if text else {}
        value: str = {"function": request.name, "tenant": request.name, "deleted": request.path.rpartition("/")[2]}.get(
            request.makes, ""
        ) or reply["key" if request.makes == "key" else "id"]
        if request.makes == "function" and int(value.rpartition("-")[2]) % DELETED_SHARE == 0:
            ids.setdefault("deleted", []).append(value)
            return
        self.by_kind.setdefault(request.makes, []).append(value)
        parameter = {"event": "id", "file": "file_id", "batch": "batch_id"}.get(request.makes)
        if parameter:
            ids.setdefault(parameter, []).append(value)


def lost(service: HttpService, acknowledged: Acknowledged) -> list[str]:
    """Returns what was acknowledged and is not there, as `kind name: status`, after REST_S at most."""
    deadline = time.monotonic() + REST_S
    missing: list[str] = []
    with service.client(timeout=60) as client, service.client(admin=True, timeout=60) as admin:
        checks: dict[str, Callable[[str], str]] = {
            "function": lambda name: _status(client, f"/functions/{name}"),
            "deleted": lambda name: _status(client, f"/functions/{name}", 404),
            "tenant": lambda name: _status(admin, f"/tenants/{name}"),
            "key": lambda key: _with_key(service, key),
            "file": lambda name: _status(client, f"/v1/files/{name}/content"),
            "event": lambda name: _ended(client, f"/invocations/{name}", "state", EVENT_ENDED, deadline),
            "batch": lambda name: _ended(client, f"/v1/batches/{name}", "status", BATCH_ENDED, deadline),
        }
        for kind, check in checks.items():
            for name in acknowledged.by_kind.get(kind, ()):
                if problem := check(name):
                    missing.append(f"{kind} {name if kind != 'key' else TENANT}: {problem}")
    return missing


def _status(client: httpx.Client, path: str, expected: int = 200) -> str:
    """Returns an empty text if a path has the expected status; else its status."""
    status = client.get(path).status_code
    return "" if status == expected else str(status)


def _with_key(service: HttpService, key: str) -> str:
    with httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        return _status(client, "/functions")


def _ended(client: httpx.Client, path: str, name: str, ended: Collection[str], deadline: float) -> str:
    """Waits until a record has ended. Returns an empty text, or what it is instead."""
    while True:
        reply = client.get(path)
        state = reply.json().get(name, "") if reply.status_code == 200 else str(reply.status_code)
        if state in ended:
            return ""
        if time.monotonic() > deadline or reply.status_code == 404:
            return str(state)
        time.sleep(0.2)
