"""Metering: what each finished call used, counted once.

A call's meter adds to the ledger before the end of its reply goes out; the ledger writes a line to its journal on this
host's disk and, every few seconds, its sums by tenant and hour to the registry, where reports read them.
"""
