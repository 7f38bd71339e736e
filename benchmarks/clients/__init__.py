"""Other projects' load generators against a service."""
