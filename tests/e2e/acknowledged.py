"""Changes and calls in the background, and a note of each that was acknowledged: what a restart must not lose."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from whole_service import Service

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE

FUNCTION = "grown"
CALL = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
PAUSE = 0.03
"""Between two changes of one kind, in seconds: the history of an alias has an end."""

Usage = dict[int, Counter[str]]
"""By version: requests, prompt_tokens, completion_tokens, cold_starts."""


def variant(directory: Path, number: int) -> dict[str, bytes]:
    """The adapter's files with other low bits in its last three weights (bf16): a version for each number to 2^21."""
    weights = bytearray((directory / WEIGHTS_FILE).read_bytes())
    for place, digit in enumerate((number, number >> 7, number >> 14), start=1):
        weights[-2 * place] ^= digit & 127
    return {CONFIG_FILE: (directory / CONFIG_FILE).read_bytes(), WEIGHTS_FILE: bytes(weights)}


@dataclass
class Acknowledged:
    versions: dict[int, str] = field(default_factory=dict)
    """Digests of FUNCTION's versions."""
    functions: dict[str, str] = field(default_factory=dict)
    """Digests of the other functions."""
    deleted: set[str] = field(default_factory=set)
    moves: dict[int, dict[str, float]] = field(default_factory=dict)
    """Targets of the alias `prod` by the number of the change."""
    keys: list[str] = field(default_factory=list)
    revoked: list[str] = field(default_factory=list)
    used: Usage = field(default_factory=dict)
    """Of the present round."""
    unsure: int = 0
    """Calls of the present round whose reply did not come."""

    def sizes(self) -> tuple[int, ...]:
        calls = sum(counts["requests"] for counts in list(self.used.values()))
        kinds = (self.versions, self.functions, self.deleted, self.moves, self.keys, self.revoked)
        return (calls, *(len(kind) for kind in kinds))


class Load:
    """`with Load(...) as load:` deploys, deletes, moves an alias, makes and revokes keys, and calls."""

    CALLERS = 2

    def __init__(self, service: Service, adapter: Path, known: Acknowledged, seed: int) -> None:
        self._service, self._adapter, self._known = service, adapter, known
        self._random = random.Random(seed)
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._start = known.sizes()
        self._number = seed * 800
        self.problems: list[str] = []
        """Whatever failed before the end was announced."""
        work = (self._deploy, self._move, self._make_keys, *[self._call] * self.CALLERS)
        self._threads = [threading.Thread(target=self._repeat, args=(one,), daemon=True) for one in work]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.announce_end()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)

    def announce_end(self) -> None:
        """From now on requests may fail."""
        self._stopping.set()

    def did_each(self, times: int) -> bool:
        """Whether each kind of change was acknowledged so often."""
        return all(now - before >= times for now, before in zip(self._known.sizes(), self._start, strict=True))

    def _repeat(self, work: Callable[[httpx.Client, httpx.Client], Iterator[None]]) -> None:
        with self._service.client("acme") as tenant, self._service.client() as admin:
            try:
                while not self._stopping.is_set():
                    for _ in work(tenant, admin):
                        self._stopping.wait(PAUSE)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if not self._stopping.is_set():
                    told = error.response.text if isinstance(error, httpx.HTTPStatusError) else ""
                    self.problems.append(f"{work.__name__}: {error!r} {told}")

    def _deploy(self, tenant: httpx.Client, _: httpx.Client) -> Iterator[None]:
        """A version of FUNCTION; a function to stay; one to be deleted at once."""
        made = self._deployed(tenant, FUNCTION)
        self._known.versions[made["version"]] = made["digest"]
        yield
        staying = f"made-{self._number}"
        self._known.functions[staying] = self._deployed(tenant, staying)["digest"]
        yield
        going = f"gone-{self._number}"
        self._deployed(tenant, going)
        tenant.delete(f"/functions/{going}").raise_for_status()
        self._known.deleted.add(going)
        yield

    def _deployed(self, tenant: httpx.Client, name: str) -> dict[str, Any]:
        self._number += 1
        files = variant(self._adapter, self._number)
        return dict(tenant.post(f"/deploy/{name}", files=files).raise_for_status().json())

    def _move(self, tenant: httpx.Client, _: httpx.Client) -> Iterator[None]:
        first, second = self._random.sample(sorted(self._known.versions), 2)
        share = self._random.choice([0.1, 0.5, 0.75])
        target = {"weights": {str(first): share, str(second): 1 - share}}
        self._moved(tenant.put(f"/functions/{FUNCTION}/aliases/prod", json=target))
        yield
        self._moved(tenant.put(f"/functions/{FUNCTION}/aliases/prod", json={"version": second}))
        yield
        self._moved(tenant.post(f"/functions/{FUNCTION}/rollback", json={"alias": "prod"}))
        yield

    def _moved(self, reply: httpx.Response) -> None:
        found = reply.raise_for_status().json()
        self._known.moves[found["changes"]] = found["weights"]

    def _make_keys(self, _: httpx.Client, admin: httpx.Client) -> Iterator[None]:
        """One to stay, and one to be revoked at once."""
        self._known.keys.append(admin.post("/tenants/acme/keys").raise_for_status().json()["key"])
        yield
        made = admin.post("/tenants/acme/keys").raise_for_status().json()
        admin.delete(f"/tenants/acme/keys/{made['key_id']}").raise_for_status()
        self._known.revoked.append(made["key"])
        yield
        self._stopping.wait(10 * PAUSE)

    def _call(self, tenant: httpx.Client, _: httpx.Client) -> Iterator[None]:
        with self._lock:
            self._known.unsure += 1
        reply = tenant.post(f"/invoke/{FUNCTION}:prod", json=CALL).raise_for_status()
        found = reply.json()
        with self._lock:
            self._known.unsure -= 1
            counts = self._known.used.setdefault(found["version"], Counter())
            counts["requests"] += 1
            counts["prompt_tokens"] += found["usage"]["prompt_tokens"]
            counts["completion_tokens"] += found["usage"]["completion_tokens"]
            counts["cold_starts"] += reply.headers["x-garnish-cold-start"] != "none"
        yield


