"""Performance model of this node: measured by a sweep over passes of the real runner, fitted, stored in a file, and
corrected while the node serves. `setup` gives an engine its model; the node's record publishes it."""
