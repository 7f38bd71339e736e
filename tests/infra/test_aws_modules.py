"""The modules for AWS, as far as they can be checked without an account: arguments, user data, what is rendered."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import provider_bindings as bindings
import pytest
from stacks import needs_terraform, pool, stack
from test_deployment_files import takes

from infra.errors import InfraError
from infra.render import MODULES, render
from infra.stack import AwsHost, RegistryBucket, Stack
from infra.terraform import environment, find_program

AWS = ("aws_pool", "aws_registry")
SETTINGS: dict[str, Any] = {
    "region": "eu-central-1", "pool": "l40s", "group": "demo-l40s", "devices": "0 1 3",
    "gateway_url": "http://gateway.internal:8080", "node_port": 8081, "secret_parameter": "/garnish/demo/secret",
    "package": "s3://acme-packages/garnish-0.1.0-py3-none-any.whl",
    "model_source": "s3://acme-models/llama-8b/", "node_file": base64.b64encode(b'{"node": {}}').decode(),
    "drain_seconds": 3700,
}  # fmt: skip


def aws_stack(**registry: Any) -> Stack:
    host = AwsHost(
        region="eu-central-1",
        vpc_id="vpc-1",
        subnet_ids=["subnet-1", "subnet-2"],
        gateway_security_group_id="sg-1",
        gateway_url="http://gateway.internal:8080",
        secret_parameter="/garnish/demo/secret",
        package="s3://acme-packages/garnish-0.1.0-py3-none-any.whl",
        image_parameter="/acme/images/gpu",
        model_source="s3://acme-models/llama-8b",
        node_file='{"note": "${not} a template"}',
        tags={"team": "support"},
    )
    pools = (pool("l40s", backend="aws", instance_type="g6e.12xlarge"), pool("here"))
    where = RegistryBucket(bucket="acme-adapters", prefix="prod", **registry)
    return msgspec.structs.replace(stack(*pools), aws=host, registry=where)


def text_of(module: str) -> str:
    return "\n".join(file.read_text() for file in sorted((MODULES / module).glob("*.tf")))


def test_what_is_kept_of_the_bindings_is_theirs() -> None:
    """And of what the modules use now, not of what they used once."""
    kept = json.loads(bindings.EXTRACT.read_text())
    assert kept["bindings"] == bindings.pin()
    held = {(kind, name) for kind in ("resource", "data") for name in kept[kind]}
    assert held == bindings.used_types(), "run tests/infra/provider_bindings.py"
    package = bindings.package_directory()
    if package is None:
        pytest.skip(f"{bindings.pin()} is not installed: what is kept of it is NOT held against it")
    assert bindings.EXTRACT.read_text() == bindings.text_of(bindings.schema(package))


@pytest.mark.parametrize("module", [*AWS, "local_pool"])
def test_what_is_declared_is_used(module: str) -> None:
    """That what is used is declared, Terraform says."""
    text = text_of(module)
    declared = set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
    used = re.sub(r'^variable "\w+" \{\n.*?^\}', "", text, flags=re.DOTALL | re.MULTILINE)
    assert declared - set(re.findall(r"\bvar\.(\w+)", used)) <= {"min", "max"}, "bounds alone bound others"
    (given,) = re.findall(r"^locals \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE) or [""]
    assert set(re.findall(r"^  (\w+)\s+= ", given, re.MULTILINE)) <= set(re.findall(r"\blocal\.(\w+)", text))


def user_data(folder: Path, **changes: Any) -> str:
    """The template, filled in by terraform itself."""
    folder.mkdir()
    (folder / "user_data.sh.tftpl").write_text((MODULES / "aws_pool" / "user_data.sh.tftpl").read_text())
    (folder / "main.tf").write_text(
        'variable "settings" {}\n'
        'output "text" {\n  value = templatefile("${path.module}/user_data.sh.tftpl", var.settings)\n}\n'
    )
    (folder / "terraform.tfvars.json").write_text(json.dumps({"settings": {**SETTINGS, **changes}}))
    for arguments in (["init", "-no-color"], ["apply", "-no-color", "-auto-approve"]):
        done = subprocess.run(
            [find_program().path, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    state = json.loads((folder / "terraform.tfstate").read_text())
    return str(state["outputs"]["text"]["value"])


def is_shell(text: str) -> None:
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_terraform
def test_user_data(tmp_path: Path) -> None:
    text = user_data(tmp_path / "wheel")
    is_shell(text)
    assert len(base64.b64encode(text.encode())) <= 21_844, "AWS takes 16 KiB"
    (awaiting,) = re.findall(r"<<'END'\n(.*?)^END$", text, re.DOTALL | re.MULTILINE)
    is_shell(awaiting)
    assert "--auto-scaling-group-name 'demo-l40s'" in awaiting
    calls = re.findall(r"curl .*", text)
    assert calls and all("X-aws-ec2-metadata-token" in call for call in calls), "IMDSv2 only"
    assert all("--max-time" in call for call in calls), "no wait without bound"
    assert "--name '/garnish/demo/secret' --with-decryption" in text
    assert 'data/model/llama-8b/"' in text, "the folder that the node's file names"
    assert "for gpu in 0 1 3; do" in text
    assert "aws s3 cp --only-show-errors 's3://acme-packages/" in text
    assert 'pip install --quiet "/opt/$(basename' in text


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >>{calls}
case "$0" in *blkid) echo 12-34 ;; *lsblk) echo '{disks}' ;; esac
"""


