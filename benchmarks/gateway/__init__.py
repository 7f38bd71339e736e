"""What the gateway adds to a call, under streams, random keys and many nodes."""
