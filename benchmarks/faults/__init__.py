"""A service whose parts are killed, hung and emptied."""
