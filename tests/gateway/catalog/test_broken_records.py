"""One function whose record can't be read: it says so, and the others are served and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from running_gateway import Running

from adapters.local_store import LocalStore
from adapters.standing import function_key

TOLD = "the record of function b is damaged: the operator restores it from a backup"


def test_a_broken_function_does_not_hide_the_others(gateway: Running, pirate: dict[str, Any]) -> None:
    client, store = gateway.client(), LocalStore(Path(gateway.config.registry))
    for name in ("a", "b", "c"):
        assert client.post(f"/deploy/{name}", files=pirate).status_code == 201
    whole = store.get(function_key("acme", "b")).data
    for broken in (b"", whole[:-7], b"[]", b'{"name": 5}'):
        store.put(function_key("acme", "b"), broken)
        listed = client.get("/functions").json()["functions"]
        assert [(entry["name"], entry["error"]) for entry in listed] == [("a", None), ("b", TOLD), ("c", None)]
        assert [entry["versions"] for entry in listed] == [[1], [], [1]]
        models = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert "b" not in models
        assert {"a", "c"} <= set(models)
        reply = client.get("/functions/b")
        assert (reply.status_code, reply.json()["error"]["message"]) == (500, TOLD)
    page = client.get("/functions", params={"limit": 2}).json()
    assert ([entry["name"] for entry in page["functions"]], page["next"]) == (["a", "b"], "b")
    store.put(function_key("acme", "b"), whole)
    assert client.get("/functions").json()["functions"][1]["error"] is None
