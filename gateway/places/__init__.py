"""Shared pools of a gateway worker, each with places for tenants. `pools` lists all of them."""