def lost(service: Service, known: Acknowledged) -> list[str]:
    """What of the changes is not there, or not as it was acknowledged."""
    with service.client("acme") as http:
        problems = _lost_versions(http.get(f"/functions/{FUNCTION}").raise_for_status().json(), known)
        problems += _lost_moves(http.get(f"/functions/{FUNCTION}/aliases/prod").raise_for_status().json(), known)
        for name, digest in known.functions.items():
            found = http.get(f"/functions/{name}/versions/1")
            if (found.status_code, found.json().get("digest")) != (200, digest):
                problems.append(f"function {name}: {found.text}")
        problems += [f"{name} is back" for name in known.deleted if http.get(f"/functions/{name}").status_code != 404]
        for keys, status in ((known.keys, 200), (known.revoked, 401)):
            alias = f"/functions/{FUNCTION}/aliases/prod"
            replies = [http.get(alias, headers={"authorization": f"Bearer {key}"}) for key in keys]
            problems += [f"a key answers {reply.status_code}" for reply in replies if reply.status_code != status]
    return problems


def _lost_versions(found: dict[str, Any], known: Acknowledged) -> list[str]:
    listed = {entry["version"]: entry["digest"] for entry in found["versions"]}
    problems = [f"version {number}" for number, digest in known.versions.items() if listed.get(number) != digest]
    if found["aliases"]["latest"] != max(listed):
        problems.append(f"latest is {found['aliases']['latest']}, not {max(listed)}")
    return problems


def _lost_moves(found: dict[str, Any], known: Acknowledged) -> list[str]:
    """An alias forgets its oldest targets; those that are remembered must be the acknowledged ones."""
    targets = [found["weights"], *(past["weights"] for past in found["history"])]
    past = {found["changes"] - back: target for back, target in enumerate(targets)}
    newest = max(known.moves)
    problems = [f"move {newest} of {found['changes']}"] if found["changes"] not in (newest, newest + 1) else []
    return problems + [
        f"move {number} to {target}: {past[number]}"
        for number, target in known.moves.items()
        if number in past and past[number] != target
    ]


def usage(service: Service) -> Usage:
    """What the service has counted for FUNCTION."""
    with service.client("acme") as http:
        rows = http.get("/usage?group_by=function,version").raise_for_status().json()["rows"]
    kinds = ("requests", "prompt_tokens", "completion_tokens", "cold_starts")
    return {row["version"]: Counter({kind: row[kind] for kind in kinds}) for row in rows if row["function"] == FUNCTION}


def miscounted(before: Usage, after: Usage, known: Acknowledged) -> list[str]:
    """Whether a round's calls are counted: each acknowledged one once, each of the others at most once."""
    gained = {version: after[version] - before.get(version, Counter()) for version in after}
    problems = [
        f"version {version}: {counts} acknowledged, {gained.get(version)} counted"
        for version, counts in known.used.items()
        if not counts <= gained.get(version, Counter())
    ]
    asked = sum(counts["requests"] for counts in known.used.values()) + known.unsure
    counted = sum(counts["requests"] for counts in gained.values())
    if counted > asked:
        problems.append(f"{asked} calls, {counted} counted")
    return problems
