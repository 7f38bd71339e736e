"""Performance model of this node: measured by a sweep over passes of the real runner, fitted, kept in a file, and
corrected while the node serves. `setup` is where an engine gets its model; the record of the node publishes it."""
