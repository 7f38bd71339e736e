"""A load step on a pool of local nodes."""
