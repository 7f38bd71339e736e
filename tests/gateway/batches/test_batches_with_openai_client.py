"""Files and batches through the official client, as its users have it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from running_gateway import Running, until

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from gateway.batches.files import FileStore


@pytest.fixture
def client(deployed: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=deployed.keys["acme"], max_retries=0) as made:
        yield made


def call(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = {"model": "pirate", "prompt": f"Once {number}", "max_tokens": 1 + number % 5} | body
    return {"custom_id": f"call-{number}", "method": "POST", "url": url, "body": fields}


def jsonl(*calls: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in calls)


def submit(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions", **options: Any) -> Batch:
    uploaded = client.files.create(file=("calls.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """By custom id."""
    assert file_id is not None
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def test_runs_a_file_of_several_functions(client: openai.OpenAI) -> None:
    calls = [call(number, model=["pirate", "stories260K", "nobody"][number % 3]) for number in range(30)]
    made = submit(client, jsonl(*calls), metadata={"night": "1"})
    assert (made.status, made.metadata) == ("validating", {"night": "1"})
    batch = ended(client, made)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (30, 20, 10)
    good, bad = lines(client, batch.output_file_id), lines(client, batch.error_file_id)
    assert good.keys() | bad.keys() == {each["custom_id"] for each in calls}
    assert bad.keys() == {f"call-{number}" for number in range(2, 30, 3)}
    for number in range(0, 30, 3):
        response = good[f"call-{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == "".join(f" t{each}" for each in range(1 + number % 5))
    assert bad["call-2"]["response"]["status_code"] == 404
    assert bad["call-2"]["response"]["body"]["error"]["code"] == "model_not_found"


def test_conversations_run_as_best_effort(start: Callable[..., Running], stories_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "chatty"
    shutil.copytree(stories_dir, model)
    template = "{{ tools[0].function.name }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    chatty = start(model_dir=str(model))
    node = chatty.node()
    talk = call(0, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], model="stories260K")
    del talk["body"]["prompt"]
    talk["body"]["tools"] = [{"type": "function", "function": {"name": "find", "parameters": {}, "strict": True}}]
    with openai.OpenAI(base_url=f"{chatty.url}/v1", api_key=chatty.keys["acme"], max_retries=0) as client:
        batch = ended(client, submit(client, jsonl(talk), "/v1/chat/completions"))
        body = lines(client, batch.output_file_id)["call-0"]["response"]["body"]
    assert (body["object"], body["choices"][0]["message"]["content"]) == ("chat.completion", " t0")
    assert [asked.slo_class for asked in node.received] == ["best_effort"]
    grammar = node.received[0].sampling.grammar
    assert grammar is not None and '"find"' in grammar.text


def test_invocations_name_an_alias(client: openai.OpenAI) -> None:
    batch = ended(client, submit(client, jsonl(call(1, "/invoke", model="pirate:latest")), "/invoke"))
    body = lines(client, batch.output_file_id)["call-1"]["response"]["body"]
    assert (body["output"]["text"], body["function"]) == (" t0 t1", "pirate")


def test_wrong_lines_fail_a_batch_with_their_numbers(client: openai.OpenAI) -> None:
    content = jsonl(call(0), call(0), call(1, "/invoke")) + b"{\n\xff\n"
    batch = ended(client, submit(client, content))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None and batch.errors.data is not None
    assert [(problem.line, problem.code) for problem in batch.errors.data] == [
        (2, "duplicate_custom_id"), (3, "invalid_url"), (4, "invalid_json_line"), (5, "invalid_encoding"),
    ]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/invoke"])
def test_forms_are_kept(client: openai.OpenAI, deployed: Running, endpoint: str) -> None:
    forms = [{"structured_outputs": {"choice": ["a", f"b{number % 2}"]}} for number in range(4)]
    before = len(deployed.nodes[0].received)
    calls = [call(number, endpoint, **form) for number, form in enumerate(forms)]
    assert ended(client, submit(client, jsonl(*calls), endpoint)).status == "completed"
    asked = [request.sampling.grammar for request in deployed.nodes[0].received[before:]]
    assert sorted(grammar.text for grammar in asked if grammar) == ['["a", "b0"]'] * 2 + ['["a", "b1"]'] * 2


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
BAD_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMA}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": BAD_SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("endpoint", "bodies", "problems"),
    [
        (
            "/v1/completions",
            [{}, {"response_format": BAD_FORM}, {"response_format": {"type": "yaml"}}, {"response_format": BAD_FORM},
             {"structured_outputs": {"regex": "("}}, {"tools": [BAD_TOOL]}],
            [(2, "response_format", "at /properties/a"), (3, "response_format.type", "yaml"),
             (5, "structured_outputs", "unclosed"), (6, "tools", "on /v1/chat/completions")],
        ),
        ("/invoke", [{"structured_outputs": {}}], [(1, "structured_outputs", "state one of")]),
        (
            "/v1/chat/completions",
            [{"tools": [BAD_TOOL]}, {"tools": [BAD_TOOL], "tool_choice": "required"}, {"tool_choice": "required"}],
            [(1, "tools[0].function.parameters", "at /properties/a"), (2, "tools", "at /anyOf/0"),
             (3, "tool_choice", "no tools")],
        ),
    ],
)  # fmt: skip
def test_forms_that_cannot_be_kept_fail_a_batch(
    client: openai.OpenAI, deployed: Running, endpoint: str, bodies: list[Any], problems: list[tuple[int, str, str]]
) -> None:
    """A form is named once, by its first line. No call runs."""
    before = len(deployed.nodes[0].received)
    batch = ended(
        client, submit(client, jsonl(*(call(at, endpoint, **body) for at, body in enumerate(bodies))), endpoint)
    )
    assert batch.status == "failed"
    assert batch.errors is not None and batch.errors.data is not None
    found = batch.errors.data
    assert [(each.code, each.line, each.param) for each in found] == [
        ("invalid_form", line, f"body.{field}") for line, field, _ in problems
    ]
    assert all(part in (each.message or "") for each, (_, _, part) in zip(found, problems, strict=True)), found
    assert len(deployed.nodes[0].received) == before


def test_a_file_keeps_its_name(client: openai.OpenAI) -> None:
    file = client.files.create(file=("früh.jsonl", b"{}"), purpose="batch")
    assert file.filename == "früh.jsonl"
    client.files.delete(file.id)


def test_files_are_listed_read_and_deleted(client: openai.OpenAI, deployed: Running) -> None:
    content = bytes(range(256)) * (9 << 12)  # 9 MiB: more than a part
    known = {file.id for file in client.files.list()}
    made = [client.files.create(file=(f"{number}.jsonl", content), purpose="batch") for number in range(3)]
    assert [(file.bytes, file.filename, file.purpose) for file in made[:1]] == [(9 << 20, "0.jsonl", "batch")]
    assert client.files.content(made[0].id).read() == content
    assert {file.id for file in client.files.list(limit=10_000)} == known | {file.id for file in made}
    listed = [file.id for file in client.files.list(limit=2) if file.id not in known]
    assert listed == [file.id for file in reversed(made)], "pages follow one another, the newest first"
    oldest = [file.id for file in client.files.list(limit=2, order="asc") if file.id not in known]
    assert oldest == [file.id for file in made]
    with openai.OpenAI(base_url=client.base_url, api_key=deployed.keys["other"], max_retries=0) as other:
        assert list(other.files.list()) == []
        for act in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                act(made[0].id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=made[0].id, endpoint="/v1/completions", completion_window="24h")
    for file in made:
        assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    registry = Path(deployed.config.registry)
    assert not [path for file in made for path in registry.rglob(f"*{file.id}*")]


@pytest.mark.parametrize("file_id", ["file-", "file-../../x", "../admin", "file-" + "g" * 27, "batch_" + "0" * 27])
def test_no_id_leaves_the_tenant_s_files(client: openai.OpenAI, file_id: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")


def test_refused_uploads_leave_nothing(
    client: openai.OpenAI, deployed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(deployed.config.registry) / "data" / "acme"
    before = {path for path in data.rglob("*") if path.is_file()} - {data / "file_sizes.json"}
    monkeypatch.setattr("gateway.batches.upload.PART_BYTES", 1000)
    monkeypatch.setattr("gateway.batches.upload.MAX_FILE_BYTES", 100_000)
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("x", b"x" * 100_001), purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError) as purpose:
        client.files.create(file=("x", b"x" * 5000), purpose="fine-tune")
    assert purpose.value.param == "purpose"
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    monkeypatch.setattr("gateway.batches.file_quota.MAX_FILES", 0)
    with pytest.raises(openai.ConflictError):
        client.files.create(file=("x", b"x"), purpose="batch")
    assert {path for path in data.rglob("*") if path.is_file()} - {data / "file_sizes.json"} == before


def test_a_tenant_s_files_have_so_many_bytes_at_most(deployed: Running) -> None:
    admin = deployed.client("admin")
    assert admin.put("/tenants/small", json={"file_bytes": 3000}).json()["file_bytes"] == 3000
    key = admin.post("/tenants/small/keys").json()["key"]
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=key, max_retries=0) as client:
        first = client.files.create(file=("x", b"x" * 2000), purpose="batch")
        with pytest.raises(openai.ConflictError, match="may have 3000 bytes of files") as full:
            client.files.create(file=("x", b"x" * 2000), purpose="batch")
        assert (full.value.code, full.value.type) == ("conflict", "invalid_request_error")
        client.files.delete(first.id)
        second = client.files.create(file=("x", b"x" * 2000), purpose="batch")
        admin.put("/tenants/small", json={"file_bytes": 1000}).raise_for_status()
        with pytest.raises(openai.ConflictError, match="with 0 more has 2000; delete some first"):
            client.batches.create(input_file_id=second.id, endpoint="/v1/completions", completion_window="24h")
        admin.put("/tenants/small", json={}).raise_for_status()
        client.batches.create(input_file_id=second.id, endpoint="/v1/completions", completion_window="24h")


def test_a_batch_goes_by_the_registry_s_clock(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the gateway's host is days ahead of it."""
    monkeypatch.setattr(LocalStore, "now", lambda _: time.time() - 3 * 86400)
    ahead = start()
    ahead.node()
    with openai.OpenAI(base_url=f"{ahead.url}/v1", api_key=ahead.keys["acme"], max_retries=0) as client:
        batch = ended(client, submit(client, jsonl(call(0, model="stories260K"))))
    assert (batch.status, batch.in_progress_at and batch.in_progress_at < batch.expires_at) == ("completed", True)


