"""`garnish up`: `prepare` checks the settings and creates keys; `run` keeps the processes running until Ctrl-C.

A thread of `run` waits until the service is ready, and then deploys the declared functions.
"""
