"""The command line: `main` assembles one module per command."""
