"""moto's S3 server in a separate process, with an empty bucket, to which boto3's environment points."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.common.report import ROOT

BUCKET = "garnish-bench"


LOGGING = """
import sys
sys.path.insert(0, "tests/support")
import s3_server
s3_server.QuietHandler.log_request = lambda self, *_: print(self.command, file=sys.stderr, flush=True)
s3_server.main()
"""


@contextmanager
def s3_server(core: int | None = None, *, in_memory: bool = True, log: Path | None = None) -> Iterator[str]:
    """Yields the s3:// URL of a registry in a new bucket, whose server runs on this core, or on any.

    `in_memory`: the server may keep objects of up to 5 MB in memory; else they are files too. `log`: a file that gets
    a line with the method of each request.
    """
    arguments = [str(ROOT / "tests" / "support" / "s3_server.py")] if log is None else ["-c", LOGGING]
    before = dict(os.environ)
    env = before if in_memory else before | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 14)}
    with (
        nullcontext() if log is None else log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        ) as server,
    ):  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            if core is not None:
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
