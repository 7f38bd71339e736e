"""Real models and adapters that tests of several packages share."""

from __future__ import annotations

import ast
import copy
import gc
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

# Threads of torch and numpy spin while they wait for each other: where more processes compute than there are cores,
# that takes ten times the work itself. Both read this when they are loaded, in the processes of services too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from adapters.s3_store import S3Store
from adapters.s3_url import S3Place
from node_agent.collector import settle, stop_collecting
from tests.lanes import lacks_wanted, order, pytest_xdist_make_scheduler
from tests.quick import deselect, is_left_out, pytest_addoption
from tests.support.draws import MANY, USUAL, draws
from tests.support.interpreted import patched_once
from tests.support.parsing import parse_again

__all__ = ["pytest_addoption", "pytest_xdist_make_scheduler"]

ast.parse = parse_again

# Hundreds of processes load the same modules. Where the environment forbids to keep them compiled (containers often
# do), each would compile them anew: tests' modules take twice as long, a gateway half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell's background ignores the one and `nohup` the other, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How fast a busy machine draws and runs an example says nothing about the code; pytest's own limit bounds each test.
# Continuous integration draws the same few examples each time; everyone else, and who asks for many, draws new ones.
settings.register_profile(
    "garnish",
    max_examples=draws(USUAL),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")) and not MANY,
)
settings.load_profile("garnish")

# Most of what tests write is synced, thousands of times, and read once: where there is room it is kept in memory.
MEMORY_DISK, ROOM = Path("/dev/shm"), 4 << 30
if MEMORY_DISK.is_dir() and "TMPDIR" not in os.environ:
    found = os.statvfs(MEMORY_DISK)
    if found.f_bavail * found.f_frsize >= ROOM and not found.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = str(MEMORY_DISK)
        tempfile.tempdir = None

# Triton reads this when it is first imported, which any test may cause: without a GPU its kernels run interpreted.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).parents[1]
S3_BUCKET = "garnish-tests"
CONVERSION_TIMEOUT_S = 280  # below pytest's own limit, so that the reason is shown


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What modules and tests are made of stays to the end: the garbage collector need not look through it, which takes
    most of a second each time."""
    stop_collecting()
    try:
        return (yield)
    finally:
        settle()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # nanobind, in Triton, reports what is never freed as leaks


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if is_left_out(collection_path, config) or lacks_wanted(collection_path, config) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect(items, config)
    order(items)


@pytest.fixture(scope="session")
def stories_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as a Hugging Face directory: a really trained Llama of 260 thousand parameters, fp32."""
    target = tmp_path_factory.mktemp("models") / "stories260K"
    _run_script("convert_stories.py", target).check_returncode()
    return target


@pytest.fixture(scope="session")
def hash_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model without weights, for engines on a HashRunner."""
    from tests.support.hash_runner import write_base  # loads torch

    return write_base(tmp_path_factory.mktemp("models") / "hash")


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, bf16; fetched and converted once, kept in models/."""
    target = ROOT / "models" / "SmolLM2-135M-Instruct"
    done = _run_script("fetch_smollm2.py", target)
    if done.returncode == 1 and "error:" in done.stdout:
        pytest.skip(f"SmolLM2-135M-Instruct can't be fetched here, its tests are NOT run: {done.stdout[-500:]}")
    assert done.returncode == 0, done.stdout
    return target


@pytest.fixture(scope="session")
def stories_adapters() -> dict[str, Path]:
    """Directories of the committed PEFT adapters of stories260K by name."""
    return _adapters("stories260K")


@pytest.fixture(scope="session")
def smollm_adapters() -> dict[str, Path]:
    """Directories of the committed PEFT adapters of SmolLM2-135M-Instruct by name."""
    return _adapters("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    """For tests whose Triton kernels are interpreted where there is no GPU."""
    with patched_once():
        yield


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server (moto's, a process of its own) with the bucket `garnish-tests`; boto3's environment points to it.

    The address names the server for those who want to come between.
    """
    command = [sys.executable, str(ROOT / "tests" / "support" / "s3_server.py")]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdout is not None and server.stdin is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL_S3", url)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        request = urllib.request.Request(f"{url}/{S3_BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200
        yield url
        server.stdin.close()


@pytest.fixture(scope="session")
def new_s3_store(s3_endpoint: str) -> Callable[[], S3Store]:
    """Makes empty stores on S3 which share one client: it takes longer to make than most tests to run."""
    first = S3Store(S3Place(S3_BUCKET))

    def make() -> S3Store:
        other = copy.copy(first)
        other.place = S3Place(S3_BUCKET, uuid.uuid4().hex)
        return other

    return make


def _adapters(base: str) -> dict[str, Path]:
    found = sorted(file.parent for file in (ROOT / "examples" / "adapters" / base).glob("*/adapter_config.json"))
    assert found, f"no adapters of {base} under examples/adapters"
    return {directory.name: directory for directory in found}


def _run_script(name: str, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "models" / name), str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CONVERSION_TIMEOUT_S,
    )
