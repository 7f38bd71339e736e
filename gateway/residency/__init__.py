"""Prewarming: adapters that nodes are to have ready before they are called, by hand, by schedule, and by forecast."""
