"""Every figure in the documentation comes from a script here. Each takes --quick, --json FILE and --seed."""

import os

from node_agent.cores import SPIN_LIMIT

# Studies run the engine in their own process, and its threads are to wait for each other as a node's do: read by OpenMP
# when torch is loaded.
for _name, _value in SPIN_LIMIT.items():
    os.environ.setdefault(_name, _value)
