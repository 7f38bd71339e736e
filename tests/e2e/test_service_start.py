"""How `garnish up` starts: again with the same keys, and not at all with a clear reason."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
from pathlib import Path

from whole_service import MakeService, Service, service_file

from garnish.logs import times_ended


def refused(service: Service, *arguments: str) -> str:
    """What a start that must fail says; everything it started has ended by then."""
    done = service.run("up", "--port", str(service.port), "--state", "state", *arguments)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr


def rewrite(service: Service, model: Path, **functions: dict[str, str]) -> None:
    (service.folder / "serverless.yml").write_text(service_file(model, functions, ("acme", "globex"), "float32"))


def test_second_start_keeps_the_keys(
    make_service: MakeService, stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    """Text output this time: keys are shown by the first start alone, and both curl lines work when pasted. While it
    runs, no other one can use its state."""
    service = make_service(stories_dir, {"space": {"tenant": "acme", "adapter": str(stories_adapters["space"])}})
    shown, pasted = _up_and_paste(service)
    assert "another `garnish up` or `garnish gateway` uses" in refused(service)
    assert service.stop() == 0
    keys = service.credentials
    assert keys["admin_key"] in shown
    assert all(key in shown for key in keys["keys"].values())
    assert json.loads(pasted)["function"] == "space"

    again, pasted = _up_and_paste(service)
    assert service.stop() == 0
    assert service.credentials == keys
    assert "gak_" not in again
    assert "gsk_" not in again
    assert "credentials.toml" in again
    assert json.loads(pasted)["version"] == 1
    assert stat.S_IMODE(service.state.stat().st_mode) == 0o700
    assert stat.S_IMODE((service.state / "credentials.toml").stat().st_mode) == 0o600
    assert stat.S_IMODE((service.state / "cluster.secret").stat().st_mode) == 0o600
    for log in service.state.glob("logs/*"):
        assert "gsk_" not in log.read_text()
        assert "gak_" not in log.read_text()


def _up_and_paste(service: Service) -> tuple[str, str]:
    """What `garnish up` printed, and what its curl line answered."""
    process = service.spawn()
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.lstrip().startswith("-d "):
            break
    else:
        raise AssertionError((service.folder / "err.txt").read_text())
    command = "".join(lines[lines.index("try:\n") + 1 :])
    pasted = subprocess.run(["bash", "-c", command], cwd=service.folder, capture_output=True, text=True, timeout=60)
    return "".join(lines), pasted.stdout


def test_port_in_use(make_service: MakeService, stories_dir: Path) -> None:
    service = make_service(stories_dir)
    with socket.create_server(("127.0.0.1", service.port)):
        assert f"port {service.port} on 127.0.0.1 is in use" in refused(service)


def test_base_model_that_is_not_there(make_service: MakeService, tmp_path: Path) -> None:
    service = make_service(tmp_path / "nothing")
    assert "make demo-model" in refused(service)


def test_mistake_in_the_service_file(make_service: MakeService, stories_dir: Path) -> None:
    service = make_service(stories_dir)
    (service.folder / "serverless.yml").write_text("service: x\nbase_model: .\nnodes: {}\n")
    assert refused(service).endswith(
        "garnish: serverless.yml:3: nodes: unknown key; did you mean `node`? expected one of service, base_model, "
        "registry, auth, gateway, node, tenants, functions, node_pools, infra, prices\n"
    )


def test_adapter_that_is_not_there(make_service: MakeService, stories_dir: Path, tmp_path: Path) -> None:
    service = make_service(stories_dir, {"nothing": {"tenant": "acme", "adapter": str(tmp_path)}})
    assert "functions.nothing.adapter" in refused(service)


def test_adapter_that_is_refused_ends_the_start(
    make_service: MakeService, stories_dir: Path, smollm_adapters: dict[str, Path]
) -> None:
    """Every process that was started has ended, and the reason is the validation's."""
    wrong = str(next(iter(smollm_adapters.values())))
    service = make_service(stories_dir, {"wrong": {"tenant": "acme", "adapter": wrong}})
    told = refused(service)
    assert "functions.wrong: validation_failed" in told
    with socket.create_server(("127.0.0.1", service.port)):
        pass


def test_engine_that_cannot_start_ends_the_start(make_service: MakeService, stories_dir: Path) -> None:
    """Ends at the first refusal, with the engine's own reason."""
    service = make_service(stories_dir)
    file = service.folder / "serverless.yml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "node": {"device": "cpu", "kv_memory": "1B"}}))
    told = refused(service).splitlines()[-1]
    assert told.startswith("garnish: node-1 can't start: engine can't start: ")
    assert "kv_memory" in told
    assert times_ended(service.state / "logs" / "node-1.log") == 1
