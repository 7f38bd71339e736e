"""Finding terraform, and what is made of what it says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from stacks import needs_terraform

from infra import terraform
from infra.errors import StalePlan, StateLocked, TerraformFailed, TerraformMissing
from infra.terraform import Program, Terraform, _explained, environment, find_program, redacted

LOCK_DETAIL = """Error message: resource temporarily unavailable
Lock Info:
  ID:        9db590f1-b6fe-c5f2-2678-8804f089deba
  Path:      terraform.tfstate
  Operation: OperationTypeApply
  Who:       ann@build-3
  Version:   1.11.4
  Created:   2026-11-21 17:00:00 +0000 UTC
"""


def program(folder: Path, name: str, version: str) -> None:
    """An executable that tells this version."""
    folder.mkdir(exist_ok=True)
    told = json.dumps({"terraform_version": version})
    (folder / name).write_text(f"#!/bin/sh\necho '{told}'\n")
    (folder / name).chmod(0o755)


@needs_terraform
def test_it_is_found() -> None:
    assert find_program().name in ("terraform", "tofu")


def test_none_there(tmp_path: Path) -> None:
    with pytest.raises(
        TerraformMissing, match=r"neither terraform nor tofu is on PATH. install Terraform 1.10 or newer"
    ):
        find_program(str(tmp_path))


def test_too_old(tmp_path: Path) -> None:
    program(tmp_path, "terraform", "1.9.8")
    with pytest.raises(TerraformMissing, match=r"terraform is version 1\.9\.8\. install Terraform 1\.10"):
        find_program(str(tmp_path))


@pytest.mark.parametrize("version", ["1.10.0", "1.11.4", "1.12.0-rc1", "2.0.0"])
def test_new_enough(tmp_path: Path, version: str) -> None:
    program(tmp_path, "terraform", version)
    assert find_program(str(tmp_path)).version == version


def test_opentofu_steps_in(tmp_path: Path) -> None:
    program(tmp_path, "terraform", "1.5.7")
    program(tmp_path, "tofu", "1.10.3")
    assert find_program(str(tmp_path)).name == "tofu"


def test_a_program_of_that_name_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "terraform").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "terraform").chmod(0o755)
    with pytest.raises(TerraformMissing, match="does not report its version"):
        find_program(str(tmp_path))


def test_what_would_change_a_command_is_left_out() -> None:
    base = {
        "PATH": "/bin",
        "TF_CLI_ARGS_plan": "-refresh=false",
        "TF_VAR_x": "1",
        "TF_LOG": "trace",
        "TF_WORKSPACE": "a",
    }
    assert environment(base) == {
        "PATH": "/bin", "TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1"
    }  # fmt: skip


def test_a_configuration_of_terraform_is_kept_if_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "rc"
    assert "TF_CLI_CONFIG_FILE" not in environment({"TF_CLI_CONFIG_FILE": str(file)})
    file.touch()
    assert environment({"TF_CLI_CONFIG_FILE": str(file)})["TF_CLI_CONFIG_FILE"] == str(file)


def test_credentials_never_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "")
    error = _explained(["Error: signing with wJalrXUtnFEMI/K7MDENG failed"], [])
    assert "wJalrXUtnFEMI" not in str(error)
    assert "(AWS_SECRET_ACCESS_KEY)" in str(error)
    assert redacted("nothing here", os.environ) == "nothing here"


def test_who_holds_the_lock_is_told() -> None:
    error = _explained([], [{"summary": "Error acquiring the state lock", "detail": LOCK_DETAIL}])
    assert isinstance(error, StateLocked)
    assert "ann@build-3 holds it since 2026-11-21 17:00:00" in str(error)
    assert "`terraform force-unlock 9db590f1-b6fe-c5f2-2678-8804f089deba`" in str(error)


def test_a_state_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "terraform").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "terraform").chmod(0o755)
    monkeypatch.setattr(terraform, "ASK_SECONDS", 0.2)
    with pytest.raises(TerraformFailed, match=r"`terraform show` took more than 0\.2 s"):
        Terraform(Program(str(tmp_path / "terraform"), "terraform", "1.11.4"), tmp_path).show()


@pytest.mark.parametrize("call", [Terraform.show, Terraform.init])
def test_who_has_killed_it_is_told(tmp_path: Path, call: Callable[[Terraform], object]) -> None:
    (tmp_path / "terraform").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "terraform").chmod(0o755)
    with pytest.raises(TerraformFailed, match=r"terraform was ended by signal 9 \(Killed\); the next plan"):
        call(Terraform(Program(str(tmp_path / "terraform"), "terraform", "1.11.4"), tmp_path))


def test_a_stale_plan_is_told() -> None:
    assert isinstance(_explained([], [{"summary": "Saved plan is stale", "detail": "changed"}]), StalePlan)


def test_missing_credentials_are_named() -> None:
    text = ["│ Error: No valid credential sources found", "│ ", "│ Please see https://..."]
    assert "AWS_PROFILE" in str(_explained(text, []))


def test_other_errors_are_repeated_with_their_place() -> None:
    problem = {"summary": "local-exec provisioner error", "detail": "here-1 can't start", "address": "x.node"}
    error = _explained(["noise"], [problem])
    assert isinstance(error, TerraformFailed)
    assert "local-exec provisioner error (x.node): here-1 can't start" in str(error)
