"""Stands for the program that starts and ends nodes: notes each call in `<state>/calls`, one line per call.

It fails for a node of which a file `<state>/fail-NODE` exists. While `<state>/wait` exists it takes until
`<state>/go` does.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

action, text = sys.argv[1:]
spec = json.loads(text)
state = Path(spec["state"])
with (state / "calls").open("a") as calls:
    calls.write(f"{action} {spec['node']}\n")
while (state / "wait").exists() and not (state / "go").exists():
    time.sleep(0.02)
if (state / f"fail-{spec['node']}").exists():
    sys.exit(f"{spec['node']} can't start: no such model")
