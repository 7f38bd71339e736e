"""Deploys and removals in any order, with the functions as the truth: the limit is never passed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapters.errors import Conflict, PreconditionFailed
from adapters.functions import FunctionRecord, VersionEntry
from adapters.local_store import LocalStore
from adapters.quota import Quota
from adapters.quota_usage import HOLD_SECONDS, RECOUNT_SECONDS
from adapters.records import read_record
from adapters.standing import function_key
from adapters.tenants import Limits, Tenants
from tests.support.draws import draws


@dataclass
class Running:
    """A deploy in progress. It has checked its hold after it read its function's record, whose etag is `etag`."""

    name: str
    hold: str
    etag: str | None
    began: float


class QuotaMachine(RuleBasedStateMachine):
    """Deploys and removals that end, fail, die, stop for hours or overlap."""

    LIMIT = 4

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = LocalStore(Path(self.folder.name) / "registry")
        self.now = 1000.0
        self.quota = Quota(self.store, lambda: self.now)
        self.names: list[str] = []
        self.running: list[Running] = []
        self.made = 0
        Tenants(self.store).put("acme", limits=Limits(adapters=self.LIMIT))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(how=st.sampled_from(["made", "failed", "died unlisted", "died listed", "listed", "stopped"]))
    def deploy(self, how: str) -> None:
        self.made += 1
        name = f"f{self.made}"
        try:
            hold = self.quota.take("acme", name, 10)
        except Conflict:
            assert len(self.names) + self.held() >= self.LIMIT
            return
        assert hold is not None
        deploy = Running(name, hold, None, self.now)
        if how in ("made", "died listed", "listed"):
            assert self.write(deploy)
        if how in ("stopped", "listed"):
            self.running.append(deploy)
        if how in ("made", "failed"):
            self.quota.settle("acme", hold, 10 if how == "made" else None)

    def held(self) -> int:
        """Holds and sums that the next count, once it is due, will correct: they excuse a refusal."""
        held = Tenants(self.store).get("acme").held
        assert held is not None
        return held.adapters + len(held.holds)

    @rule(again=st.booleans())
    def go_on(self, again: bool) -> None:
        """A stopped deploy writes its function's record, and tries again if it has changed."""
        if not self.running:
            return
        deploy = self.running.pop(0)
        listed = self.entry(deploy.name) or self.write(deploy)
        if not listed and again:
            stored = read_record(self.store, function_key("acme", deploy.name), FunctionRecord)
            deploy.etag = None if stored is None else stored[1]
            if not self.quota.is_open("acme", deploy.hold):
                try:
                    deploy.hold = self.quota.take("acme", deploy.name, 10) or ""
                except Conflict:
                    return
            listed = self.write(deploy)
            assert listed
        self.quota.settle("acme", deploy.hold, 10 if listed else None)

    @rule(died=st.booleans())
    def remove(self, died: bool) -> None:
        if not self.names:
            return
        name = self.names.pop()
        try:
            with self.quota.removing("acme") as freed:
                gone = FunctionRecord(name=name, created=0, deleted=True)
                self.store.put(function_key("acme", name), msgspec.json.encode(gone))
                self.running = [deploy for deploy in self.running if deploy.name != name]  # it dies, if it runs
                freed.set(1, 10)
                if died:
                    raise InterruptedError
        except InterruptedError:
            pass

    @rule(seconds=st.sampled_from([1.0, HOLD_SECONDS + 1, RECOUNT_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def never_too_many(self) -> None:
        if hasattr(self, "store"):
            assert len(self.names) <= self.LIMIT
            assert self.held() >= len(self.names), "the bound is too low"

    @rule()
    def after_an_hour_the_room_is_there(self) -> None:
        self.now += RECOUNT_SECONDS + 1
        if len(self.names) < self.LIMIT:
            hold = self.quota.take("acme", "last", 10)
            assert hold is not None
            self.quota.settle("acme", hold, None)

    def entry(self, name: str) -> bool:
        return name in self.names

    def write(self, deploy: Running) -> bool:
        """Returns whether the version is listed: not if the function's record has changed."""
        entry = VersionEntry(1, "0" * 64, "base", (4,), ("q_proj",), 10, self.now, 2, hold=deploy.hold)
        data = msgspec.json.encode(FunctionRecord(name=deploy.name, created=0, versions=(entry,)))
        try:
            if deploy.etag is None:
                self.store.put_if_absent(function_key("acme", deploy.name), data)
            else:
                self.store.put_if_match(function_key("acme", deploy.name), data, deploy.etag)
        except (Conflict, PreconditionFailed):
            return False
        self.names.append(deploy.name)
        return True


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=draws(15), stateful_step_count=25)
