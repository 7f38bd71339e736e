"""Studies of a GPU: correctness, steps, cold starts, a service; and the planner replayed on its reports."""
