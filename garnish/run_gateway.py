"""Runs the gateway as a child process of `garnish up`.

The command is `python -m garnish.run_gateway`, with the settings as JSON on standard input.
"""

from __future__ import annotations

import msgspec

from gateway.config import GatewayConfig
from node_agent.child import die_with_parent, read_config


class GatewayProcessConfig(msgspec.Struct, frozen=True):
    parent: int
    """Process id of `garnish up`. The gateway ends when that process ends."""
    gateway: GatewayConfig


def main() -> None:
    config = read_config(GatewayProcessConfig)
    die_with_parent(config.parent)
    from gateway.server import run

    run(config.gateway)


if __name__ == "__main__":
    main()
