"""Cold starts: serving a request while its adapter is not on the device yet.

A request is planned as `wait` (wait for the whole adapter), `pipeline` (compute each layer as it arrives) or `assist`
(CPU workers compute the first layers).
"""
