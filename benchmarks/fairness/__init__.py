"""Shares of tenants and SLO attainment in one engine."""
