"""Gateway and node started one by one, and a service without keys."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from whole_service import MakeService, Service, eventually, pin_to_one_core

GREEDY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def answers(http: httpx.Client, path: str) -> bool:
    try:
        return http.get(path).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def running(service: Service, *arguments: str) -> Iterator[None]:
    with (service.folder / f"{arguments[0]}.txt").open("w") as output:
        command = pin_to_one_core(service.command(*arguments, "--state", "state"))
        process = subprocess.Popen(command, cwd=service.folder, stdout=output, stderr=output)
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()


def test_gateway_and_node_started_one_by_one(
    make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared)
    no_secret = service.run("node", "--gateway", service.url, "--state", "state")
    assert no_secret.returncode == 1
    assert "--secret-file" in no_secret.stderr
    with (
        running(service, "gateway", "--port", str(service.port)),
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        assert eventually(lambda: answers(http, "/healthz"), 60)
        assert http.get("/readyz").status_code == 503
        with running(service, "node", "--gateway", service.url, "--node-id", "gpu-1"):
            assert eventually(lambda: answers(http, "/readyz"), 60)
            deployed = service.run("deploy", "-f", "serverless.yml", "--state", "state", "--yes", "--json")
            assert [entry["function"] for entry in json.loads(deployed.stdout)["deployed"]] == ["dragon"]
            called = service.run("invoke", "dragon", "Once", "--max-tokens", "4", "--state", "state", "--json")
            assert json.loads(called.stdout)["usage"]["completion_tokens"] == 4


def test_without_keys(make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]) -> None:
    declared = {"dragon": {"adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared, ())
    file = service.folder / "serverless.yml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auth": "none"}))
    service.start()
    assert httpx.post(f"{service.url}/invoke/dragon", json=GREEDY, timeout=60).status_code == 200
    assert "key" not in (service.state / "credentials.toml").read_text().replace("[keys]", "")
    assert service.run("list", "--state", "state", "--no-header").stdout.startswith("dragon\t")
    assert service.stop() == 0
