"""Discrete-event simulation of many nodes.

Requests are placed by the production scheduler. Durations on the nodes come from performance models.
"""
