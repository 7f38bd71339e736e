"""Bases that only vLLM serves, behind `garnish up`: deployed, called, and compared with PEFT by `garnish compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters.base_manifest import manifest_key
from tests.support.foreign_bases import TARGETS, write_foreign_base
from tests.support.peft_reference import make_adapter
from tests.support.ports import free_port
from tests.vllm.served import Served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
ARGUMENTS = {
    "max_loras": 2, "max_lora_rank": 8, "max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True,
}  # fmt: skip
PROMPTS = "Once upon a time\n\nTim and Lily\n"


@pytest.mark.parametrize("name", ["gemma3", pytest.param("phi3", marks=pytest.mark.slow)])
def test_a_base_that_our_engine_refuses_is_served_by_vllm(
    name: str, tmp_path: Path, stories_dir: Path, python: Path
) -> None:
    base = write_foreign_base(name, tmp_path / name, stories_dir)
    adapter = make_adapter(base, tmp_path / "adapter", 5, r=4, lora_alpha=8, target_modules=TARGETS[name])
    high = make_adapter(base, tmp_path / "high", 6, r=16, lora_alpha=8, target_modules=["o_proj"])
    node = {"engine": "vllm", "dtype": "float32", "host_memory": "64MiB", "vllm": {"python": str(python), **ARGUMENTS}}
    tenants: dict[str, Any] = {"acme": {}}
    service = {
        "service": "v", "base_model": str(base), "node": node, "tenants": tenants,
        "functions": {"all": {"tenant": "acme", "adapter": str(adapter)}},
    }  # fmt: skip
    served = Served(tmp_path, json.dumps(service))
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    with served.up():
        done = served.run(
            "compare", "all", "--peft", "--state", "state", "--tenant", "acme", "--prompts", "prompts.txt",
            "--max-tokens", "12", "--json",
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stderr}\n{served.logs()}"
        compared = json.loads(done.stdout)
        assert (compared["dtype"], compared["equal"]) == ("float32", True), compared
        assert compared["tokens"] == compared["tokens_equal"] + compared["ties"] > 12
        refused = served.run("deploy", "high", str(high), "--state", "state", "--tenant", "acme")
        assert refused.returncode == 1
        assert "above the largest rank that this service's nodes take" in refused.stderr
    found = [path for path in (tmp_path / "state/registry").rglob("*") if path.is_file()]
    kinds = {path.relative_to(tmp_path / "state/registry").parts[0] for path in found}
    assert {"blobs", "bases", "tenants"} <= kinds
    assert "artifacts" not in kinds


def test_our_own_engine_names_the_way(tmp_path: Path, stories_dir: Path) -> None:
    base = write_foreign_base("gemma3", tmp_path / "gemma3", stories_dir)
    served = Served(tmp_path, json.dumps({"service": "v", "base_model": str(base), "node": {"device": "cpu"}}))
    done = served.run("up", "--port", str(free_port()), "--state", "state")
    assert done.returncode == 1
    assert "does not serve model_type 'gemma3_text'" in done.stderr
    assert "node.engine: vllm" in done.stderr


@pytest.mark.parametrize("name", list(TARGETS))
def test_base_inspect_prints_and_stores_the_manifest(name: str, tmp_path: Path, stories_dir: Path) -> None:
    base = write_foreign_base(name, tmp_path / name, stories_dir)
    served = Served(tmp_path, json.dumps({"service": "v", "base_model": str(base), "node": {"engine": "vllm"}}))
    done = served.run("base", "inspect", "--store", "--state", "state", "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    assert manifest["id"] == name
    stored = tmp_path / "state" / "registry" / manifest_key(manifest["fingerprint"])
    assert json.loads(stored.read_bytes()) == manifest
    assert "tokenizer.json" in manifest["tokenizer"]
    (base / "config.json").write_text('{"model_type": "newest"}')
    broken = served.run("base", "inspect", str(base))
    assert broken.returncode == 1
    assert "can't read the modules" in broken.stderr
