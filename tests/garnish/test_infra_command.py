"""`garnish infra` as it is typed: what it prints, asks and exits with, over stand-ins of nodes and of AWS."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from garnish import node_pools
from garnish.cli.main import app
from tests.garnish.draining_gateway import running_gateway
from tests.infra import stand_in_provider
from tests.infra.stacks import needs_terraform

pytestmark = needs_terraform

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCY"
LOCAL = {"here": {"backend": "local", "max": 3}}
BABBLER = "import os, sys; sys.exit('can not start: ' + os.environ['AWS_SECRET_ACCESS_KEY'])"
"""A program that tells its environment."""


class Typed:
    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.state.mkdir()
        (self.state / "credentials.toml").write_text('url = "http://127.0.0.1:9"\ntenant = "default"\n')
        (folder / "model").mkdir()
        self.told = ""

    def declare(self, pools: dict[str, Any], **more: Any) -> None:
        written = {"service": "demo", "base_model": "./model", "node_pools": pools, **more}
        (self.folder / "serverless.yml").write_text(json.dumps(written))

    def __call__(self, *arguments: str, code: int | None = 0) -> Result:
        """`code` None: it fails with a message."""
        options = ["-f", str(self.folder / "serverless.yml"), "--state", str(self.state)]
        done = CliRunner().invoke(app, ["infra", *arguments, *options])
        self.told += done.stdout + done.stderr + str(done.exception)
        if code is not None:
            assert done.exit_code == code, self.told
        else:
            assert done.exception is not None
        return done


@pytest.fixture
def typed(tmp_path: Path, stand_in: None) -> Typed:
    return Typed(tmp_path)


def test_what_is_typed_and_told(typed: Typed) -> None:
    typed.declare({"here": {"backend": "local", "desired": 0, "max": 3}})
    assert typed("plan", "--detailed-exitcode").stdout == "nothing to do\n"
    typed.declare({"here": {"backend": "local", "desired": 2, "max": 3}})
    planned = typed("plan", "--detailed-exitcode", code=2)
    assert planned.stdout.splitlines() == [
        "ACTION\tPOOL\tRESOURCE\tREASON\tCOSTS MONEY",
        "create\there\there-1\tnot there yet\t-",
        "create\there\there-2\tnot there yet\t-",
        "2 to create",
        "the plan is saved: `garnish infra apply` carries it out",
    ]
    assert "carry out 2 changes? Nobody can be asked: say --yes" in str(typed("apply", code=None).exception)
    applied = typed("apply", "--yes")
    assert {"here-1: create", "here-1: create done", "here-2: create done"} <= set(applied.stderr.splitlines())
    assert applied.stdout.splitlines()[-1] == "applied: 2 to create"
    dead = json.loads(typed("plan", "--detailed-exitcode", "--json", code=2).stdout)["changes"]
    assert [(change["action"], change["reason"]) for change in dead] == [("replace", "its process has died")] * 2
    (shown,) = json.loads(typed("show", "--json").stdout)["pools"]
    assert (shown["desired"], shown["applied"], shown["nodes"]) == (2, 2, {"here-1": "dead", "here-2": "dead"})
    assert "destroy all 2? Nobody can be asked" in str(typed("destroy", code=None).exception)
    destroyed = typed("destroy", "--yes", "--json")
    assert [change["action"] for change in json.loads(destroyed.stdout)["changes"]] == ["destroy", "destroy"]
    assert typed("destroy", "--yes").stdout == "there is nothing to destroy\n"


def test_a_secret_in_what_terraform_says_is_not_shown(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("TF_LOG", "trace")
    monkeypatch.setattr(node_pools, "PROGRAM", (sys.executable, "-c", BABBLER))
    typed.declare(LOCAL)
    typed("plan")
    failed = typed("apply", "--yes", code=None)
    assert "can not start: (AWS_SECRET_ACCESS_KEY)" in str(failed.exception)
    assert SECRET not in typed.told
    assert not found_in(typed.state)


@pytest.fixture(scope="module")
def attached() -> Iterator[str]:
    """A stand-in of the AWS provider, for TF_REATTACH_PROVIDERS."""
    pytest.importorskip("tf", reason="`tf` is not installed: plans for AWS are NOT tested")
    with stand_in_provider.running() as told:
        yield told


@pytest.fixture
def in_aws(typed: Typed, tmp_path: Path, attached: str, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Declares a pool in AWS, of a model that fits."""
    monkeypatch.setenv("TF_REATTACH_PROVIDERS", attached)
    (tmp_path / "providers").mkdir()
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(stand_in_provider.install(tmp_path / "providers")))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 512,
    }  # fmt: skip
    (typed.folder / "model" / "config.json").write_text(json.dumps(config))
    (typed.state / "cluster.secret").write_text(SECRET)
    aws = {
        "region": "eu-central-1", "vpc_id": "vpc-1", "subnet_ids": ["subnet-1"], "gateway_security_group_id": "sg-1",
        "secret_parameter": "/garnish/secret", "package": "s3://acme/garnish.whl", "image_parameter": "/images/gpu",
        "model_source": "s3://acme-models/small", "registry_bucket": "managed",
    }  # fmt: skip
    typed.declare(
        {"l4": {"backend": "aws", "instance_type": "g6.xlarge", "max": 2}},
        registry="s3://acme-adapters/prod",
        infra={"gateway_url": "http://gateway:8080", "aws": aws},
    )
    return typed


