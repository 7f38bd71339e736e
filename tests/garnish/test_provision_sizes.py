"""`garnish infra` by terraform itself over stand-ins of nodes: the sizes that the autoscaler has set, and plans."""

from __future__ import annotations

import signal

import pytest

from garnish.autoscaling import ThisHost
from garnish.errors import FrontDoorError
from garnish.provision import DEAD, FAILED
from infra.autoscale.sizes import SetSize, set_size
from infra.errors import InfraError
from tests.garnish.draining_gateway import running_gateway
from tests.garnish.local_pools import Pools
from tests.infra.stacks import needs_terraform

pytestmark = needs_terraform


def sized(pools: Pools, size: int, stated: int = 2) -> None:
    """As the autoscaler notes it."""
    set_size(pools.state / "infra" / "demo", "here", SetSize(size, stated))


def test_the_autoscaler_s_size_is_made_so_and_kept(pools: Pools) -> None:
    pools.made()
    sized(pools, 3)
    assert pools.plan() == [("create", "here-3", "not there yet")]
    pools.provision().resize_local_pools(pools.told.append)
    pools.start("here-3")
    assert pools.plan() == []
    provision = pools.provision()
    told = "the autoscaler has set 3, serverless.yml says 2"
    assert provision.format_pool_sizes() == [f"node_pools.here: {told}; the plan keeps that, until `desired` is edited"]
    (shown,) = provision.show()
    assert (shown.desired, shown.applied, shown.drift) == (3, 3, [told])

    sized(pools, 1)
    pools.provision().resize_local_pools(pools.told.append)
    assert [pools.running[node].wait(30) for node in ("here-2", "here-3")] == [-signal.SIGTERM] * 2
    assert pools.plan() == []
    pools.declare({"here": 3})
    assert [change[:2] for change in pools.plan()] == [("create", "here-2"), ("create", "here-3")]
    assert pools.provision().format_pool_sizes() == []


def test_a_size_also_replaces_what_died(pools: Pools) -> None:
    pools.made()
    pools.kill("here-2")
    assert pools.plan() == [("replace", "here-2", DEAD)]
    pools.provision().resize_local_pools(pools.told.append)
    (shown,) = pools.provision().show()
    assert shown.applied == 2


def test_a_size_also_replaces_a_node_whose_gpu_has_failed(pools: Pools) -> None:
    """Once nothing runs on it; it is still alive."""
    with running_gateway(pools.port) as gateway:
        pools.made()
        gateway.open |= {"here-1": 0, "here-2": 1}
        gateway.faults["here-2"] = "the GPU is lost"
        host = ThisHost(pools.file, pools.state)
        assert (host.failed(), set(host.running())) == (set(), {"here-1", "here-2"})
        gateway.open["here-2"] = 0
        assert (host.failed(), set(host.running())) == ({"here-2"}, {"here-1", "here-2"})
        assert pools.plan() == [("replace", "here-2", FAILED)]
        (shown,) = pools.provision().show()
        assert shown.nodes["here-2"] == f"draining ({FAILED})"
        pools.told.clear()
        pools.provision().resize_local_pools(pools.told.append)
    assert [line for line in pools.told if line.endswith("done")] == ["here-2: destroy done", "here-2: create done"]
    assert not any(line.startswith("here-1") for line in pools.told)


def test_a_size_carries_out_nothing_that_nobody_looked_at(pools: Pools) -> None:
    with pytest.raises(InfraError, match=r"node_pools\.here does not exist yet: run `garnish infra plan`"):
        pools.provision().resize_local_pools(pools.told.append)
    pools.made()
    pools.declare({"here": 2}, node={"dtype": "float32"})
    sized(pools, 3)
    with pytest.raises(InfraError, match=r"replace of here-1 \(the nodes' settings have changed\) was not applied yet"):
        pools.provision().resize_local_pools(pools.told.append)
    (shown,) = pools.provision().show()
    assert shown.applied == 2
    with pytest.raises(FrontDoorError, match="no saved plan"):
        pools.apply()


def test_destroy_forgets_the_sizes(pools: Pools) -> None:
    pools.plan()
    pools.apply()
    sized(pools, 1)
    pools.provision().destroy(lambda note: None, pools.told.append, force=True)
    assert [change[1] for change in pools.plan()] == ["here-1", "here-2"]


def test_a_plan_from_before_a_size_was_set_is_refused(pools: Pools) -> None:
    pools.plan()
    sized(pools, 3)
    with pytest.raises(FrontDoorError, match="before the autoscaler changed a size"):
        pools.apply()


def test_the_autoscaler_leaves_a_saved_plan_alone(pools: Pools) -> None:
    """What it could not do has changed nothing; what it did makes the plan stale, as Terraform says."""
    pools.made()
    pools.declare({"here": 2}, node={"dtype": "float32"})
    assert [change[0] for change in pools.plan()] == ["replace", "replace"]
    sized(pools, 3)
    with pytest.raises(InfraError, match="was not applied yet"):
        pools.provision().resize_local_pools(pools.told.append)
    sized(pools, 2)
    assert len(pools.apply().changes) == 2

    pools.declare({"here": 2})
    pools.plan()
    pools.apply()
    pools.kill("here-2")
    assert pools.plan() == [("replace", "here-2", DEAD)]
    pools.provision().resize_local_pools(pools.told.append)
    with pytest.raises(FrontDoorError, match="state has changed since"):
        pools.apply()
