"""Forecasts of which functions will be called soon (Predictive-LoRA, section III.A)."""
