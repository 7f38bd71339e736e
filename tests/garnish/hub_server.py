"""A Hugging Face Hub over loopback: the two routes that a download of single files takes."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

EXPIRED = "hf_expired"
"""A token that is no longer one."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`models`: content by path in the repository, by repository."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """Repositories whose files need `token`."""
    token: str = "hf_good"
    stated_sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that are told instead of the true ones, by path."""
    sent: list[str] = field(default_factory=list)
    """Paths of files whose content was asked for."""
    url: str = ""
    breaks_off: bool = False
    """Ends each file's content half-way."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.info("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
            else:
                self.file("/".join(parts[:2]), "/".join(parts[4:]))

        def info(self, repository: str, revision: str) -> None:
            if self.headers.get("authorization") == f"Bearer {EXPIRED}":
                return self.answer(b"", 401, **{"X-Error-Message": "Invalid credentials in Authorization header"})
            if repository not in hub.models:
                return self.refuse(401, "RepoNotFound")
            if revision != "main":
                return self.refuse(404, "RevisionNotFound")
            siblings = [
                {"rfilename": name, "size": hub.stated_sizes.get(name, len(content))}
                for name, content in hub.models[repository].items()
            ]
            self.answer(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())

        def file(self, repository: str, name: str) -> None:
            if repository in hub.gated and self.headers.get("authorization") != f"Bearer {hub.token}":
                return self.refuse(403, "GatedRepo")
            content = hub.models[repository][name]
            if self.command == "GET":
                hub.sent.append(name)
            if hub.breaks_off and self.command == "GET":
                content, self.close_connection = content[: len(content) // 2], True
                length = len(hub.models[repository][name])
                told = {"Content-Length": str(length), "ETag": '"half"', "X-Repo-Commit": COMMIT}
                return self.answer(content, **told)
            self.answer(content, **{"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

        def refuse(self, status: int, code: str) -> None:
            self.answer(b"", status, **{"X-Error-Code": code, "X-Error-Message": code})

        def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
