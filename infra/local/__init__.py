"""The backend `local`: nodes as processes of this host.

Terraform calls `create` and `stop` (garnish/pool_node.py) through `local-exec`; `processes` finds and ends what they
started, by pid file or by the tag in its environment, and never anything else.
"""
