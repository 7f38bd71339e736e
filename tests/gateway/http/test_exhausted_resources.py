"""A process that is short of descriptors, memory or threads says so, and invites the caller to try again."""

from __future__ import annotations

import errno
import resource
import socket
import subprocess
import sys
import textwrap

import httpx
import pytest

from gateway.http.errors import RESOURCE_RETRY_AFTER, exhausted_resource, to_service_error


def wrapped(error: BaseException) -> BaseException:
    """Returns the error of a library that failed because of `error`."""
    try:
        try:
            raise error
        except type(error) as cause:
            raise httpx.ConnectError("all connection attempts failed") from cause
    except httpx.ConnectError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        (OSError(errno.EMFILE, "too many open files"), "descriptors"),
        (wrapped(OSError(errno.EMFILE, "too many open files")), "descriptors"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "cannot allocate memory"), "memory"),
        (RuntimeError("can't start new thread"), "threads or memory"),
    ],
)
def test_an_exhausted_resource_is_a_503_with_its_name(error: BaseException, missing: str) -> None:
    answer = to_service_error(error)
    assert (answer.type, answer.retry_after) == ("unavailable", RESOURCE_RETRY_AFTER)
    assert missing in answer.message


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError(errno.EACCES, "denied"), ValueError(), KeyError("x")])
def test_other_errors_stay_unexpected(error: BaseException) -> None:
    assert exhausted_resource(error) == "" and to_service_error(error).type == "internal"


def test_descriptors_that_run_out_here() -> None:
    """What the system says, rather than what a test makes up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sockets = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        with pytest.raises(OSError, match="Too many open files") as raised:
            sockets.extend(socket.socket() for _ in range(65))
    finally:
        for each in sockets:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert exhausted_resource(raised.value) == "descriptors"


def test_threads_and_memory_that_run_out_in_a_process() -> None:
    script = """
        import resource, threading
        from gateway.http.errors import exhausted_resource
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 20),) * 2)
        for act in (lambda: threading.Thread(target=print).start(), lambda: bytearray(64 << 20)):
            try:
                act()
            except Exception as error:
                print(exhausted_resource(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["threads or memory", "memory"]
