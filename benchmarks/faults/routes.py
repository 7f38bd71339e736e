"""A request for each route of the gateway's API document, for studies that call all of them.

`REQUESTS` has one entry for each method and path of `gateway/openapi.json`; a test compares the two.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE

FUNCTION, TENANT, NODE, ALIAS = "a0", "bench", "node-1", "prod"
CALL = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
LINE = {"custom_id": "1", "method": "POST", "url": "/invoke", "body": {"model": FUNCTION, **CALL}}


@dataclass
class Names:
    """Names and ids that requests use: of what earlier requests made, or unknown ones."""

    adapter: Path
    draw: random.Random
    ids: dict[str, list[str]] = field(default_factory=dict)
    """ids by the name of their path parameter, oldest first"""
    count: int = 0
    """number of new names so far"""

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"

    def any(self, parameter: str) -> str:
        """Returns an id that some request has made, or one that was never made."""
        existing = self.ids.get(parameter, [])
        return self.draw.choice(existing) if existing else "unknown-1"


@dataclass(frozen=True)
class Request:
    """HTTP request of a route."""

    path: str
    json: Any = None
    form: Callable[[], aiohttp.FormData] | None = None
    """makes a multipart body; each attempt needs a new one"""
    headers: Mapping[str, str] = field(default_factory=dict)
    admin: bool = False
    makes: str = ""
    """what a 2xx reply has made: the kind by which the study checks later that it is still there"""
    name: str = ""


def _upload(names: Names) -> Callable[[], aiohttp.FormData]:
    def form() -> aiohttp.FormData:
        fields = aiohttp.FormData()
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            fields.add_field(file, (names.adapter / file).read_bytes(), filename=file)
        return fields

    return form


def _calls_file() -> aiohttp.FormData:
    fields = aiohttp.FormData({"purpose": "batch"})
    fields.add_field("file", json.dumps(LINE).encode(), filename="calls.jsonl")
    return fields


def _deploy(names: Names) -> Request:
    name = names.new("f")
    return Request(f"/deploy/{name}", form=_upload(names), makes="function", name=name)


def _invoke(names: Names) -> Request:
    if names.draw.random() < 0.5:
        return Request(f"/invoke/{FUNCTION}", CALL | {"stream": names.draw.random() < 0.5})
    headers = {"idempotency-key": names.new("k")}
    return Request(f"/invoke/{FUNCTION}", CALL | {"background": True}, headers=headers, makes="event")


def _tenant(names: Names) -> Request:
    name = names.new("t")
    return Request(f"/tenants/{name}", {"weight": 2}, admin=True, makes="tenant", name=name)


def _file(_: Names) -> Request:
    return Request("/v1/files", form=_calls_file, makes="file")


def _batch(names: Names) -> Request:
    order = {"input_file_id": names.any("file_id"), "endpoint": "/invoke", "completion_window": "24h"}
    return Request("/v1/batches", order, makes="batch")


def _fixed(path: str, body: Any = None, *, admin: bool = False, makes: str = "") -> Callable[[Names], Request]:
    """Returns a builder for a path whose `{parameters}` are ids made before."""

    def build(names: Names) -> Request:
        filled = path
        for parameter in ("id", "file_id", "batch_id", "key_id", "secret_id", "deleted"):
            if f"{{{parameter}}}" in path:
                filled = filled.replace(f"{{{parameter}}}", names.any(parameter))
        return Request(filled, body, admin=admin, makes=makes)

    return build


def _admin(path: str, body: Any = None, makes: str = "") -> Callable[[Names], Request]:
    return _fixed(path, body, admin=True, makes=makes)


_OF_FUNCTION, _OF_TENANT, _OF_NODE = f"/functions/{FUNCTION}", f"/tenants/{TENANT}", f"/nodes/{NODE}"
REQUESTS: dict[tuple[str, str], Callable[[Names], Request]] = {
    ("post", "/invoke/{target}"): _invoke,
    ("get", "/invocations"): _fixed("/invocations"),
    ("get", "/invocations/{id}"): _fixed("/invocations/{id}"),
    ("delete", "/invocations/{id}"): _fixed("/invocations/unknown-1"),
    ("get", "/dead-letters"): _fixed("/dead-letters"),
    ("post", "/dead-letters/{id}/redrive"): _fixed("/dead-letters/{id}/redrive"),
    ("post", "/dead-letters/redrive"): _fixed("/dead-letters/redrive"),
    ("get", "/v1/models"): _fixed("/v1/models"),
    ("get", "/v1/models/{id}"): _fixed(f"/v1/models/{FUNCTION}"),
    ("post", "/v1/completions"): _fixed("/v1/completions", {"model": FUNCTION, "prompt": "Once", "max_tokens": 4}),
    ("post", "/v1/chat/completions"): _fixed("/v1/chat/completions", {"model": FUNCTION, **CHAT}),
    ("post", "/v1/files"): _file,
    ("get", "/v1/files"): _fixed("/v1/files"),
    ("get", "/v1/files/{file_id}"): _fixed("/v1/files/{file_id}"),
    ("delete", "/v1/files/{file_id}"): _fixed("/v1/files/unknown-1"),
    ("get", "/v1/files/{file_id}/content"): _fixed("/v1/files/{file_id}/content"),
    ("post", "/v1/batches"): _batch,
    ("get", "/v1/batches"): _fixed("/v1/batches"),
    ("get", "/v1/batches/{batch_id}"): _fixed("/v1/batches/{batch_id}"),
    ("post", "/v1/batches/{batch_id}/cancel"): _fixed("/v1/batches/unknown-1/cancel"),
    ("post", "/tokenize"): _fixed("/tokenize", {"model": FUNCTION, "prompt": "Once upon a time"}),
    ("post", "/detokenize"): _fixed("/detokenize", {"model": FUNCTION, "tokens": [1, 2, 3]}),
    ("post", "/deploy/{name}"): _deploy,
    ("get", "/functions"): _fixed("/functions"),
    ("get", "/functions/{name}"): _fixed(_OF_FUNCTION),
    ("patch", "/functions/{name}"): _fixed(_OF_FUNCTION, {"retries": 2}),
    ("delete", "/functions/{name}"): _fixed("/functions/{deleted}", makes="deleted"),
    ("get", "/functions/{name}/versions"): _fixed(f"{_OF_FUNCTION}/versions"),
    ("get", "/functions/{name}/versions/{version}"): _fixed(f"{_OF_FUNCTION}/versions/1"),
    ("delete", "/functions/{name}/versions/{version}"): _fixed(f"{_OF_FUNCTION}/versions/99"),
    ("get", "/functions/{name}/aliases/{alias}"): _fixed(f"{_OF_FUNCTION}/aliases/{ALIAS}"),
    ("put", "/functions/{name}/aliases/{alias}"): _fixed(f"{_OF_FUNCTION}/aliases/{ALIAS}", {"version": 1}),
    ("post", "/functions/{name}/rollback"): _fixed(f"{_OF_FUNCTION}/rollback", {"alias": ALIAS}),
    ("post", "/functions/{name}/warm"): _fixed(f"{_OF_FUNCTION}/warm", {"tier": "device", "copies": 1}),
    ("get", "/functions/{name}/forecast"): _fixed(f"{_OF_FUNCTION}/forecast"),
    ("post", "/v1/load_lora_adapter"): _fixed(
        "/v1/load_lora_adapter", {"lora_name": FUNCTION, "lora_path": "/unknown", "load_inplace": True}
    ),
    ("post", "/v1/unload_lora_adapter"): _fixed("/v1/unload_lora_adapter", {"lora_name": "unknown-1"}),
    ("get", "/"): _fixed("/"),
    ("get", "/ping"): _fixed("/ping"),
    ("get", "/version"): _fixed("/version"),
    ("get", "/healthz"): _fixed("/healthz"),
    ("get", "/health"): _fixed("/health"),
    ("get", "/readyz"): _fixed("/readyz"),
    ("get", "/metrics"): _admin("/metrics"),
    ("get", "/nodes"): _admin("/nodes"),
    ("get", "/nodes/{id}/adapters"): _admin(f"{_OF_NODE}/adapters"),
    ("post", "/nodes/{id}/prefetch"): _admin(f"{_OF_NODE}/prefetch", {"function": f"{TENANT}/{FUNCTION}"}),
    ("post", "/nodes/{id}/evict"): _admin(f"{_OF_NODE}/evict", {"function": f"{TENANT}/{FUNCTION}"}),
    ("post", "/nodes/{id}/drain"): _admin("/nodes/unknown-1/drain"),
    ("post", "/nodes/{id}/undrain"): _admin(f"{_OF_NODE}/undrain"),
    ("get", "/pools"): _admin("/pools"),
    ("put", "/pools/autoscaler"): _admin("/pools/autoscaler", {"holder": "fuzz", "seconds": 1}),
    ("get", "/tenants/{tenant}"): _admin(_OF_TENANT),
    ("put", "/tenants/{tenant}"): _tenant,
    ("delete", "/tenants/{tenant}"): _admin("/tenants/unknown-1"),
    ("post", "/tenants/{tenant}/keys"): _admin(f"{_OF_TENANT}/keys", makes="key"),
    ("delete", "/tenants/{tenant}/keys/{key_id}"): _admin(f"{_OF_TENANT}/keys/unknown-1"),
    ("post", "/tenants/{tenant}/webhook-secrets"): _admin(f"{_OF_TENANT}/webhook-secrets"),
    ("get", "/tenants/{tenant}/webhook-secrets"): _admin(f"{_OF_TENANT}/webhook-secrets"),
    ("delete", "/tenants/{tenant}/webhook-secrets/{secret_id}"): _admin(f"{_OF_TENANT}/webhook-secrets/{{secret_id}}"),
    ("get", "/usage"): _admin("/usage"),
    ("get", "/explain/{id}"): _fixed("/explain/{id}"),
    ("get", "/console"): _fixed("/console"),
}
"""Builder of a request for each method and path."""
