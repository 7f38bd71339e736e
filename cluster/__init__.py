"""Contracts between gateway and nodes: versioned messages, errors, the tokenizer, the cluster secret and cluster state.

Nothing here imports torch, a web framework or the other rooms; both sides import it and never each other.
"""
