"""The whole service with its registry in an S3 bucket: gateway, node and command line share nothing else."""

from __future__ import annotations

from pathlib import Path

from whole_service import MakeService

REGISTRY = "s3://garnish-tests/whole-service"
CALL = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def test_deploy_and_invoke(
    make_service: MakeService, s3_endpoint: str, stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    """One function is declared, one deployed while the service runs; a second start finds both, and the same keys."""
    declared = {"dragon": {"tenant": "acme", "adapter": str(stories_adapters["dragon"])}}
    service = make_service(stories_dir, declared, registry=REGISTRY).start()
    done = service.run("deploy", "late", str(stories_adapters["space"]), "--state", "state", "--tenant", "acme")
    assert done.returncode == 0, done
    with service.client("acme") as http:
        first = [http.post(f"/invoke/{name}", json=CALL).raise_for_status().json() for name in ("dragon", "late")]
    keys = service.credentials
    assert service.stop() == 0
    assert not (service.state / "registry").exists()
    service.start()
    with service.client("acme") as http:
        again = [http.post(f"/invoke/{name}", json=CALL).raise_for_status().json() for name in ("dragon", "late")]
    assert service.credentials == keys
    assert [reply["output"] for reply in again] == [reply["output"] for reply in first]
    assert [reply["version"] for reply in again] == [1, 1]
    assert service.stop() == 0
    assert "testing-secret" not in service.logs()


def test_a_bucket_that_is_not_there_ends_the_start(
    make_service: MakeService, s3_endpoint: str, stories_dir: Path
) -> None:
    service = make_service(stories_dir, registry="s3://garnish-no-such-bucket/x")
    done = service.run("up", "--port", str(service.port), "--state", "state")
    assert (done.returncode, done.stdout) == (1, "")
    assert "NoSuchBucket" in done.stderr
    assert "Traceback" not in done.stderr
