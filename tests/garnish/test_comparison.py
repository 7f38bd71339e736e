"""Where `garnish compare` finds the files of the function that it compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from garnish.comparison import find_registry
from garnish.config import load_service_file
from garnish.errors import FrontDoorError


def test_the_registry_is_the_service_files_or_the_states(tmp_path: Path) -> None:
    file = tmp_path / "serverless.yml"
    state = tmp_path / "other" / "state"
    registry = state / "registry"

    def found(line: str) -> str:
        file.write_text(f"service: s\nbase_model: ./base\n{line}\n")
        return find_registry(load_service_file(file), state)

    advice = "name the service's state directory with --state or its service file with -f, or the folder that was"
    with pytest.raises(FrontDoorError, match=f"there is no registry {registry} here: {advice}"):
        found("")
    with pytest.raises(FrontDoorError, match=f"there is no registry .*not-here here, nor {registry}: {advice}"):
        found("registry: ./not-here")
    assert found("registry: s3://bucket/prefix") == "s3://bucket/prefix"
    registry.mkdir(parents=True)
    assert found("") == found("registry: ./not-here") == str(registry)
    (tmp_path / "here").mkdir()
    assert found("registry: ./here") == str(tmp_path / "here")
