"""The figures, tables and plots of README and docs, from the committed reports."""
