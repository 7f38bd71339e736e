"""Batches in a real store, and gateways over it whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from adapters.local_store import LocalStore
from adapters.tenants import Tenant
from gateway.batches.files import FileRecord, FileStore, Part, new_id
from gateway.batches.forms import LineForm
from gateway.batches.lines import Line
from gateway.batches.messages import BatchRequest
from gateway.batches.records import BatchRecord, BatchStore
from gateway.batches.replies import Answer, LineReply
from gateway.batches.runner import BatchRunner

URL = "/v1/completions"
Reply = Callable[[str, Line], Awaitable[Answer]]


class Accounts:
    """Stands in for gateway.catalog.callers.Callers."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self.revoked: set[str] = set()

    async def account(self, tenant: str) -> Tenant:
        return Tenant(id=tenant, weight=self.weights.get(tenant, 1.0))

    async def is_valid(self, tenant: str | None, key_id: str) -> bool:
        return key_id not in self.revoked


async def any_form(_tenant: str, _endpoint: str, _form: LineForm) -> None:
    """Stands in for gateway.batches.forms.check_form."""


class World:
    """Batches in one store; gateways come and go."""

    def __init__(self, root: Path) -> None:
        self.store = LocalStore(root)
        self.files, self.batches = FileStore(self.store), BatchStore(self.store)
        self.accounts = Accounts()
        self.began: list[tuple[str, str]] = []
        """(gateway, custom id) of each call, as they begin."""
        self.room = 4.0
        self.unix = time.time

    def submit(self, tenant: str, models: list[str], key_id: str | None = None) -> BatchRecord:
        calls = [
            {"custom_id": f"{tenant}-{at}", "method": "POST", "url": URL, "body": {"model": model, "prompt": "x"}}
            for at, model in enumerate(models)
        ]
        content = b"".join(json.dumps(call).encode() + b"\n" for call in calls)
        file_id = new_id("file-", time.time())
        middle = len(content) // 2  # so that lines lie across parts
        parts = (
            self.files.put_part(tenant, file_id, "0", content[:middle]),
            self.files.put_part(tenant, file_id, "1", content[middle:]),
        )
        self.files.commit(tenant, FileRecord(file_id, "calls", "batch", time.time(), parts))
        return self.batches.create(tenant, BatchRequest(file_id, URL, "24h"), key_id, by_admin=False)

    @asynccontextmanager
    async def gateway(self, name: str, reply: Reply) -> AsyncIterator[BatchRunner]:
        under_way = 0

        async def spare(_: int) -> float:
            return self.room - under_way

        async def answer(tenant: str, endpoint: str, line: Line, request_id: str) -> Answer:
            nonlocal under_way
            self.began.append((name, line.custom_id))
            under_way += 1
            try:
                return await reply(name, line)
            finally:
                under_way -= 1

        async def unix() -> float:
            return self.unix()

        made = BatchRunner(
            self.batches, self.files, self.accounts, name=name, spare=spare,
            registry=CollectorRegistry(), clock=time.monotonic, unix=unix, check_form=any_form,
        )  # fmt: skip
        async with made.running(answer):
            yield made

    async def ended(self, batch: BatchRecord) -> BatchRecord:
        """The record of a batch that has ended, once its marker is gone, too."""
        await until(lambda: self.read(batch).ended and not self.is_listed(batch))
        return self.read(batch)

    def is_listed(self, batch: BatchRecord) -> bool:
        return any(marker.id == batch.id for marker in self.batches.open_batches())

    def read(self, batch: BatchRecord) -> BatchRecord:
        return self.batches.get(batch.tenant, batch.id)

    def lines(self, tenant: str, file_id: str, parts: tuple[Part, ...]) -> dict[str, Any]:
        if not parts:
            return {}
        record = self.files.get(tenant, file_id)
        text = self.files.read(tenant, record, 0, record.bytes)
        found = [json.loads(line) for line in text.splitlines()]
        assert len({line["custom_id"] for line in found}) == len(found), "none is there twice"
        return {line["custom_id"]: line for line in found}

    def outcome(self, record: BatchRecord) -> tuple[dict[str, Any], dict[str, Any]]:
        """Output and errors, by custom id."""
        return (
            self.lines(record.tenant, record.output_id, record.output),
            self.lines(record.tenant, record.error_id, record.errors),
        )


async def until(condition: Callable[[], bool]) -> None:
    """A test's own time limit bounds it."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def good(_: str, line: Line) -> Answer:
    return Answer(LineReply(200, b'{"said": "%s"}' % line.custom_id.encode(), "r"))


def failed(kind: str, status: int = 500, retry_after: float | None = None) -> Answer:
    return Answer(LineReply(status, b'{"error": {}}', "r"), kind, retry_after)
