"""Routing policies, simulated and behind the real gateway; how near the simulator comes to real nodes."""
