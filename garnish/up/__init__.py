"""`garnish up`: `prepare` checks everything and makes the keys, `run` keeps the processes alive until Ctrl-C.

Meanwhile `opening`, on a thread of its own, waits until the service is ready and deploys the declared functions.
"""
