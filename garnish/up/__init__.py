"""`garnish up`: `prepare` checks everything and makes the keys, `run` keeps the processes alive until Ctrl-C.

Meanwhile a thread of `run` waits until the service is ready and deploys the declared functions.
"""
