"""Folders as people have them: each oddity is told in one line that says what it is and what to do."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapters.base_model import load_base_model
from adapters.peft_format import read_peft
from adapters.validate import check_values, inspect
from adapters.wrong_files import LFS_POINTER
from garnish.adapter_folder import CONVERT, adapter_files
from garnish.errors import GarnishError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
POINTER = LFS_POINTER + b"\noid sha256:4d7a\nsize 2350080\n"
USE = "garnish deploy mine {}"


@pytest.fixture
def folder(tmp_path: Path, stories_adapters: dict[str, Path]) -> Path:
    """A good adapter, to be made odd."""
    return Path(shutil.copytree(stories_adapters["dragon"], tmp_path / "my adapter"))


def told(folder: Path) -> str:
    with pytest.raises(GarnishError) as caught:
        adapter_files(folder, USE)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_good_folder(folder: Path) -> None:
    files = adapter_files(folder, USE)
    assert (files.config, files.weights) == (folder / CONFIG, folder / WEIGHTS)


def test_a_folder_that_is_not_there_names_the_nearest(folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "my-adapter"
    assert told(missing) == f"{missing}: there is no such folder; did you mean {folder}?"
    assert told(tmp_path / "x" / "y" / "z") == f"{tmp_path}/x/y/z: there is no such folder"


def test_what_may_be_a_hub_id_is_told_how_to_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert told(Path("acme/pirate")) == (
        "acme/pirate: there is no such folder; one on the Hugging Face Hub is named hf:acme/pirate"
    )


def test_an_empty_folder(tmp_path: Path) -> None:
    assert told(tmp_path) == f"{tmp_path} is empty: expected {CONFIG} and {WEIGHTS}"


def only(folder: Path, *names: str) -> None:
    """Empty files of these names, and nothing else."""
    shutil.rmtree(folder)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("model.safetensors", "config.json"), "holds a whole model (config.json and its weights), not an adapter:"),
        (("pytorch_model.bin", "config.json"), "holds a whole model (config.json and its weights), not an adapter:"),
        (("lora-q8_0.gguf",), "holds a GGUF file, llama.cpp's: deploy the PEFT adapter that it was converted from"),
        ((CONFIG, "lora.gguf"), "holds a GGUF file, llama.cpp's, and no weights of PEFT:"),
        (
            (WEIGHTS, "README.md"),
            f"lacks {CONFIG}: PEFT's save_pretrained writes it next to the weights, copy it there",
        ),
        ((CONFIG,), f"holds {CONFIG} but no {WEIGHTS}: save the adapter with PEFT's save_pretrained"),
        (
            (CONFIG, "model-1.safetensors", "model-2.safetensors"),
            "save the adapter with PEFT's save_pretrained; found model-1.safetensors, model-2.safetensors",
        ),
        (("a", "b", "c", "d", "e", "f", "g"), f"expected {CONFIG} and {WEIGHTS}, found a, b, c, d, e and 2 more"),
        (("checkpoint-10/optimizer.pt",), f"holds no adapter: expected {CONFIG} and {WEIGHTS}, found checkpoint-10/"),
    ],
)
def test_folders_of_something_else(folder: Path, names: tuple[str, ...], line: str) -> None:
    only(folder, *names)
    assert told(folder).startswith(f"{folder} ")
    assert line in told(folder)


def test_checkpoints_name_the_newest_by_its_step(folder: Path) -> None:
    only(
        folder, f"checkpoint-90/{CONFIG}", f"checkpoint-1000/{CONFIG}", f"checkpoint-200/{CONFIG}", "trainer_state.json"
    )
    (folder / "checkpoint-1100").mkdir()  # training was stopped before it was whole
    assert told(folder) == (
        f"{folder} holds no adapter itself, only 3 checkpoints; the newest: "
        f"garnish deploy mine '{folder}/checkpoint-1000'"
    )


def test_folders_of_adapters_are_named(folder: Path) -> None:
    only(folder, f"pirate/{CONFIG}", f"json/{CONFIG}")
    assert told(folder) == (
        f"{folder} holds no adapter itself, but folders that do (json, pirate); name one: "
        f"garnish deploy mine '{folder}/json'"
    )


def test_weights_of_another_name_are_told_how_to_rename(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "lora.safetensors")
    _, _, command = told(folder).partition("if that is the adapter: ")
    subprocess.run(command, shell=True, check=True, timeout=20)
    adapter_files(folder, USE)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pointer_of_git_lfs(folder: Path, name: str) -> None:
    (folder / name).write_bytes(POINTER)
    assert told(folder) == (
        f"{folder / name} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("adapter.gguf", "is a GGUF file, llama.cpp's"),
        ("adapter.tar.gz", "is an archive: unpack it, and name the folder"),
        ("adapter.pt", "is a pickle by its name, which is never read"),
        ("notes.txt", f"is a file: expected a folder with {CONFIG} and {WEIGHTS}"),
    ],
)
def test_a_file_in_the_place_of_a_folder(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / name).touch()
    assert line in told(tmp_path / name)


def test_a_file_of_an_adapter_names_its_folder(folder: Path) -> None:
    assert told(folder / WEIGHTS) == (
        f"{folder / WEIGHTS} is a file of an adapter: name its folder: garnish deploy mine '{folder}'"
    )


def test_a_pickle_is_converted_by_the_command_that_is_told(folder: Path, stories_dir: Path) -> None:
    """The command, pasted, makes a folder that is served: the same values as before."""
    before = load_file(folder / WEIGHTS)
    torch.save(before, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    line = told(folder)
    (folder / "README.md").touch()
    assert told(folder) == line
    assert "adapter_model.bin, a pickle, which is never read" in line
    command = shlex.split(line.partition("are installed: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
    files = adapter_files(folder, USE)
    adapter = read_peft(files.config.read_bytes(), files.weights)
    layout = check_values(inspect(adapter, load_base_model(stories_dir)), adapter.weights)
    assert layout.ranks == (json.loads(files.config.read_bytes())["r"],)
    after = load_file(folder / WEIGHTS)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_page_has_the_same_command() -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "adapters.md"
    assert f'python -c "{CONVERT}" FOLDER' in page.read_text()


def test_the_command_runs_nothing_of_the_pickle(folder: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (open, (str(tmp_path / "trap"), "w"))

    torch.save({"weights": Bomb()}, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    command = shlex.split(told(folder).partition("are installed: ")[2])
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, timeout=120)
    assert done.returncode != 0
    assert not (tmp_path / "trap").exists()
