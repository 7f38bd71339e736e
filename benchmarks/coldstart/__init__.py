"""Cold starts over HTTP: by default settings, and with a registry far away."""
