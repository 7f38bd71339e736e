"""The driver of local pools over a host that notes what it is told: draining, undoing it, sizes that are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from gateway.config import MAX_TIMEOUT
from infra.autoscale.driver import Deferred, PoolSize
from infra.autoscale.local import DRAIN_SECONDS, LocalDriver
from infra.autoscale.sizes import FILE, SetSize, delete_sizes, effective_size, read_sizes, set_size
from infra.errors import InfraError, Unchanged
from infra.stack import LocalHost, Pool, Stack

NOBODY = LocalHost(
    program=("true",), service_file="/srv/serverless.yml", state="/srv", gateway_url="http://127.0.0.1:9",
    secret_file="/srv/secret", registry="/srv/registry", revision="1",
)  # fmt: skip


class Host:
    """Of a pool `here`, whose nodes are there as soon as they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.stated, self.least, self.most = directory, 1, 0, 3
        self.live = {"here-1", "other-1"}
        self.open: dict[str, int] = {}
        self.told: list[str] = []
        self.now = 0.0
        self.failure: InfraError | None = None
        self.broken: set[str] = set()
        self.looks: int | None = None
        """After so many, the gateway does not say any more whose GPU has failed; None: it always does."""

    def stack(self) -> Stack:
        size = effective_size(read_sizes(self.directory).get("here"), self.stated, self.least, self.most)
        stated = None if size == self.stated else self.stated
        here = Pool(name="here", backend="local", min=self.least, desired=size, stated=stated, max=self.most)
        return Stack(service="demo", pools=(here,), local=NOBODY)

    def running(self) -> Collection[str]:
        return self.live

    def failed(self) -> Collection[str]:
        if self.looks is not None:
            self.looks -= 1
            if self.looks < 0:
                raise InfraError("the gateway does not answer")
        return self.broken

    def open_requests(self) -> Mapping[str, int]:
        return self.open

    def drain(self, node: str, wanted: bool) -> None:
        self.told.append(f"{'drain' if wanted else 'undrain'} {node}")

    def apply(self) -> None:
        self.told.append("apply")
        if self.failure:
            raise self.failure
        desired = self.stack().local_pools[0].desired
        self.broken = set()
        self.live = {"other-1", *(f"here-{number + 1}" for number in range(desired))}

    def take_told(self) -> list[str]:
        told, self.told = self.told, []
        return told


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def driver(host: Host) -> LocalDriver:
    return LocalDriver(host, lambda: host.now)


def test_a_larger_size_is_applied_and_kept(host: Host, driver: LocalDriver) -> None:
    assert driver.size("here") == PoolSize(min=0, desired=1, max=3, live=1, settled=True)
    driver.set_desired("here", 3)
    assert host.take_told() == ["apply"]
    assert LocalDriver(host, lambda: 0.0).size("here") == PoolSize(min=0, desired=3, max=3, live=3)
    driver.set_desired("here", 3)
    assert host.take_told() == []
    assert read_sizes(host.directory) == {"here": SetSize(3, 1)}


def test_what_goes_is_drained_first(host: Host, driver: LocalDriver) -> None:
    driver.set_desired("here", 3)
    host.take_told()
    host.open = {"here-1": 5, "here-2": 0, "here-3": 1}
    with pytest.raises(Deferred, match="requests are open on here-3"):
        driver.set_desired("here", 1)
    assert sorted(host.take_told()) == ["drain here-2", "drain here-3"]
    assert driver.size("here") == PoolSize(min=0, desired=3, max=3, live=3, settled=False)
    with pytest.raises(Deferred):
        driver.set_desired("here", 1)
    assert host.take_told() == [], "drained once"
    host.open = {"here-1": 5}
    driver.set_desired("here", 1)
    assert host.take_told() == ["apply"]
    assert driver.size("here") == PoolSize(min=0, desired=1, max=3, live=1)


def test_after_long_enough_it_goes_with_open_requests(host: Host, driver: LocalDriver) -> None:
    driver.set_desired("here", 2)
    host.open = {"here-2": 1}
    with pytest.raises(Deferred):
        driver.set_desired("here", 1)
    host.now = MAX_TIMEOUT + 10.0
    with pytest.raises(Deferred):
        driver.set_desired("here", 1)
    assert "apply" not in host.told[1:], "no call is long enough to keep Terraform, and with it the autoscaler, waiting"
    host.now = DRAIN_SECONDS
    driver.set_desired("here", 1)
    assert driver.size("here").live == 1


@pytest.mark.parametrize("size", [2, 3])
def test_it_serves_again_when_it_need_not_go(host: Host, driver: LocalDriver, size: int) -> None:
    """Even if it was another process that had drained it."""
    driver.set_desired("here", 2)
    host.open = {"here-2": 1}
    with pytest.raises(Deferred):
        driver.set_desired("here", 1)
    host.take_told()
    LocalDriver(host, lambda: 0.0).set_desired("here", size)
    assert host.take_told() == ["undrain here-2", "apply"][: size - 1]
    assert driver.size("here") == PoolSize(min=0, desired=size, max=3, live=size)


