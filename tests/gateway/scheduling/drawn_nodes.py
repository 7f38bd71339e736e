"""Strategies for nodes and requests: every rank term, flat rows, tier, class and promise; rows and memory that are full
or not told of."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from scheduling_world import MEASURED, RECORD

from cluster.news import Resident, StrictRoom
from cluster.node_table import Demand
from cluster.performance_model import DecodeModel, PrefillModel, Transfer
from gateway.scheduling.request import RoutingRequest
from tests.support.listed_record import ListedRecord

ITEM_SIZES = st.sampled_from([0, 2, 4])
"""Of which 0 is not told."""
RANKS = st.integers(0, 512)
SMALL = st.floats(0, 1e-2)
PADDED = st.sampled_from([0, 0, 64, 512])
"""Rank to which a kernel pads; 0: it does not."""
MODELS = st.builds(
    lambda decode, prefill, device, store, share: msgspec.structs.replace(
        MEASURED, decode=decode, prefill=prefill, to_device=device, from_store=store, exposed_share=share
    ),
    st.builds(
        DecodeModel,
        st.floats(1e-4, 0.1),
        SMALL,
        st.floats(0, 1e-5),
        st.floats(0, 1e-4),
        st.sampled_from(["max_rank", "request_ranks", "adapter_ranks"]),
        st.integers(0, 6),
        PADDED,
    ),
    st.builds(PrefillModel, SMALL, st.floats(0, 1e-3), st.floats(0, 1e-6), st.floats(0, 1e-6), PADDED),
    st.builds(Transfer, SMALL, st.floats(1e6, 1e11)),
    st.builds(Transfer, SMALL, st.floats(1e6, 1e11)),
    st.floats(0, 1),
)
CLASSES = st.sampled_from(["strict", "standard", "best_effort"])
DEMANDS = st.builds(
    Demand,
    RANKS,
    st.integers(0, 2000),
    st.integers(1, 500),
    st.none() | st.floats(0.001, 1, allow_subnormal=False),
    st.just(False),
    CLASSES,
)
ROOMS = st.builds(
    StrictRoom,
    st.integers(0, 32),
    st.integers(0, 400),
    st.integers(0, 5),
    st.sampled_from([0, 0, 1, 3000]),
    st.integers(0, 6),
    st.sampled_from([0, 0, 40, 4000]),
    st.none() | st.floats(0.001, 1, allow_subnormal=False),
)


@st.composite
def nodes(draw: st.DrawFn) -> ListedRecord:
    running, waiting = draw(st.lists(RANKS, max_size=5)), draw(st.lists(RANKS, max_size=3))
    tier = draw(st.sampled_from([None, "device", "host", "disk"]))
    used = draw(st.booleans())
    free = draw(st.integers(0, 400))
    return msgspec.structs.replace(
        RECORD,
        running=len(running),
        batch_ranks=running,
        batch_slots=list(range(len(running))),
        batch_contexts=[draw(st.integers(0, 2000)) for _ in running],
        queued=len(waiting),
        queued_ranks=waiting,
        prompt_tokens_left=draw(st.integers(0, 4000)),
        tightest_tpot=draw(st.none() | st.floats(0.001, 1)),
        loading_bytes=draw(st.integers(0, 10**9)),
        adapter_itemsize=draw(ITEM_SIZES),
        max_rows=draw(st.sampled_from([0, 1, 2, 4, 32])),
        kv_blocks_free=free,
        kv_blocks=free + draw(st.integers(0, 400)),
        residents=[] if tier is None else [Resident("d", tier, 1, int(used and tier == "device"))],
        strict=draw(st.none() | ROOMS),
        performance=draw(st.none() | MODELS),
    )


REQUESTS = st.builds(
    RoutingRequest,
    id=st.just("r"),
    demand=st.builds(
        Demand,
        prompt_tokens=st.integers(1, 2000),
        max_tokens=st.integers(1, 500),
        rank=RANKS,
        tpot=st.none() | st.floats(0.001, 1),
        slo_class=CLASSES,
    ),
    digest=st.sampled_from(["d", None]),
    adapter_bytes=st.integers(1, 10**9),
    adapter_itemsize=ITEM_SIZES,
    expected_tokens=st.sampled_from([0.0, 1.0, 80.0]),
    expected_inverse=st.sampled_from([0.0, 0.05, 1.0]),
    typical_tokens=st.sampled_from([0.0, 60.0]),
    ttft=st.none() | st.floats(0.01, 100),
)
