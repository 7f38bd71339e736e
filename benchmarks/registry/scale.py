"""Times of the registry as it grows to many functions.

Functions of tiny adapters are deployed one by one, each another adapter; `deploy_ms_at_*` is the median of the deploys
around that count. What lies between is written straight into the directory, in the form in which deploys leave it, for
deploys sync each file to the disk and would take an hour. Resolving is measured as the gateway does it, through its
cache, with 40,000 names known to it; listing as a page of 100 in the midst of all functions. On S3
(scale_s3.py) listing, collecting and verifying are measured with as many functions.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from adapters.base_model import load_base_model
from adapters.blobs import blob_key
from adapters.deployment import AdapterUpload
from adapters.local_store import LocalStore
from adapters.registry import Registry
from benchmarks.common.report import STORIES, ContentionProbe, arguments, example_adapter, publish, report
from benchmarks.registry import scale_s3
from gateway.catalog.cache import GraceCache
from gateway.catalog.functions import Functions
from gateway.catalog.threads import StoreThreads
from gateway.config import GatewayConfig

TENANT = "bench"
PAGE = 100
AROUND = 40
FIELDS = ("adapter_config.json", "adapter_model.safetensors")


class Many:
    """A registry that is filled to a count."""

    def __init__(self, model_dir: Path, adapter: Path, root: Path) -> None:
        self.root = root
        self.registry = Registry(LocalStore(root), load_base_model(model_dir, model_dir.name))
        self.config = json.loads((adapter / FIELDS[0]).read_bytes())
        self.weights = adapter / FIELDS[1]
        self.count = 0

    def deploy(self) -> float:
        """Seconds of one deploy: the same tensors with another alpha are another adapter."""
        config = json.dumps({**self.config, "lora_alpha": 1 + self.count}).encode()
        begin = time.perf_counter()
        self.registry.deploy(TENANT, _name(self.count), AdapterUpload(config, self.weights))
        self.count += 1
        return time.perf_counter() - begin

    def fill(self, count: int) -> None:
        """Up to `count` functions, each with the record, manifest, file and artifact that a deploy leaves."""
        record = self.registry.function(TENANT, _name(0))
        manifest = self.registry.manifest(TENANT, _name(0), 1)
        for number in range(self.count, count):
            digest, name = f"{number:064x}", _name(number)
            entry = msgspec.structs.replace(record.versions[0], digest=digest)
            folder = f"tenants/{TENANT}/functions/{name}"
            mine = msgspec.structs.replace(manifest, function=name, digest=digest, config_sha256=digest)
            self._write(f"{folder}/function.json", msgspec.structs.replace(record, name=name, versions=(entry,)))
            self._write(f"{folder}/versions/1.json", mine)
            self._write(blob_key(digest), self.config)
            self._write(f"artifacts/v1/{manifest.base}/{digest}", {})
        self.count = max(self.count, count)

    def _write(self, key: str, content: Any) -> None:
        file = self.root / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(content))


def measure(many: Many, counts: list[int], around: int) -> list[dict[str, Any]]:
    rows = []
    for count in counts:
        many.fill(count - around // 2)
        seconds = [many.deploy() for _ in range(around)]
        rows.append({"functions": count, "deploy_ms": median(seconds) * 1e3, "deploy_max_ms": max(seconds) * 1e3})
        pages = []
        for index in range(5):
            begin = time.perf_counter()
            page, after = many.registry.functions(TENANT, _name(many.count // 2 + index), min(PAGE, many.count // 4))
            pages.append(time.perf_counter() - begin)
            assert page and after is not None
        rows[-1]["list_page_ms"] = median(pages) * 1e3
    return rows


async def resolve(many: Many, names: int, lookups: int) -> dict[str, float]:
    """Microseconds of a resolution that is known, with `names` of them in the cache; and of one that is read."""
    base_id, root = many.registry.base.id, str(many.root)
    config = GatewayConfig(model_dir="", base_id=base_id, registry=root, secret_file="", tmp_dir="", cache_seconds=1e6)
    functions = Functions(config, many.registry, StoreThreads(10.0), time.monotonic, lambda _: float("-inf"))
    cache: GraceCache[Any, Any] = functions._cache
    begin = time.perf_counter()
    sample = [_name(number) for number in range(0, many.count, max(1, many.count // 200))]
    choices = [await functions.choices(TENANT, name, None) for name in sample]
    read = (time.perf_counter() - begin) / len(sample)
    for number in range(names):
        cache._cached[TENANT, f"x{number}", ""] = (choices[0], time.monotonic())
    sample_names = [f"x{number * 7919 % names}" for number in range(lookups)]
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for name in sample_names:
            await functions.target(TENANT, name, None, "")
        times.append((time.perf_counter() - begin) / lookups)
    return {"names": names, "cached_us": median(times) * 1e6, "read_us": read * 1e6}


def _name(number: int) -> str:
    return f"f{number:05d}"


def main() -> None:
    parser = arguments(__doc__ or "", STORIES)
    options = parser.parse_args()
    settings: dict[str, Any] = {"counts": [100, 1000, 10_000], "around": AROUND, "names": 40_000, "lookups": 20_000}
    settings |= {"s3_functions": 10_000, "s3_orphans": 1000}
    if options.quick:
        settings |= {"counts": [40, 400], "around": 8, "names": 4_000, "lookups": 2_000}
        settings |= {"s3_functions": 60, "s3_orphans": 5}
    probe = ContentionProbe()
    adapter = example_adapter(options.model)
    with tempfile.TemporaryDirectory() as root:
        many = Many(options.model, adapter, Path(root))
        many.deploy()
        rows = measure(many, settings["counts"], settings["around"])
        resolved = asyncio.run(resolve(many, settings["names"], settings["lookups"]))
    bucket = scale_s3.measure(options.model, adapter, settings["s3_functions"], settings["s3_orphans"])
    settings |= {**probe.values(), "store": "directory"}
    figures = {f"deploy_ms_at_{row['functions']}": row["deploy_ms"] for row in rows}
    figures |= {"deploy_last_over_first": rows[-1]["deploy_ms"] / rows[0]["deploy_ms"]}
    figures |= {f"resolve_us_at_{settings['names']}": resolved["cached_us"], "resolve_read_us": resolved["read_us"]}
    figures |= {"list_page_ms": rows[-1]["list_page_ms"], "list_page_first_ms": rows[0]["list_page_ms"]}
    figures |= scale_s3.figures(bucket)
    publish(report("scale", settings, options.seed, [*rows, resolved, bucket], figures), options.json)


if __name__ == "__main__":
    main()
