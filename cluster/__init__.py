"""Contracts between gateway and nodes: versioned messages, errors, the tokenizer, the cluster secret and cluster state.

This package imports neither torch nor a web framework nor the other packages. The gateway and the nodes both import it,
and never each other.
"""
