"""Aliases against a model of them: where they point, what they remember, where a rollback leads."""

from __future__ import annotations

import math
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from adapters import aliases
from adapters.aliases import Alias, AliasChange, checked_weights, history_room, moved, point_of, rolled_back
from adapters.base_model import BaseModel
from adapters.choices import Choice, Resolved, pick
from adapters.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from adapters.functions import FunctionRecord, Policy, VersionEntry, with_version
from adapters.local_store import LocalStore
from adapters.records import update_record
from adapters.registry import Registry
from adapters.standing import function_key
from tests.support.draws import draws

NAMES = ("latest", "prod", "canary")
VERSIONS = st.integers(1, 5)


class AliasMachine(RuleBasedStateMachine):
    """The reference knows two things of an alias: every target that it ever had, and the stack that rollbacks pop."""

    base: BaseModel
    folder: Path

    @initialize()
    def begin(self) -> None:
        self.registry = Registry(LocalStore(self.folder / uuid.uuid4().hex), self.base)
        self.changes = self.registry.changes
        self.listed: dict[int, str] = {}
        self.next = 1
        self.targets: dict[str, list[dict[str, float]]] = {}
        self.stack: dict[str, list[dict[str, float]]] = {}
        self.generation = 0
        self.deploy(digest="a", alias="latest")

    def now_at(self, alias: str, weights: dict[str, float]) -> None:
        if self.targets.get(alias, [None])[-1] != weights:
            self.targets.setdefault(alias, []).append(weights)
            self.stack.setdefault(alias, []).append(weights)

    @rule(digest=st.sampled_from("abcdef"), alias=st.sampled_from(NAMES))
    def deploy(self, digest: str, alias: str) -> None:
        """As a deploy commits: the bytes that are known keep their version."""
        version = next((number for number, known in self.listed.items() if known == digest), self.next)
        entry = VersionEntry(version, digest, self.base.fingerprint, (4,), ("q",), 10, 0.0, 2)

        def commit(record: FunctionRecord | None) -> FunctionRecord:
            return with_version(record or FunctionRecord(name="f", created=0.0, generation=0), entry, alias, 0.0)

        update_record(self.registry.store, function_key("acme", "f"), FunctionRecord, commit)
        self.listed[version] = digest
        self.next = max(self.next, version + 1)
        self.now_at(alias, {str(version): 1.0})
        if "latest" not in self.targets:
            self.now_at("latest", {str(version): 1.0})
        self.generation += 1

    @rule(alias=st.sampled_from(NAMES), first=VERSIONS, second=VERSIONS, share=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def set_alias(self, alias: str, first: int, second: int, share: float) -> None:
        asked = {str(first): 1.0} if first == second else {str(first): 1 - share, str(second): share}
        weights = {version: part for version, part in asked.items() if part}
        if not {int(version) for version in weights} <= set(self.listed):
            with pytest.raises(NotFound):
                self.changes.set_alias("acme", "f", alias, asked)
            return
        before = self.targets.get(alias, [None])[-1]
        record = self.changes.set_alias("acme", "f", alias, asked, matches={self.generation})
        self.now_at(alias, weights)
        self.generation += before != weights
        assert record.generation == self.generation

    @rule(alias=st.sampled_from(NAMES))
    def roll_back(self, alias: str) -> None:
        if alias not in self.stack:
            with pytest.raises(NotFound):
                self.changes.roll_back("acme", "f", alias)
            return
        *stack, current = self.stack[alias]
        while stack and (stack[-1] == current or not {int(version) for version in stack[-1]} <= set(self.listed)):
            stack.pop()
        if not stack:
            with pytest.raises(Conflict):
                self.changes.roll_back("acme", "f", alias)
            return
        self.changes.roll_back("acme", "f", alias, matches={self.generation, 10_000})
        self.stack[alias] = stack
        self.targets[alias].append(stack[-1])
        self.generation += 1

    @rule(version=VERSIONS)
    def delete_version(self, version: int) -> None:
        if version not in self.listed:
            with pytest.raises(NotFound):
                self.registry.delete_version("acme", "f", version)
        elif any(str(version) in targets[-1] for targets in self.targets.values()):
            with pytest.raises(Conflict, match="in use by the alias"):
                self.registry.delete_version("acme", "f", version)
        else:
            self.registry.delete_version("acme", "f", version)
            del self.listed[version]
            self.generation += 1

    @rule(alias=st.sampled_from(NAMES))
    def someone_was_faster(self, alias: str) -> None:
        for matches in ({self.generation - 1}, {self.generation + 1}, frozenset[int]()):
            with pytest.raises(PreconditionFailed):
                self.changes.set_alias("acme", "f", alias, {"1": 1.0}, matches=matches)
            with pytest.raises(PreconditionFailed):
                self.changes.roll_back("acme", "f", alias, matches=matches)

    @invariant()
    def the_record_says_the_same(self) -> None:
        record = self.registry.function("acme", "f")
        assert record.generation == self.generation
        assert {entry.version: entry.digest for entry in record.versions} == self.listed
        assert record.next_version == self.next
        found = {
            name: [*(past.weights for past in alias.history), alias.weights] for name, alias in record.aliases.items()
        }
        assert found == self.targets
        assert {name: alias.generation for name, alias in record.aliases.items()} == {
            name: len(targets) for name, targets in self.targets.items()
        }

    @invariant()
    def names_resolve_to_it(self) -> None:
        for alias, targets in self.targets.items():
            found = {str(choice.version.version): choice.share for choice in self.registry.choices("acme", "f", alias)}
            assert found == targets[-1]
            assert all(
                choice.version.digest == self.listed[choice.version.version]
                for choice in self.registry.choices("acme", "f", alias)
            )


@pytest.mark.hypothesis
def test_aliases_follow_the_model(base: BaseModel, tmp_path: Path) -> None:
    class Machine(AliasMachine):
        pass

    Machine.base, Machine.folder = base, tmp_path
    run_state_machine_as_test(Machine, settings=settings(stateful_step_count=25))


def choices(weights: dict[str, float]) -> list[Choice]:
    return [
        Choice(share, Resolved("f", int(version), f"digest-{version}", "", (4,), 10, Policy(), 2))
        for version, share in sorted(weights.items(), key=lambda item: int(item[0]))
    ]


def test_rolling_back_twice_goes_two_back_and_a_later_move_starts_from_there() -> None:
    alias = None
    for version in "1234":
        alias = moved(alias, {version: 1.0}, 0.0)
    assert alias is not None
    alias = rolled_back(rolled_back(alias, "1234", 0.0), "1234", 0.0)
    assert alias.weights == {"2": 1.0}
    alias = rolled_back(moved(alias, {"5": 1.0}, 0.0), "12345", 0.0)
    assert alias.weights == {"2": 1.0}  # not 3 or 4, which the rollbacks left behind
    alias = rolled_back(alias, "12345", 0.0)
    assert alias.weights == {"1": 1.0}
    with pytest.raises(Conflict):
        rolled_back(alias, "12345", 0.0)
    assert [list(past.weights) for past in alias.history] == [["1"], ["2"], ["3"], ["4"], ["3"], ["2"], ["5"], ["2"]]


def test_a_rollback_passes_over_versions_that_are_gone() -> None:
    alias = None
    for weights in ({"1": 1.0}, {"2": 0.5, "3": 0.5}, {"1": 1.0}, {"3": 1.0}):
        alias = moved(alias, weights, 0.0)
    assert alias is not None
    back = rolled_back(alias, "13", 0.0)
    assert back.weights == {"1": 1.0}
    with pytest.raises(Conflict):
        rolled_back(back, "13", 0.0)  # what is left before is where it points already
    assert rolled_back(back, "123", 0.0).weights == {"2": 0.5, "3": 0.5}


def test_an_old_history_is_forgotten_and_rollbacks_end_there() -> None:
    alias = None
    for version in range(1, 8):
        alias = moved(alias, {str(version): 1.0}, 0.0, keep=3)
    assert alias is not None
    assert (alias.generation, [list(past.weights) for past in alias.history]) == (7, [["4"], ["5"], ["6"]])
    listed = [str(version) for version in range(1, 8)]
    once = rolled_back(alias, listed, 0.0, keep=3)
    twice = rolled_back(once, listed, 0.0, keep=3)
    assert [once.weights, twice.weights] == [{"6": 1.0}, {"5": 1.0}]
    with pytest.raises(Conflict):  # 4 is out of what is remembered by now
        rolled_back(twice, listed, 0.0, keep=3)


def test_histories_together_are_bounded() -> None:
    assert [history_room(count) for count in (0, 1, 10, 100, 1000, 5000)] == [1000, 1000, 1000, 100, 10, 10]
    assert aliases.MAX_HISTORY == 1000


def test_a_history_written_before_there_were_rollbacks_is_read() -> None:
    old = Alias({"3": 1.0}, 3, 0.0, (AliasChange({"1": 1.0}, 0.0), AliasChange({"2": 1.0}, 0.0)))
    assert rolled_back(old, "123", 0.0).weights == {"2": 1.0}


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"1": 0.0},
        {"1": 0.5},
        {"1": 0.5, "2": 0.5001},
        {"1": 1.5, "2": -0.5},
        {"1": math.nan},
        {"1": math.inf},
        {str(version): 1 / 11 for version in range(1, 12)},
    ],
)
def test_shares_that_are_none(weights: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        checked_weights(weights)
    assert raised.value.param == "weights"


def test_shares_may_be_decimal_fractions() -> None:
    tenths = {str(version): 0.1 for version in range(1, 11)}
    assert sum(tenths.values()) != 1
    assert checked_weights(tenths) == tenths
    assert checked_weights({"1": 1.0, "2": 0.0}) == {"1": 1.0}


@given(st.lists(st.integers(1, 100), min_size=1, max_size=10), st.floats(0, 1, exclude_max=True))
def test_a_point_falls_into_the_share_that_holds_it(parts: list[int], point: float) -> None:
    weights = {str(version): part / sum(parts) for version, part in enumerate(parts, 1)}
    chosen = pick(choices(weights), point).version
    before = sum(parts[: chosen - 1]) / sum(parts)
    assert before - 1e-9 <= point <= before + parts[chosen - 1] / sum(parts) + 1e-9


@given(st.text(max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_a_growing_canary_keeps_its_sessions(session: str, one: float, other: float) -> None:
    smaller, larger = sorted((one, other))
    point = point_of("acme", "f", "prod", session)
    assert 0 <= point < 1

    def version(share: float) -> int:
        return pick(choices({"3": 1 - share, "4": share}), point).version

    assert version(larger) >= version(smaller)
    assert (version(0.0), version(1.0)) == (3, 4)


@settings(max_examples=draws(10))
@given(st.sampled_from([0.01, 0.1, 0.5]), st.text(min_size=1, max_size=8))
def test_a_canary_gets_its_share(share: float, prefix: str) -> None:
    """Within six standard deviations of the binomial."""
    calls = 4000
    offered = choices({"3": 1 - share, "4": share})
    got = sum(pick(offered, point_of("acme", "f", "prod", f"{prefix}{call}")).version == 4 for call in range(calls))
    assert abs(got - calls * share) <= 6 * math.sqrt(calls * share * (1 - share))