@needs_terraform
@pytest.mark.parametrize(("count", "device"), [(0, None), (1, "/dev/nvme1n1"), (2, "/dev/md0")])
def test_disks_of_an_instance_are_mounted_at_each_boot(tmp_path: Path, count: int, device: str | None) -> None:
    """User data runs at the first one only."""
    (part,) = re.findall(r"^data=.*?(?=^useradd)", user_data(tmp_path / "u"), re.DOTALL | re.MULTILINE)
    data, fstab, calls = tmp_path / "data", tmp_path / "fstab", tmp_path / "calls"
    disks = "\n".join(f"/dev/nvme{number + 1}n1 Amazon EC2 NVMe Instance Storage" for number in range(count))
    (tmp_path / "bin").mkdir()
    for name in ("lsblk", "mdadm", "mkfs.ext4", "blkid", "mount"):
        (tmp_path / "bin" / name).write_text(STUB.format(calls=calls, disks=disks))
        (tmp_path / "bin" / name).chmod(0o755)
    text = part.replace("/var/lib/garnish-data", str(data)).replace("/etc/fstab", str(fstab))
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-eu"], input=text, env=env, text=True, check=True, timeout=60)
    called = calls.read_text().splitlines()[1:]
    if device is None:
        assert (called, fstab.exists(), data.is_dir()) == ([], False, True)
    else:
        assert called[-3:] == [f"mkfs.ext4 -q {device}", f"blkid -s UUID -o value {device}", f"mount {data}"]
        assert fstab.read_text() == f"UUID=12-34 {data} ext4 noatime,nofail 0 2\n"


@needs_terraform
def test_the_unit_in_user_data_starts_what_there_is(tmp_path: Path) -> None:
    (unit,) = re.findall(
        r"<<UNIT\n(\[Unit\]\nDescription=Garnish node.*?)^UNIT$", user_data(tmp_path / "u"), re.S | re.M
    )
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *words = start.split()
    assert program == "/opt/garnish/bin/garnish"
    takes(words)
    # The shell leaves these for systemd.
    assert r"--node-id \${NODE_ID}" in start and r"--port \${NODE_PORT}" in start
    assert "--pool l40s " in start


def test_what_is_rendered_for_aws() -> None:
    root = render(aws_stack())
    module = root["module"]["pool_l40s"]
    assert (module["source"], module["devices"], module["max"]) == ("./modules/aws_pool", [0, 1, 2, 3], 3)
    assert module["tags"] == {"team": "support"}
    assert module["node_file"] == '{"note": "$${not} a template"}'
    assert root["provider"]["aws"]["default_tags"]["tags"] == {"garnish:service": "demo", "team": "support"}
    assert root["terraform"]["required_providers"]["aws"]["source"] == "hashicorp/aws"
    assert set(root["module"]) == {"pool_here", "pool_l40s"}
    assert set(render(aws_stack(managed=True))["module"]) == {"pool_here", "pool_l40s", "registry"}


def test_only_the_devices_that_are_named_get_a_node() -> None:
    whole = aws_stack()
    assert whole.aws is not None
    some = msgspec.structs.replace(whole, aws=msgspec.structs.replace(whole.aws, devices=(2, 0)))
    assert render(some)["module"]["pool_l40s"]["devices"] == [0, 2]
    none = msgspec.structs.replace(whole, aws=msgspec.structs.replace(whole.aws, devices=(4,)))
    with pytest.raises(InfraError, match=r"there is no GPU 4 on g6e\.12xlarge, which has 4"):
        render(none)


def test_every_setting_is_a_variable_of_the_module() -> None:
    for name, module in render(aws_stack(managed=True))["module"].items():
        text = (MODULES / Path(module["source"]).name / "variables.tf").read_text()
        declared = set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
        needed = {
            variable
            for variable, body in re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', text, re.DOTALL | re.MULTILINE)
            if "\n  default" not in body
        }
        stated = set(module) - {"source"}
        assert stated <= declared and needed <= stated, name


def test_local_pools_alone_ask_for_no_provider() -> None:
    root = render(stack())
    assert "provider" not in root and "required_providers" not in root["terraform"]


def test_what_aws_can_not_do_without() -> None:
    with pytest.raises(InfraError, match="need a registry on S3"):
        render(msgspec.structs.replace(aws_stack(), registry=None))
    strange = msgspec.structs.replace(aws_stack(), pools=(pool("a", backend="aws", instance_type="m5.large"),))
    with pytest.raises(InfraError, match="unknown instance type"):
        render(strange)
