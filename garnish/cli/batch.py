"""`garnish batch`: uploads a file of calls, follows the batch and downloads the answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from garnish.cli.options import Output, TenantService, commands
from garnish.errors import GarnishError
from garnish.screen import Screen

if TYPE_CHECKING:
    from garnish.client import Client
    from gateway.batches.messages import Batch

POLL_SECONDS = 1.0

Endpoint = Literal["/v1/completions", "/v1/chat/completions", "/invoke"]
BatchId = Annotated[str, typer.Argument(help="The batch's id, batch_...")]
Watch = Annotated[bool, typer.Option("--watch", help="Wait for its end.")]


def submit(
    service: TenantService,
    output: Output,
    file: Annotated[Path, typer.Argument(help="JSON lines: custom_id, method, url and body of each call.")],
    endpoint: Annotated[Endpoint, typer.Option("--endpoint", help="What the calls' url is.")] = "/v1/completions",
    watch_it: Watch = False,
) -> None:
    """Upload a file of calls and run them as a batch."""
    from garnish.calls import create_call, upload_call
    from gateway.batches.messages import Batch, FileObject

    with output.screen() as screen, service.client(service.tenant) as client:
        with upload_call(file) as call:
            uploaded = client.ask(call, FileObject)
        batch = client.ask(create_call(uploaded.id, endpoint), Batch)
        screen.line(batch.id)
        if watch_it:
            batch = _follow(client, screen, batch)
        screen.result(batch)
    _check(batch)


def watch(service: TenantService, output: Output, batch_id: BatchId) -> None:
    """Show the progress of a batch until it has ended."""
    from garnish.calls import batch_call
    from gateway.batches.messages import Batch

    with output.screen() as screen, service.client(service.tenant) as client:
        batch = _follow(client, screen, client.ask(batch_call(batch_id), Batch))
        screen.result(batch)
    _check(batch)


def get(
    service: TenantService,
    output: Output,
    batch_id: BatchId,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where the answers go (default: shown).")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="The calls that failed, not the answers.")] = False,
) -> None:
    """Fetch the answers of a batch that has ended; with --errors, its failed calls. With --json, print the batch."""
    from garnish.calls import batch_call, content_call
    from gateway.batches.messages import ENDED, Batch

    screen = output.screen()
    with service.client(service.tenant) as client:
        batch = client.ask(batch_call(batch_id), Batch)
        screen.result(batch)
        file_id = batch.error_file_id if errors else batch.output_file_id
        if batch.status not in ENDED:
            raise GarnishError("conflict", f"{batch_id} has not ended: {_format_status(batch)}")
        if file_id is None:
            screen.notice("it has none")
        elif out is not None:
            _save(client.download(content_call(file_id)), out)
        elif not screen.as_json:
            screen.pieces(client.download(content_call(file_id)))


def _save(pieces: Iterator[bytes], path: Path) -> None:
    try:
        with path.open("wb") as file:
            file.writelines(pieces)
    except OSError as error:
        raise GarnishError("invalid_request", f"{path} can't be written: {error.strerror}") from None


def _follow(client: Client, screen: Screen, batch: Batch) -> Batch:
    """Shows the progress of the batch until it has ended, and returns it."""
    from garnish.calls import batch_call
    from gateway.batches.messages import ENDED, Batch

    while batch.status not in ENDED:
        counts = batch.request_counts
        share = (counts.completed + counts.failed) / counts.total if counts.total else None
        screen.progress(_format_status(batch), share)
        time.sleep(POLL_SECONDS)
        batch = client.ask(batch_call(batch.id), Batch)
    screen.end_progress()
    for problem in batch.errors.data if batch.errors else ():
        screen.notice(problem.message if problem.line is None else f"line {problem.line}: {problem.message}")
    screen.line(_format_status(batch))
    return batch


def _format_status(batch: Batch) -> str:
    counts = batch.request_counts
    done = f"{counts.completed + counts.failed} of {counts.total} calls"
    return f"{batch.status}, {done}" + (f", {counts.failed} failed" if counts.failed else "")


def _check(batch: Batch) -> None:
    """Raises GarnishError if the batch has failed, has expired or was cancelled."""
    if batch.status in ("failed", "expired", "cancelled"):
        raise GarnishError("conflict", f"the batch has not run to its end: it is {batch.status}")


group = commands(
    {"submit": submit, "watch": watch, "get": get},
    name="batch",
    help="Run many calls of one file in spare capacity.",
    no_args_is_help=True,
)
