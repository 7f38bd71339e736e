"""Copies a deploy's files from their source, in a thread, into a temporary folder."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event

from adapters.errors import StoreFull, StoreUnavailable
from adapters.sources import Forbidden, Place, SourceFiles, Sources
from cluster.errors import ServiceError
from gateway.catalog.threads import LeavableThreads
from gateway.config import GatewayConfig
from gateway.http.multipart import disk_needed
from gateway.http.upload_folders import upload_prefix

RETRY_AFTER = 5.0


def allowed_place(sources: Sources, source: str, param: str = "source") -> Place:
    """Returns the place that a source URL names. Raises ServiceError `forbidden`, about the field `param`, if the
    operator does not allow it."""
    try:
        return sources.place(source)
    except Forbidden as error:
        raise ServiceError("forbidden", str(error), param=param) from None


@asynccontextmanager
async def copied_source(
    config: GatewayConfig, sources: Sources, threads: LeavableThreads, place: Place
) -> AsyncIterator[SourceFiles]:
    """Yields a copy of the source's files, which is removed at the end of the context.

    The limits of size and time are those of an upload. Raises ServiceError `unavailable`, InvalidRequest, TooLarge.
    """
    with disk_needed():
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=upload_prefix(), dir=config.tmp_dir))
    stop, deadline = Event(), time.monotonic() + config.deploy_seconds
    work = partial(sources.copy, place, folder, limit=config.deploy_body, deadline=deadline, stop=stop)
    copying = asyncio.ensure_future(threads.run(work))
    try:
        async with asyncio.timeout(config.deploy_seconds):
            files = await asyncio.shield(copying)
        yield files
    except (TimeoutError, StoreUnavailable) as error:
        if copying.done() and not copying.exception():
            raise  # not an error of the copy, but of the context's body
        if isinstance(error, StoreFull):
            raise
        message = "the source can't be copied now, or not in time"
        raise ServiceError("unavailable", message, retry_after=RETRY_AFTER) from error
    finally:
        stop.set()
        if copying.done():
            _remove(folder, copying)
        else:  # the thread may still be writing
            copying.add_done_callback(partial(_remove, folder))


def _remove(folder: Path, copying: asyncio.Future[SourceFiles]) -> None:
    if not copying.cancelled():
        copying.exception()  # retrieved, because the caller may have left
    shutil.rmtree(folder, ignore_errors=True)  # of a disk that has become read-only; a later start removes it
