"""Discrete-event simulation of many nodes.

Requests are routed by the production scheduler. Durations on the nodes come from performance models.
"""
