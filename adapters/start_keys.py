"""Keys that a service makes for itself when it starts without those of its last start.

Where the registry persists and the local state does not (containers with S3), each start makes some. They are bounded:
the first, which was most likely handed on, and the newest stay; the others are forgotten. Keys that users made, or that
the operator has written into a file, are never touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence

from adapters.keys import KeyRecord

START_KEYS = 50
"""Of one tenant, and of administrators, that are kept: as many gateways may have a state of their own."""
START_SECONDS = 10.0
"""In which a start of a release that did not mark its keys made those of the tenants, after the admin key."""


def unmarked_start_keys(keys: Sequence[KeyRecord], admin: Sequence[KeyRecord]) -> set[str]:
    """Returns the ids of a tenant's keys that starts of releases that did not mark them made.

    Each such start made an admin key and, right after it, one key per tenant. Two keys after one admin key can't be
    told from what a user made, and don't count.
    """
    starts = sorted(key.created for key in admin if key.made_by is None)
    following: dict[int, list[str]] = defaultdict(list)
    for key in keys:
        number = bisect_right(starts, key.created) - 1
        if key.made_by is None and number >= 0 and key.created - starts[number] < START_SECONDS:
            following[number].append(key.key_id)
    return {ids[0] for ids in following.values() if len(ids) == 1}


def bounded(keys: tuple[KeyRecord, ...], unmarked: Collection[str], used: Collection[str]) -> tuple[KeyRecord, ...]:
    """Returns the keys without surplus ones of starts; the same object if there are none.

    `unmarked`: ids of keys that a start made although they don't say so. `used`: ids that stay in any case.
    """
    made = sorted(
        (key for key in keys if key.made_by == "start" or key.key_id in unmarked), key=lambda key: key.created
    )
    surplus = {key.key_id for key in made[1 : 1 - START_KEYS]} - set(used)
    return tuple(key for key in keys if key.key_id not in surplus) if surplus else keys
