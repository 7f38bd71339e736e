"""Placement: `policy` names the protocol and the registry of policies; each policy has its own module."""
