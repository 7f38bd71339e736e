"""How well calls are forecast."""
