"""How well the performance model describes a runner's passes."""
