"""Metering: what each completed call used, counted exactly once.

A call's meter adds to the ledger before the end of the reply is sent. The ledger appends a line to its journal on the
local disk. Every few seconds it writes its sums by tenant and hour to the registry, which reports read.
"""
