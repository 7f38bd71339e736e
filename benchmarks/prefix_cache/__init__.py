"""What the prefix cache brings."""