def test_what_costs_money_is_marked_and_no_secret_is_told(in_aws: Typed) -> None:
    """Neither printed, nor in plan (a zip), state, or what is rendered."""
    planned = in_aws("plan")
    rows = [line.split("\t") for line in planned.stdout.splitlines() if "\t" in line]
    assert {row[2] for row in rows if row[4] == "yes"} == {"aws_autoscaling_group.nodes", "aws_s3_bucket.registry"}
    assert "(2 bear on cost)" in planned.stdout
    with zipfile.ZipFile(in_aws.state / "infra" / "demo" / "plan.tfplan") as plan:
        parts = [plan.read(name) for name in plan.namelist()]
    assert parts and not [part for part in parts if SECRET.encode() in part]
    in_aws("apply", "--yes", "--json")
    directory = in_aws.state / "infra" / "demo"
    assert directory.stat().st_mode & 0o077 == (directory / "terraform.tfstate").stat().st_mode & 0o077 == 0
    with running_gateway() as gateway:
        gateway.open = {"l4-i-0abc-0": 0, "l4-other": 0}
        (in_aws.state / "credentials.toml").write_text(f'url = "{gateway.url}"\ntenant = "default"\n')
        (shown,) = json.loads(in_aws("show", "--json").stdout)["pools"]
    assert (shown["nodes"], shown["drift"]) == ({"l4-i-0abc-0": "ready"}, [])
    assert SECRET not in in_aws.told
    assert found_in(in_aws.state) == ["cluster.secret"]


def found_in(folder: Path) -> list[str]:
    """Names of the files that hold the secret."""
    return [path.name for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_what_was_made_can_be_destroyed_whatever_the_file_says_now(in_aws: Typed) -> None:
    """Neither a model that would no longer fit nor a pool that is not declared any more is in the way, but the gateway
    is asked to drain."""
    in_aws("plan")
    in_aws("apply", "--yes")
    written = json.loads((in_aws.folder / "serverless.yml").read_text())
    (in_aws.folder / "serverless.yml").write_text(json.dumps({**written, "node_pools": {}}))
    assert "--force destroys without it" in str(in_aws("destroy", "--yes", code=None).exception)
    (in_aws.folder / "serverless.yml").write_text(json.dumps(written))
    (in_aws.folder / "model" / "config.json").write_text('{"num_hidden_layers": 1}')
    assert "config.json" in str(in_aws("plan", code=None).exception)
    with running_gateway() as gateway:
        gateway.open = {"l4-i-0abc-0": 1, "l4-other": 0}
        (in_aws.state / "credentials.toml").write_text(f'url = "{gateway.url}"\ntenant = "default"\n')
        in_aws("destroy", "--yes")
        assert gateway.drained == ["l4-i-0abc-0"]
