"""The registry in a bucket that holds many functions: what listing, resolving, collecting and verifying take.

The functions are written straight into the bucket, in the form in which deploys leave them, all with one adapter's
content; orphans lie between. The server is moto's, which looks at one request at a time: its time is most of what is
measured, so requests are counted, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from adapters.base_model import load_base_model
from adapters.collect import ORPHAN_SECONDS, collect
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.s3_store import S3Store
from adapters.verify import verify
from benchmarks.common.s3 import s3_server
from tests.support.many_functions import TENANT, fill, function_name

PAGE = 100
PAGES = 5


class Requests:
    """The number of requests that a store has sent."""

    def __init__(self, store: S3Store) -> None:
        self.count = 0
        store.calls.client.meta.events.register("before-send.s3", self._count)

    def _count(self, **_: Any) -> None:
        self.count += 1

    def of(self, work: Callable[[], Any]) -> tuple[Any, float, int]:
        """The outcome of `work`, its seconds and its requests."""
        before, begin = self.count, time.perf_counter()
        outcome = work()
        return outcome, time.perf_counter() - begin, self.count - before


def measure(model_dir: Path, adapter: Path, functions: int, orphans: int) -> dict[str, Any]:
    """Returns the row of a bucket with this many functions."""
    with s3_server(max(os.sched_getaffinity(0))) as url:
        store = open_store(url)
        assert isinstance(store, S3Store)
        registry = Registry(store, load_base_model(model_dir, model_dir.name))
        fill(registry, adapter, functions, orphans)
        requests = Requests(store)
        size = min(PAGE, functions // 2)
        starts = [function_name(index * functions // (2 * PAGES)) for index in range(PAGES)]
        pages = [requests.of(partial(registry.functions, TENANT, after, size)) for after in starts]
        assert all(len(page[0]) == size for page, _, _ in pages)
        _, resolve, _ = requests.of(lambda: registry.choices(TENANT, function_name(functions // 2)))
        later = store.now() + ORPHAN_SECONDS + 600
        removed, gc, gc_requests = requests.of(lambda: collect(store, now=later))
        assert (removed.blobs, removed.artifacts, removed.manifests) == (orphans, 0, 0)
        verified, verifying, verify_requests = requests.of(lambda: verify(store))
        assert (verified.versions, verified.damaged) == (functions, 0)
    return {
        "store": "s3",
        "s3_functions": functions,
        "list_page_ms": median(seconds for _, seconds, _ in pages) * 1e3,
        "list_page_requests": max(count for _, _, count in pages),
        "resolve_read_ms": resolve * 1e3,
        "gc_s": gc,
        "gc_requests": gc_requests,
        "gc_removed": orphans,
        "verify_s": verifying,
        "verify_requests": verify_requests,
    }


def figures(row: dict[str, Any]) -> dict[str, float]:
    count = row["s3_functions"]
    return {
        "s3_list_page_ms": row["list_page_ms"],
        "s3_list_page_requests": row["list_page_requests"],
        "s3_gc_s": row["gc_s"],
        "s3_gc_requests_per_function": row["gc_requests"] / count,
        "s3_verify_s": row["verify_s"],
        "s3_verify_requests_per_function": row["verify_requests"] / count,
    }
