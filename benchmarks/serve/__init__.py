"""Eight requests at once, in process and over HTTP; a load generator for any server."""
