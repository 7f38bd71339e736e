"""Many adapters, called over HTTP as a trace calls functions."""
