"""`garnish registry gc|verify`: maintenance of the registry's object store, without the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from garnish.cli.options import DEFAULT_FILE, DEFAULT_STATE, File, Output, State, commands
from garnish.errors import FrontDoorError, StartError
from garnish.sizes import format_bytes

if TYPE_CHECKING:
    from adapters.store import ObjectStore

T = TypeVar("T")

MAX_SHOWN = 1000
"""Maximum number of entries in the JSON result; a bucket may have many more objects."""


def gc(
    output: Output,
    file: File = DEFAULT_FILE,
    state: State = DEFAULT_STATE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove objects that no function uses and that are older than 24 hours. Deploys may continue meanwhile."""
    from adapters.collect import collect
    from adapters.store import ObjectInfo

    removed: list[str] = []

    def report(info: ObjectInfo) -> None:
        screen.line(f"{'would remove' if dry_run else 'removed'} {info.key} ({format_bytes(info.size)})")
        if len(removed) < MAX_SHOWN:
            removed.append(info.key)

    with output.screen() as screen:
        store = _store(file, state, writes=not dry_run)
        screen.progress("reading what the functions list")
        done = with_cli_errors(lambda: collect(store, dry_run=dry_run, on_removal=report))
        screen.end_progress()
        screen.line(
            f"{done.blobs} files, {done.artifacts} artifacts and {done.manifests} manifests, "
            f"{format_bytes(done.bytes)} {'would be removed' if dry_run else 'removed'}; "
            f"{done.kept} files and artifacts stay"
        )
        screen.result({**msgspec.to_builtins(done), "objects": removed})


def verify(output: Output, file: File = DEFAULT_FILE, state: State = DEFAULT_STATE) -> None:
    """Check the hashes of all objects that functions use. Exit code 1: objects are missing or changed."""
    from adapters.verify import Damage
    from adapters.verify import verify as verify_store

    damages: list[Damage] = []

    def report(damage: Damage) -> None:
        screen.line(f"{damage.version}: {damage.key} {damage.problem}")
        if len(damages) < MAX_SHOWN:
            damages.append(damage)

    with output.screen() as screen:
        store = _store(file, state, writes=False)
        screen.progress("reading every listed version")
        done = with_cli_errors(lambda: verify_store(store, on_damage=report))
        screen.end_progress()
        screen.line(f"{done.versions} versions, {done.objects} objects read; {done.damaged} versions are damaged")
        screen.result({**msgspec.to_builtins(done), "damages": damages})
    if done.damaged:
        raise typer.Exit(1)


def _store(file: Path, state: Path, *, writes: bool) -> ObjectStore:
    """Returns the object store of the service file's registry.

    With `writes` it checks that the store supports conditional writes. Raises FrontDoorError.
    """
    from adapters.open_store import open_checked_store, open_store
    from garnish.config import load_service_file
    from garnish.settings import registry_of

    address = registry_of(load_service_file(file), state.absolute())
    if "://" not in address and not Path(address).is_dir():
        raise StartError(f"there is no registry in {address}; name the state directory with --state")
    return with_cli_errors(lambda: (open_checked_store if writes else open_store)(address))


def with_cli_errors(work: Callable[[], T]) -> T:
    """Calls `work` and returns its result. Raises the store's errors as FrontDoorError."""
    from adapters.errors import AdapterError

    try:
        return work()
    except AdapterError as error:
        raise FrontDoorError(f"registry: {error}") from error


group = commands(
    {"gc": gc, "verify": verify}, name="registry", help="Look after the registry's store.", no_args_is_help=True
)