def test_what_failed_half_way_is_done_by_the_next_call(host: Host, driver: LocalDriver) -> None:
    host.failure = InfraError("terraform failed")
    with pytest.raises(InfraError, match="terraform failed"):
        driver.set_desired("here", 2)
    host.failure = None
    assert driver.size("here") == PoolSize(min=0, desired=2, max=3, live=1, settled=False)
    driver.set_desired("here", 2)
    assert driver.size("here").live == 2

    host.failure = InfraError("terraform failed")
    with pytest.raises(InfraError):
        driver.set_desired("here", 1)
    host.take_told()
    driver.set_desired("here", 2)
    assert host.take_told() == ["undrain here-2"], "it lives, and is drained"


def test_what_was_not_even_begun_is_not_noted(host: Host, driver: LocalDriver) -> None:
    host.failure = Unchanged("the pool was not made yet")
    with pytest.raises(Unchanged):
        driver.set_desired("here", 2)
    assert driver.size("here") == PoolSize(min=0, desired=1, max=3, live=1)
    host.failure = None
    driver.set_desired("here", 2)
    host.failure = Unchanged("the state is locked")
    with pytest.raises(Unchanged):
        driver.set_desired("here", 1)
    host.take_told()
    driver.set_desired("here", 2)
    assert (host.take_told(), driver.size("here").settled) == (["undrain here-2"], True)


def test_a_node_that_died_is_replaced(host: Host, driver: LocalDriver) -> None:
    host.live = {"other-1"}
    assert not driver.size("here").settled
    driver.set_desired("here", 1)
    assert (host.take_told(), driver.size("here").settled) == (["apply"], True)


def test_a_node_whose_gpu_has_failed_is_replaced(host: Host, driver: LocalDriver) -> None:
    host.broken = {"here-1"}
    assert driver.size("here") == PoolSize(min=0, desired=1, max=3, live=0, settled=False)
    driver.set_desired("here", 1)
    assert (host.take_told(), driver.size("here").settled) == (["apply"], True)


def test_a_node_whose_gpu_has_failed_goes_with_a_smaller_size(host: Host, driver: LocalDriver) -> None:
    host.broken = {"here-1"}
    driver.set_desired("here", 0)
    assert (host.take_told(), host.live) == (["drain here-1", "apply"], {"other-1"})
    assert driver.size("here") == PoolSize(min=0, desired=0, max=3, live=0)


@pytest.mark.parametrize("looks", range(4))
def test_a_gateway_that_falls_silent_leaves_no_size_half_set(host: Host, driver: LocalDriver, looks: int) -> None:
    """The size is noted only once nothing but Terraform is asked any more."""
    host.looks = looks
    try:
        driver.set_desired("here", 0)
    except InfraError:
        assert read_sizes(host.directory).get("here", SetSize(1, 1)).size == 1
    host.looks = None
    assert driver.size("here").settled


@pytest.mark.parametrize("size", [-1, 4])
def test_a_size_outside_the_bounds_is_refused(host: Host, driver: LocalDriver, size: int) -> None:
    with pytest.raises(InfraError, match="is outside its bounds, 0 to 3"):
        driver.set_desired("here", size)
    assert host.told == [] and read_sizes(host.directory) == {}


def test_a_pool_that_is_not_there(driver: LocalDriver) -> None:
    with pytest.raises(InfraError, match="no such local pool"):
        driver.size("there")


def test_who_edits_the_file_means_it(host: Host, driver: LocalDriver) -> None:
    driver.set_desired("here", 3)
    host.most = 2
    assert driver.size("here").desired == 2, "bounds hold at once"
    host.most, host.stated = 3, 2
    assert driver.size("here").desired == 2
    driver.set_desired("here", 3)
    assert read_sizes(host.directory) == {"here": SetSize(3, 2)}


def test_sizes_that_cannot_be_read_are_not_ignored(tmp_path: Path) -> None:
    set_size(tmp_path, "here", SetSize(2, 1))
    set_size(tmp_path, "there", SetSize(1, 1))
    assert read_sizes(tmp_path) == {"here": SetSize(2, 1), "there": SetSize(1, 1)}
    (tmp_path / FILE).write_text('{"here": {"size": "two"}}')
    with pytest.raises(InfraError, match=r"sizes\.json can't be read .* delete it to return to `desired`"):
        read_sizes(tmp_path)
    delete_sizes(tmp_path)
    delete_sizes(tmp_path)
    assert read_sizes(tmp_path) == {}
