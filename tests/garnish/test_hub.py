"""`hf:org/name` with the real client library, against a Hub on loopback and a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from garnish import hub
from garnish.config import load_service_file
from garnish.errors import GarnishError
from garnish.hub import local_folder, parse_place
from tests.garnish.forked_download import downloading
from tests.garnish.hub_server import EXPIRED, Hub, running_hub

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
COMMAND = hub.COMMAND
USE = "garnish deploy mine {}"


@pytest.fixture(scope="module")
def forked() -> Iterator[tuple[str, ...]]:
    with downloading() as command:
        yield command


@pytest.fixture
def server(tmp_path: Path, forked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(hub, "COMMAND", forked)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    with running_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


@pytest.fixture
def files(stories_adapters: dict[str, Path]) -> dict[str, bytes]:
    folder = stories_adapters["dragon"]
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def told(adapter: str) -> str:
    with pytest.raises(GarnishError) as caught:
        local_folder(adapter, USE)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_only_the_two_files_are_fetched_and_the_cache_serves_when_the_hub_is_away(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processes as a user has them."""
    monkeypatch.setattr(hub, "COMMAND", COMMAND)
    server.models["acme/dragon"] = {**files, "README.md": b"#", "optimizer.pt": bytes(100)}
    folder = local_folder("hf:acme/dragon", USE)
    assert {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)} == files
    assert sorted(server.sent) == sorted(files)
    assert local_folder("hf:acme/dragon", USE) == folder
    assert len(server.sent) == 2, "the second time they are in the cache"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert local_folder("hf:acme/dragon", USE) == folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert local_folder("hf:acme/dragon", USE) == folder


def test_a_folder_in_a_repository(server: Hub, files: dict[str, bytes]) -> None:
    server.models["acme/run"] = {f"checkpoint-20/{name}": content for name, content in files.items()}
    assert (local_folder("hf:acme/run/checkpoint-20", USE) / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert told("hf:acme/run") == (
        "hf:acme/run holds no adapter itself, only 1 checkpoint; the newest: "
        "garnish deploy mine hf:acme/run/checkpoint-20"
    )


def test_what_is_not_there(server: Hub, files: dict[str, bytes]) -> None:
    server.models["acme/dragon"] = files
    assert told("hf:acme/unicorn") == (
        "hf:acme/unicorn: the Hub has no such model, or it is private: check the name; for a private one set HF_TOKEN"
    )
    assert told("hf:acme/dragon@v2") == "hf:acme/dragon@v2: the Hub has no revision v2 of it"


@pytest.mark.parametrize("name", ["acme/dra--gon", "acme/dragon.git", "acme/dragon-", f"acme/{'x' * 120}"])
def test_names_that_the_hub_does_not_allow(server: Hub, name: str) -> None:
    assert told(f"hf:{name}") == f"hf:{name}: {name} is not a valid name on the Hub: check it"


def test_a_download_that_breaks_off(server: Hub, files: dict[str, bytes]) -> None:
    server.models["acme/dragon"] = files
    server.breaks_off = True
    assert told("hf:acme/dragon").endswith("try again")


def test_repositories_of_something_else_are_told_without_a_download(server: Hub) -> None:
    server.models["acme/whole"] = {"config.json": b"{}", "model.safetensors": bytes(8), ".gitattributes": b""}
    server.models["acme/old"] = {CONFIG: b"{}", "adapter_model.bin": bytes(8)}
    assert told("hf:acme/whole").startswith("hf:acme/whole holds a whole model (config.json and its weights), not an")
    old = told("hf:acme/old")
    assert old.startswith("hf:acme/old: old holds adapter_model.bin, a pickle, which is never read")
    assert old.endswith("' old (after: hf download acme/old --local-dir old)")
    assert server.sent == []


def test_a_gated_repository_and_its_token(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models["acme/gated"] = files
    server.gated.add("acme/gated")
    for token in (None, "hf_secret_but_wrong"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        assert told("hf:acme/gated") == (
            "hf:acme/gated: gated: accept its terms at https://huggingface.co/acme/gated, "
            "and set HF_TOKEN or run `hf auth login`"
        )
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert (local_folder("hf:acme/gated", USE) / WEIGHTS).read_bytes() == files[WEIGHTS]


def test_a_token_that_is_not_valid_is_told_and_not_shown(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models["acme/dragon"] = files
    monkeypatch.setenv("HF_TOKEN", EXPIRED)
    line = told("hf:acme/dragon")
    assert line == (
        "hf:acme/dragon: the Hub answers 401: the token in HF_TOKEN, or of `hf auth login`, is not valid there"
    )
    assert EXPIRED not in line


@pytest.mark.parametrize(("name", "size"), [(CONFIG, (1 << 20) + 1), (WEIGHTS, (512 << 20) + 1)])
def test_sizes_are_bounded_before_anything_is_fetched(
    server: Hub, files: dict[str, bytes], name: str, size: int
) -> None:
    server.models["acme/huge"] = files
    server.stated_sizes[name] = size
    assert f"{name} has {size} bytes; at most {size - 1} are fetched" in told("hf:acme/huge")
    assert server.sent == []


def test_neither_hub_nor_cache(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    line = told("hf:acme/dragon")
    assert line.startswith("hf:acme/dragon: it is not in the local cache, and the Hugging Face Hub can't be reached (")
    assert line.endswith("where it is reached: hf download acme/dragon")


def test_the_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "COMMAND", ("sleep", "60"))
    monkeypatch.setattr(hub, "MAX_SECONDS", 0.2)
    assert told("hf:acme/dragon") == "hf:acme/dragon: not fetched within 0 s"


@pytest.mark.parametrize(
    "written", ["hf:", "hf:dragon", "hf:../x", "hf:acme/..", "hf:acme/x/../../y", "hf:acme/x@", "hf:a/b c", "hf:/a/b"]
)
def test_what_is_no_place_is_refused(written: str) -> None:
    with pytest.raises(GarnishError, match="expected hf:org/name"):
        parse_place(written)


def test_a_service_file_names_one(server: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    server.models["acme/dragon"] = files
    (tmp_path / "serverless.yml").write_text(
        "service: s\nbase_model: models/stories260K\nfunctions:\n"
        "  dragon: {adapter: 'hf:acme/dragon'}\n  other: {adapter: 'hf:acme/other'}\n"
    )
    service = load_service_file(tmp_path / "serverless.yml")
    assert service.adapter_files("dragon").weights.read_bytes() == files[WEIGHTS]
    with pytest.raises(GarnishError, match="the Hub has no such model"):
        service.adapter_files("other")
