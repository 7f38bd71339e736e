"""Runs a node as a child process of `garnish up`.

The command is `python -m garnish.run_node`, with the settings as JSON on standard input.
"""

from __future__ import annotations

import sys

import msgspec

from node_agent.child import die_with_parent, read_config
from node_agent.config import NodeConfig
from node_agent.supervisor import run


class NodeProcessConfig(msgspec.Struct, frozen=True):
    parent: int
    """Process id of `garnish up`. The node ends when that process ends."""
    node: NodeConfig


def main() -> int:
    config = read_config(NodeProcessConfig)
    die_with_parent(config.parent)
    return run(config.node)


if __name__ == "__main__":
    sys.exit(main())
