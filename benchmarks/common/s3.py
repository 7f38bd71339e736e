"""moto's S3 server in a separate process, with an empty bucket, to which boto3's environment points."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.report import ROOT

BUCKET = "garnish-bench"


@contextmanager
def s3_server(core: int, *, in_memory: bool = True) -> Iterator[str]:
    """Yields the s3:// URL of a registry in a new bucket, whose server runs on this core.

    `in_memory`: the server may keep objects of up to 5 MB in memory; else they are files too.
    """
    command = [sys.executable, str(ROOT / "tests" / "support" / "s3_server.py")]
    before = dict(os.environ)
    env = before if in_memory else before | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 14)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            for task in Path(f"/proc/{server.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                del os.environ[name]
            os.environ |= {
                "AWS_ENDPOINT_URL_S3": url, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            }  # fmt: skip
            request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
            with urllib.request.urlopen(request, timeout=60):
                yield f"s3://{BUCKET}/registry"
        finally:
            os.environ.clear()
            os.environ.update(before)
            server.stdin.close()
