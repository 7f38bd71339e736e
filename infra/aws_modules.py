"""The part of the root module that belongs to the backend `aws`: provider, pools, the registry's bucket."""

from __future__ import annotations

from typing import Any

import msgspec

from infra.errors import InfraError
from infra.stack import Stack

Block = dict[str, Any]


class AwsParts(msgspec.Struct, frozen=True):
    modules: dict[str, Block] = {}
    providers: Block = {}
    required_providers: Block = {}


def aws_parts(stack: Stack) -> AwsParts:
    """Empty for a stack without resources in AWS."""
    if stack.aws_pools:
        raise InfraError("node_pools: the backend aws is not built yet in this version")
    return AwsParts()
