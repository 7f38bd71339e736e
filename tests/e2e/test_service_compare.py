"""`garnish compare --peft` against a running service: the check that a user makes, as one that every change passes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from whole_service import Service, service_file

from cluster.text import end_token_ids
from garnish import comparison
from garnish.cli.compare import show
from garnish.comparison import Comparison
from garnish.errors import FrontDoorError
from garnish.screen import Screen
from tests.support.peft_reference import TIE, PeftReference

ARGUMENTS = ("--peft", "--state", "state", "--tenant", "acme")
PROMPTS = ("Once upon a time", "One day, Tim and his dog", "Lily saw a big dragon")


@pytest.fixture(scope="module")
def prompts(service: Service) -> str:
    (service.folder / "prompts.txt").write_text("\n\n".join(PROMPTS) + "\n")
    return "prompts.txt"


def compared(service: Service, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = service.run("compare", *arguments, *ARGUMENTS, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def plain(service: Service, prompts: str) -> dict[str, Any]:
    """What the command found of `dragon`."""
    return compared(service, "dragon", "--prompts", prompts, "--max-tokens", "40")


def test_a_function_writes_what_peft_writes(
    plain: dict[str, Any], stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    """In fp32, over HTTP, every token; and what it says of PEFT is what PEFT says in this process."""
    found = plain
    assert found["function"] == "dragon:1"
    assert (found["dtype"], found["device"], found["equal"]) == ("float32", "cpu", True)
    assert found["tokens"] == found["tokens_equal"] + found["ties"]
    assert found["tokens"] > 60
    assert 0 <= found["logprob_difference"] < 1e-3
    assert [row["prompt"] for row in found["rows"]] == list(PROMPTS)
    reference, tokenizer = PeftReference(stories_dir), Tokenizer.from_file(str(stories_dir / "tokenizer.json"))
    ends = end_token_ids(stories_dir)
    for row in found["rows"]:
        assert row["prompt_tokens"][0] == row["prompt_tokens"][1] > 0
        assert row["function_seconds"] > 0 and row["peft_seconds"] > 0
        greedy = reference.greedy(stories_adapters["dragon"], tokenizer.encode(row["prompt"]).ids, 40, ends)
        assert row["peft_text"] == tokenizer.decode(greedy.tokens)
        if not row["differences"]:
            assert row["peft_text"].strip() == row["function_text"].strip()


def test_files_that_peft_alone_would_not_read_are_compared_too(
    service: Service, prompts: str, plain: dict[str, Any], stories_adapters: dict[str, Path]
) -> None:
    """The same adapter as a compiled model's state dict, in float64, with its rank as text behind a BOM: PEFT finds no
    tensor of such a file by itself, and would answer as the base model does."""
    named = Path(shutil.copytree(stories_adapters["dragon"], service.folder / "named"))
    tensors = load_file(named / "adapter_model.safetensors")
    renamed = {
        f"_orig_mod.{name}".replace(".weight", ".mine.weight"): tensor.double() for name, tensor in tensors.items()
    }
    save_file(renamed, named / "adapter_model.safetensors")
    config = json.loads((named / "adapter_config.json").read_bytes())
    config["r"] = str(config["r"])
    (named / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    done = service.run("deploy", "named", "named", "--state", "state", "--tenant", "acme")
    assert done.returncode == 0, done.stderr
    found = compared(service, "named", "--prompts", prompts, "--max-tokens", "40")
    assert service.run("delete", "named", "--state", "state", "--tenant", "acme").returncode == 0
    assert found["tokens_equal"] + found["ties"] == found["tokens"] > 60
    assert [row["peft_text"] for row in found["rows"]] == [row["peft_text"] for row in plain["rows"]]


def test_the_table_for_people(service: Service) -> None:
    """With the prompts that are built in, and the folder that was deployed in the registry's place."""
    adapter = json.loads((service.folder / "serverless.yml").read_text())["functions"]["dragon"]["adapter"]
    done = service.run("compare", "dragon", *ARGUMENTS, "--max-tokens", "8", "--adapter", adapter)
    assert done.returncode == 0, done.stderr
    assert "dragon:1 and PEFT alone (float32 on cpu) write the same: 32 of 32 tokens equal\n" in done.stdout
    assert "largest difference of log probabilities: " in done.stdout
    assert "\nseconds: " in done.stdout


def test_another_model_differs(
    service: Service, prompts: str, stories_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service file that names a base whose weights are a little different: each difference is told; exit code 1."""
    other = service.folder / "other-base"
    shutil.copytree(stories_dir, other)
    (other / ".garnish-fingerprint.json").unlink(missing_ok=True)
    (weights,) = other.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    noisy = {
        name: t + 0.1 * t.std() * torch.randn(t.shape, generator=generator) for name, t in load_file(weights).items()
    }
    save_file(noisy, weights, metadata={"format": "pt"})
    (service.folder / "other.yml").write_text(service_file(other, {}, ("acme",), "float32"))
    found = compared(service, "dragon", "--prompts", prompts, "-f", "other.yml", code=1)
    assert not found["equal"]
    differences = [entry for row in found["rows"] for entry in row["differences"]]
    assert found["tokens_equal"] == found["tokens"] - len(differences) < found["tokens"]
    assert all(entry["function_token"] != entry["peft_token"] for entry in differences)
    assert max(entry["behind"] for entry in differences) > TIE == differences[0]["tie_below"]
    show(msgspec.convert(found, Comparison), Screen())
    told = capsys.readouterr().out
    assert "DIFFER" in told and "NO tie (below 0.0001)" in told and "  PEFT:     " in told


def test_what_it_needs_is_told(service: Service, stories_adapters: dict[str, Path]) -> None:
    def problem(*arguments: str) -> str:
        done = service.run("compare", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr.splitlines()[-1]

    assert "stories260K is the base model itself: name a function" in problem("stories260K", *ARGUMENTS)
    wrong = problem("dragon", *ARGUMENTS, "--adapter", str(stories_adapters["ocean"]))
    assert "differs from what dragon:1 was deployed with: another adapter_model.safetensors" in wrong
    (service.folder / "nothing.txt").write_text("\n \n")
    assert "expected 1 to 1000 lines, a prompt each" in problem("dragon", *ARGUMENTS, "--prompts", "nothing.txt")


def test_a_missing_package_is_told_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "NEEDED", {"json": "json", "no_such_package": "'no-such>=1'"})
    with pytest.raises(FrontDoorError, match=r"no_such_package is not installed here: .* -m pip install 'no-such>=1'"):
        comparison.check_installed()
