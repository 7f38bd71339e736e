"""Effect of the prefix cache on first tokens and rates."""
