"""`garnish base inspect`: what Garnish knows of a base model, from its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from garnish.cli.options import DEFAULT_FILE, DEFAULT_STATE, File, Output, State, commands
from garnish.cli.registry import with_cli_errors

if TYPE_CHECKING:
    from adapters.base_manifest import BaseManifest
    from garnish.screen import Screen

Directory = Annotated[Path | None, typer.Argument(help="The model's directory (default: the file's base_model).")]
Python = Annotated[
    Path | None, typer.Option("--python", help="Interpreter with transformers (default: the file's node.vllm.python).")
]
Store = Annotated[bool, typer.Option("--store", help="Keep it in the file's registry, where gateways read it.")]


def inspect(
    output: Output,
    directory: Directory = None,
    python: Python = None,
    store: Store = False,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
) -> None:
    """Print the manifest of a base model: its modules, and which of them adapters can change. Reads no weights into
    memory.

    `garnish up` and `garnish gateway` make the manifest of a base that only vLLM serves. Use --store where the
    gateway's host has no transformers, from a host that has, with the same registry.
    """
    from adapters.base_manifest import store_manifest
    from adapters.open_store import open_checked_store
    from garnish.base_manifests import make_manifest
    from garnish.config import load_service_file
    from garnish.settings import Base, registry_of, resolve_base, vllm_config

    service = load_service_file(file) if directory is None or store or file.is_file() else None
    if directory is not None:
        base = Base(directory, directory.resolve().name)
    else:
        assert service is not None
        base = resolve_base(service)
    chosen = vllm_config(service).python if python is None and service is not None else str(python or "")
    with output.screen() as screen:
        screen.progress("reading the modules")
        manifest = make_manifest(base, chosen)
        screen.end_progress()
        if store and service is not None:
            address = registry_of(service, state.absolute())
            with_cli_errors(lambda: store_manifest(open_checked_store(address), manifest))
        _show(manifest, screen)
        screen.result(msgspec.to_builtins(manifest))


def _show(manifest: BaseManifest, screen: Screen) -> None:
    from adapters.modules import Modules

    base = manifest.base
    modules = Modules(base.modules, base.output, base.decoder)
    screen.line(f"{manifest.id}: {base.architecture}, {base.num_layers} layers, fingerprint {manifest.fingerprint}")
    screen.line(
        f"context {base.max_context}, vocabulary {base.vocab_size}, chat template: {_yes(manifest.chat_template)}"
    )
    screen.line(f"adapters can change {len(modules.adaptable)} modules: {modules.paths or 'none'}")
    refused = {name: modules.refusal(name) for name in modules.all_linear if name not in modules.adaptable}
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, each in refused.items() if each == reason]
        screen.line(f"not {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


group = commands({"inspect": inspect}, name="base", help="Look at base models.", no_args_is_help=True)