def test_batches_are_listed_and_cancelled(client: openai.OpenAI) -> None:
    batch = ended(client, submit(client, jsonl(call(0))))
    assert next(iter(client.batches.list(limit=1))).id == batch.id
    assert client.batches.retrieve(batch.id).output_file_id == batch.output_file_id
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_removed_tenant_leaves_no_files(deployed: Running) -> None:
    admin = deployed.client("admin")
    assert admin.put("/tenants/gone", json={}).status_code == 201
    key = admin.post("/tenants/gone/keys").json()["key"]
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=key, max_retries=0) as client:
        ended(client, submit(client, jsonl(call(0, model="stories260K"))))
    assert (Path(deployed.config.registry) / "data" / "gone").exists()
    assert admin.delete("/tenants/gone").status_code == 204
    assert not (Path(deployed.config.registry) / "data" / "gone").exists()


def test_an_upload_leaves_nothing_of_a_tenant_that_is_removed_meanwhile(deployed: Running) -> None:
    admin = deployed.client("admin")
    assert admin.put("/tenants/brief", json={}).status_code == 201
    key = admin.post("/tenants/brief/keys").json()["key"]
    form = [
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--b--\r\n',
    ]

    stored = Path(deployed.config.registry) / "data" / "brief"

    def body() -> Iterator[bytes]:
        yield form[0]
        until(stored.exists)  # the upload has begun
        assert admin.delete("/tenants/brief").status_code == 204
        yield form[1]

    headers = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=b"}
    assert deployed.client(None).post("/v1/files", content=body(), headers=headers).status_code == 404
    assert not stored.exists()


def test_a_file_of_a_store_that_is_away_is_refused_before_its_headers(
    deployed: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = deployed.client()
    uploaded = client.post("/v1/files", files={"file": ("calls.jsonl", b"{}\n"), "purpose": (None, "batch")}).json()

    def fail(*_: object) -> bytes:
        raise StoreUnavailable("away")

    monkeypatch.setattr(FileStore, "read", fail)
    refused = client.get(f"/v1/files/{uploaded['id']}/content")
    assert refused.status_code == 503 and "retry-after" in refused.headers
    monkeypatch.undo()
    assert client.get(f"/v1/files/{uploaded['id']}/content").content == b"{}\n"
