"""How many nodes a pool should have: `sizing` decides from what the gateway sees, a driver brings it about.

Not a command yet: nothing calls this until `garnish autoscale` does.
"""
