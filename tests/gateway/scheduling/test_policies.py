"""The other policies, and the registry of them all."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_world import MEASURED, ask, chosen, node, slow, table_of

from cluster.node_table import COLUMNS, Demand
from garnish import service_file
from garnish.config import built
from gateway.config import GatewayConfig
from gateway.scheduling.policy import POLICIES, UnknownPolicy, make_policy
from gateway.scheduling.toppings import PENALTY, Toppings
from tests.support.listed_record import ListedRecord

RANDOM_NODES = st.lists(
    st.builds(
        lambda ranks, waiting, factor, prompts: node(
            "",
            *ranks,
            queued=len(waiting),
            queued_ranks=waiting,
            prompt_tokens_left=prompts,
            performance=slow(factor),
        ),
        st.lists(st.integers(0, 128), max_size=6),
        st.lists(st.integers(0, 128), max_size=4),
        st.floats(0.5, 4),
        st.integers(0, 2000),
    ),
    min_size=1,
    max_size=6,
)


def test_unknown_policies_are_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownPolicy, match=r"'best'.*first_fit, most_idle, random, rank_aware, toppings"):
        make_policy("best")


def test_the_service_file_knows_the_same_ones() -> None:
    assert set(built("gateway.policy")) == set(POLICIES)
    config = GatewayConfig(model_dir="", base_id="b", registry="", secret_file="", tmp_dir="")
    assert config.policy == service_file.Gateway().policy == "rank_aware"


@given(RANDOM_NODES, st.sampled_from(sorted(POLICIES)), st.data())
def test_each_chooses_a_candidate_and_changes_nothing(
    records: list[ListedRecord], name: str, data: st.DataObject
) -> None:
    table = table_of(*(msgspec.structs.replace(record, id=str(index)) for index, record in enumerate(records)))
    rows = sorted(data.draw(st.sets(st.integers(0, len(records) - 1), min_size=1)))
    before = {column: getattr(table, column).copy() for column in COLUMNS}
    policy = make_policy(name)
    for index in range(3):
        assert policy.choose(table, np.array(rows), ask(id=str(index))) in rows
    for column, values in before.items():
        np.testing.assert_array_equal(values, getattr(table, column))


@given(RANDOM_NODES, st.none() | st.floats(0.02, 0.2))
def test_toppings_is_algorithm_1(records: list[ListedRecord], slo: float | None) -> None:
    records = [msgspec.structs.replace(record, id=str(index)) for index, record in enumerate(records)]
    request, policy = ask(tpot=slo, typical_tokens=50.0), Toppings()
    totals = []
    for record in records:
        assert record.performance is not None
        decode, prefill = record.performance.decode, record.performance.prefill
        exists = [*record.batch_ranks, *record.queued_ranks]
        contexts = sum(record.batch_contexts) + record.prompt_tokens_left
        then = decode.seconds(len(exists) + 1, contexts + 150, sum(exists) + 16)
        cost = prefill.seconds(100, 100 * 100, 100 * 16) - prefill.base
        cost = cost / 50.0 + then - decode.seconds(len(exists), contexts, sum(exists))
        totals.append((cost + (PENALTY if slo is not None and then > slo else 0.0)) * len(exists))
    table = table_of(*records)
    found = policy.choose(table, np.arange(len(records)), request)
    assert policy.last is not None
    np.testing.assert_allclose(policy.last.totals, totals, rtol=1e-6, atol=1e-9)
    assert found == int(np.argmin(policy.last.totals))


def test_first_fit_fills_one_node_before_the_next() -> None:
    policy = make_policy("first_fit")
    nodes = table_of(node("c"), node("b", max_rows=3), node("a", max_rows=3))
    taken = []
    for index in range(7):
        row = policy.choose(nodes, np.arange(3), ask())
        assert row is not None
        nodes.reserve(row, str(index), Demand(16, 100, 200))
        taken.append(nodes.ids[row])
    assert taken == ["a", "a", "a", "b", "b", "b", "c"]
    small = table_of(node("a", 8, kv_blocks_free=10), node("b", kv_blocks_free=19))
    assert chosen(policy, small) == "b"
    assert chosen(policy, small, ask(prompt_tokens=1000)) == "b"  # room on neither: the emptier one


def test_most_idle_prefers_fewer_requests_then_the_adapter_then_memory() -> None:
    policy = make_policy("most_idle")
    nodes = table_of(node("a", 8, 8), node("b", queued=1), node("c"))
    for index in range(2):
        nodes.reserve(2, str(index), Demand())
    assert chosen(policy, nodes) == "b"
    assert chosen(policy, table_of(node("a"), node("b", tier="host"))) == "b"
    assert chosen(policy, table_of(node("a", tier="host"), node("b", tier="device"))) == "b"
    assert chosen(policy, table_of(node("a"), node("b", 8, tier="host"))) == "a"
    assert chosen(policy, table_of(node("a"), node("b", kv_blocks_free=2001))) == "b"


def test_random_repeats_with_its_seed() -> None:
    nodes = table_of(*(node(str(index)) for index in range(5)))

    def draws(seed: int) -> list[str | None]:
        policy = make_policy("random", seed=seed)
        return [chosen(policy, nodes) for _ in range(40)]

    assert draws(1) == draws(1) != draws(2)
    assert set(draws(1)) == set("01234")


def test_an_adapter_that_the_batch_has_adds_no_rank() -> None:
    """By the model that counts distinct adapters."""
    decode = msgspec.structs.replace(MEASURED.decode, rank_term="adapter_ranks")
    model = msgspec.structs.replace(MEASURED, decode=decode)
    with_it = node("with", 16, 16, tier="device", performance=model)
    used = [msgspec.structs.replace(with_it.residents[0], in_use=2)]
    nodes = table_of(msgspec.structs.replace(with_it, residents=used), msgspec.structs.replace(with_it, id="without"))
    policy = make_policy("rank_aware")
    assert chosen(policy, nodes) == "with"
    last = policy.last  # type: ignore[attr-defined]
    np.testing.assert_allclose(last.terms.decode[1] - last.terms.decode[0], 16 * model.decode.per_rank)
