"""How many nodes a pool should have, and who brings it about.

`rounds` looks at the load and the sizes, `sizing` decides, a driver (`local`, `aws`) acts. `garnish autoscale`
(garnish/autoscaling.py) gives them the gateway's picture of the load and the lease by which only one decides.
"""
