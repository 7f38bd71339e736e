"""Every figure in the documentation comes from a script here. Each takes --quick, --json FILE and --seed."""
