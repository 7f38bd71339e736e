"""Routing of requests to nodes. `policy` defines the protocol and the registry of policies; each policy has its own
module."""
