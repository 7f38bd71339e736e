"""Autoscaling of pools.

`rounds` reads the load and the sizes, `sizing` decides, a driver (`local`, `aws`) acts. `garnish autoscale`
(garnish/autoscaling.py) gives them the gateway's snapshot of the load, and the lease of the one autoscaler that leads.
"""
