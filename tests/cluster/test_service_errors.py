from __future__ import annotations

import pytest

from cluster.errors import STATUS, ServiceError


def test_every_type_has_an_error_status() -> None:
    assert all(400 <= ServiceError(kind, "m").status < 600 for kind in STATUS)


def test_unknown_types_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="not_found"):
        ServiceError("nope", "m")
