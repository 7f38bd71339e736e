"""A batch over many adapters, grouped by adapter or in file order."""
