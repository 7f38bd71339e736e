"""Prewarming: adapters that nodes load before they are called, by manual order, policy, schedule or forecast."""
