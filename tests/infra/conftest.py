"""A stand-in of the AWS provider for Terraform, where its Python parts are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stand_in_provider


@pytest.fixture(scope="session")
def aws_mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tf", reason="`tf` is not installed: modules are NOT held against the AWS provider's schema")
    return stand_in_provider.install(tmp_path_factory.mktemp("providers"))


@pytest.fixture(scope="session")
def aws_attached(aws_mirror: Path) -> Iterator[str]:
    """For TF_REATTACH_PROVIDERS: a start of the stand-in takes longer than most commands of Terraform."""
    with stand_in_provider.running() as told:
        yield told


@pytest.fixture
def aws_provider(aws_mirror: Path, aws_attached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terraform takes it for hashicorp/aws, and no other provider is to be had."""
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(aws_mirror))
    monkeypatch.setenv("TF_REATTACH_PROVIDERS", aws_attached)
