"""Discrete events over many nodes: the production scheduler before nodes that are timed by performance models."""
